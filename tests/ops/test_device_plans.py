"""Plans of caches on a device, and end_ranges of them: the kernels run on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import native

SCRIPT = """
import ctypes, math, os, sys
from dataclasses import replace
import numpy as np
import torch
from kvx_core import *
from kvx_core.ops.end_ranges import cut, cut_of, end_ranges

seed, is_full = int(sys.argv[1]), os.environ.get("HOSTGRID_FULL") == "1"
torch.manual_seed(seed)
H, D = seed, 8

def moved(desc):
    return replace(desc, memory=Memory.DEVICE)

def view(tensors, layout, wrap):
    layers = [
        CacheDesc.from_kv(wrap(describe(k, layout)), wrap(describe(v, layout)))
        for k, v in zip(tensors[::2], tensors[1::2])
    ]
    return CacheView(tuple(layers), CacheFacts())

def copy(ranges):
    for one in ranges:
        src, dst, n = (int(one[name]) for name in ("src", "dst", "bytes"))
        ctypes.memmove(dst, src, n) if src else ctypes.memset(dst, 0, n)

def refuses(sentence, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except InvalidArgumentError as error:
        assert str(error).startswith(sentence), error
    else:
        raise AssertionError(f"not refused: {sentence}")

nhd = [torch.randn(5, 4, H, D) for _ in range(4)]
hnd = [torch.randn(6, H, 3, D) for _ in range(4)]
src_table, dst_table = torch.tensor([[4, 1], [0, -1]]), torch.tensor([[2, 0, 3], [5, 4, 1]])
lens = torch.tensor([7, seed])
expected = [t.clone() for t in hnd]
migrate(
    view(nhd, "BLOCK_NHD", lambda d: d).at(src_table),
    view(expected, "BLOCK_HND", lambda d: d).at(dst_table),
    lens,
    same_model=True,
)
src, dst = view(nhd, "BLOCK_NHD", moved), view(hnd, "BLOCK_HND", moved)

# end_ranges: the host lists both ends from tables of its own, and the lists match.
ends = [end_ranges(v.at(t), lens) for v, t in ((src, src_table), (dst, dst_table))]
size = math.gcd(*map(cut_of, ends))
from_, to = (cut(ranges, size) for ranges in ends)
assert len(from_) and np.array_equal(from_["offset"], to["offset"])
assert np.array_equal(from_["plane"], to["plane"])
before = [t.clone() for t in hnd]
for a, b in zip(from_, to):
    ctypes.memmove(int(b["address"]), int(a["address"]), size)
assert all(torch.equal(a, b) for a, b in zip(hnd, expected))
refuses(
    "end.block_table.memory is DEVICE, expected HOST, where the host reads them to list ranges",
    end_ranges, src.at(moved(BlockTable.of(src_table))), lens,
)
refuses("seq_lens.memory is DEVICE", end_ranges, src.at(src_table), moved(SeqLens.of(lens)))

# A migration: its runs take what lies on the device, its ranges what the host can read.
for tensor, old in zip(hnd, before):
    tensor.copy_(old)
on_device = [moved(BlockTable.of(t)) for t in (src_table, dst_table)]
empty = moved(BlockTable.of(torch.zeros(0, 2, dtype=torch.int64)))
plan = Plan.migrate(src.at(empty), dst.at(empty), same_model=True)
ranges = plan.ranges(lens, src_block_table=src_table, dst_block_table=dst_table)
assert all(torch.equal(a, b) for a, b in zip(hnd, before))
copy(ranges)
assert all(torch.equal(a, b) for a, b in zip(hnd, expected))
for tensor, old in zip(hnd, before):
    tensor.copy_(old)
found = moved(SeqLens.of(lens))
plan.run(found, src_block_table=on_device[0], dst_block_table=on_device[1])
device_status(0)
assert all(torch.equal(a, b) for a, b in zip(hnd, expected))
info = plan.describe(found, src_block_table=on_device[0], dst_block_table=on_device[1])
assert info.on_device and info.num_launches == 1 and info.num_moved == int(lens.sum())
speed = info.copy_bytes_per_second
if is_full:  # no room to measure it
    assert speed is None and info.seconds is None and "time unknown" in repr(info), info
else:
    assert speed > 1e7 and info.seconds == info.bytes_written / speed, info
    assert plan.info.copy_bytes_per_second == speed  # measured once
refuses(
    "src_block_table.memory is DEVICE, expected HOST, where the host reads them to list ranges",
    plan.ranges, lens, src_block_table=on_device[0], dst_block_table=dst_table,
)
refuses(
    "src_block_table.memory is HOST, expected DEVICE, where src.layers[0].k is",
    plan.describe, found, src_block_table=src_table, dst_block_table=on_device[1],
)

unified = [
    replace(v, layers=tuple(CacheDesc.from_kv(
        *(replace(t, memory=Memory.UNIFIED) for t in (layer.k, layer.v))
    ) for layer in v.layers))
    for v in (src, dst)
]
either = [replace(t, memory=Memory.UNIFIED) for t in on_device]
anywhere = Plan.migrate(unified[0].at(either[0]), unified[1].at(either[1]), found, same_model=True)
assert anywhere.info.on_device and anywhere.info.copy_bytes_per_second is None

# A write and a gather.
layer = src.layers[0]
key, value = torch.randn(2, 6, H, D)
slots = torch.tensor([3, 19, -1, 0, 8, 11])
tokens = moved(describe(key, "BLOCK_CUSTOM")), moved(describe(value, "BLOCK_CUSTOM"))
write = Plan.write(layer, *tokens)
before = [t.clone() for t in nhd]
write.run(*tokens, moved(SlotMapping.of(slots)))
device_status(0)
written = [t.clone() for t in nhd]
for tensor, old in zip(nhd, before):
    tensor.copy_(old)
copy(write.ranges(*tokens, slots))
assert all(torch.equal(a, b) for a, b in zip(nhd, written))
assert not torch.equal(nhd[0], before[0])
info = write.describe(*tokens, moved(SlotMapping.of(slots)))
assert info.on_device and (info.num_moved, info.num_null_dst) == (5, 1)
refuses("slots.memory is HOST, expected DEVICE", write.describe, *tokens, slots)
on_dev = moved(SlotMapping.of(slots))
refuses("slots.memory is DEVICE, expected HOST", write.ranges, *tokens, on_dev)
out = torch.zeros(2, 2, 8, H, D)
outs = [moved(describe(t, "BLOCK_CUSTOM")) for t in out]
gather = Plan.gather(layer, *outs)
gather.run(*outs, on_device[0], found)
device_status(0)
gathered = out.clone()
assert gathered.any()
out.zero_()
copy(gather.ranges(*outs, src_table, lens))
assert torch.equal(out, gathered)
assert gather.describe(*outs, on_device[0], found).num_moved == int(lens.sum())
"""


@pytest.mark.parametrize(("seed", "full"), [(1, "0"), (2, "1"), (3, "0")])
def test_plans_of_caches_on_a_device(seed: int, full: str) -> None:
    """full: the device has no room to measure how fast it copies."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(seed)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"KVX_LIBRARY": str(native.hostgrid_library()), "HOSTGRID_FULL": full},
    )
    assert found.returncode == 0, found.stderr
