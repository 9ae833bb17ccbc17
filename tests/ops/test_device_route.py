"""write_kv, gather_kv, plans and migrate of descriptors on a device: the kernels run on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import native

SCRIPT = """
import sys
from dataclasses import replace
import torch
from kvx_core import *
from kvx_core.ops.migrate import copy_tokens

seed = int(sys.argv[1])
torch.manual_seed(seed)
DEVICE = Memory.DEVICE
facts = CacheFacts(fingerprint="x", rotary="none", rotary_dim=0, rope_applied=False)

def moved(desc):
    return replace(desc, memory=DEVICE)

def tensor(t, layout="BLOCK_CUSTOM"):
    return moved(describe(t, layout))

def ends():
    return torch.randn(2, 5, 4, 3, 7)

def cache(kv, wrap):
    return CacheDesc.from_kv(*(wrap(describe(t, "BLOCK_NHD")) for t in kv))

on_host = ends()
on_dev, before = on_host.clone(), on_host.clone()
host, dev = cache(on_host, lambda d: d), cache(on_dev, moved)
key, value = torch.randn(2, 6, 3, 7)
slots = torch.tensor([3, 19, -1, 0, 8, 11])
write_kv(host, key, value, slots)
tokens = tensor(key), tensor(value), moved(SlotMapping.of(slots))
for call in (lambda *t: write_kv(dev, *t), WritePlan(dev, *tokens[:2])):
    for _ in range(2):
        on_dev.copy_(before)
        call(*tokens)
        device_status(0)
        assert torch.equal(on_host, on_dev)

table, lens = torch.tensor([[4, 1], [0, 2]]), torch.tensor([7, 2])
out, got = torch.zeros(2, 2, 8, 3, 7), torch.zeros(2, 2, 8, 3, 7)
gather_kv(host, table, lens, out=tuple(out))
on_device = moved(BlockTable.of(table)), moved(SeqLens.of(lens))
descs = tuple(tensor(t) for t in got)
for max_seq_len in (None, 8):
    assert gather_kv(dev, *on_device, out=descs, max_seq_len=max_seq_len) == descs
    assert torch.equal(out, got)
    got.zero_()
GatherPlan(dev, *descs)(*descs, *on_device)
assert torch.equal(out, got)
try:
    gather_kv(dev, on_device[0], lens, out=descs)
except InvalidArgumentError as error:
    assert str(error).startswith("seq_lens.memory is HOST, expected DEVICE, where cache.k is")
else:
    raise AssertionError("lengths on the host are taken")

to_host = ends()
to_dev, into = to_host.clone(), torch.tensor([[2, 0], [3, 4]])
source = CacheView((host,), facts).at(table)
target = CacheView((cache(to_host, lambda d: d),), facts).at(into)
from_dev = CacheView((dev,), facts).at(on_device[0])
at_dev = CacheView((cache(to_dev, moved),), facts).at(moved(BlockTable.of(into)))
for n in ([7, 2], [1, 8], [0, 0]):
    num_bytes = migrate(source, target, torch.tensor(n))
    found = moved(SeqLens.of(torch.tensor(n)))
    assert migrate(from_dev, at_dev, found) == num_bytes
    device_status(0)
    assert torch.equal(to_host, to_dev)
    copy_tokens(from_dev, at_dev, found, stream=0)
    assert torch.equal(to_host, to_dev)
# Lists are nobody's memory: KVX puts them where the call reads them.
lists = table.tolist(), into.tolist()
by_list = (
    CacheView((dev,), facts).at(lists[0], starts=[0, 0]),
    CacheView(at_dev.view.layers, facts).at(lists[1]),
)
for kv in (on_host, on_dev):
    kv.add_(1)
assert migrate(source, target, [6, 3]) == migrate(*by_list, [6, 3])
assert torch.equal(to_host, to_dev)
assert verify(*by_list, [6, 3]) == verify(source, target, [6, 3])
to_dev[:, 3, 0, 0] += 1
found = verify(*by_list, [6, 3]).difference
assert (found.sequence, found.token) == (1, 0), found
for kv in (on_host, on_dev):
    kv.add_(1)
with Plan.migrate(*by_list, [4, 4], same_model=True) as plan:
    plan.run()
    plan.run([7, 1])
    plan.run([1, 7], src_block_table=lists[0])
migrate(source, target, [7, 7], same_model=True)
assert torch.equal(to_host, to_dev)
write_kv(host, key, value, slots)
write_kv(dev, *tokens[:2], slots.tolist())
assert torch.equal(on_host, on_dev)
some = [7, 2, -1, 4, 5, 6]
WriteLayersPlan([dev])([tokens[0]], [tokens[1]], some)
WriteLayersPlan([host])([key], [value], some)
assert torch.equal(on_host, on_dev)
gather_kv(host, table, lens, out=tuple(out))
got.zero_()
gather_kv(dev, lists[0], [7, 2], out=descs)
assert torch.equal(out, got)
device_status(0)

try:
    migrate(from_dev, at_dev, torch.tensor([1, 1]))
except InvalidArgumentError as error:
    assert str(error).startswith("seq_lens.memory is HOST, expected DEVICE, where src.layers[0]")
else:
    raise AssertionError("lengths on the host are taken")
"""


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_device_gets_what_the_host_gets(seed: int) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(seed)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"KVX_LIBRARY": str(native.hostgrid_library())},
    )
    assert found.returncode == 0, found.stderr
