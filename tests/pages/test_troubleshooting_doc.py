"""docs/troubleshooting.md: each sentence in it is one that KVX says, and each way out leads out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kvx_adapters.cli.commands import app
from kvx_adapters.vllm.spec import minor
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    KvxError,
    ScaleDesc,
    describe,
    migrate,
    write_kv,
    write_layers,
)
from kvx_core.snapshot import Precision, Section, Snapshot, read_key
from kvx_core.stores import Directory, PrefixStore
from kvx_core.stores.inventory import Inventory
from kvx_core.types import DType
from tests.documents import Document
from tests.snapshot_files import kind_in, rewritten, with_row

SENTENCES = [
    re.sub(r"^\| `|` \|.*$", "", line)
    for line in Document("troubleshooting.md").text.splitlines()
    if line.startswith("| `")
]
FACTS: dict[str, Any] = {
    "fingerprint": "m",
    "rotary": "half",
    "rotary_dim": 64,
    "rope_applied": True,
    "first_kv_head": 0,
}


def cache(
    heads: int = 2, dtype: torch.dtype = torch.float32, dim: int = 64, blocks: int = 8
) -> CacheDesc:
    k, v = torch.zeros(2, blocks, 16, heads, dim, dtype=dtype)
    return CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))


def view(desc: CacheDesc | None = None, **facts: Any) -> CacheView:
    return CacheView((desc or cache(),), CacheFacts(**FACTS | facts))


def of(*layers: CacheDesc) -> CacheView:
    return CacheView(layers, CacheFacts(**FACTS))


def k_alone(desc: CacheDesc) -> CacheDesc:
    return CacheDesc.from_kv(desc.k, None)


def write_two(layers: list[CacheDesc]) -> None:
    """Two tokens into each layer, with one slot mapping."""
    new = [torch.zeros(2, 2, 64) for _ in layers]
    write_layers(layers, new, new, slots=[3, 4])


def a_head(src: CacheView, dst: CacheView, head_start: int) -> None:
    src = replace(src, facts=replace(src.facts, first_kv_head=None))
    dst = replace(dst, facts=src.facts)
    at = {"block_table": [[1]], "head_start": head_start}
    migrate(src.at(**at), dst.at(**at), [3], num_heads=1)


def dense_rows(num_rows: int) -> None:
    """Sequences to a dense cache of two."""
    k, v = torch.zeros(2, 2, 16, 2, 64)
    layer = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
    table = [[row] for row in range(num_rows)]
    dst = CacheView((layer,), CacheFacts(**FACTS), dense=True)
    migrate(view().at(block_table=table), dst, [3] * num_rows)


def move(src: CacheView, dst: CacheView, block: int = 1, num_tokens: int = 3) -> None:
    migrate(src.at(block_table=[[block]]), dst.at(block_table=[[1]]), [num_tokens])


def moved_memory() -> None:
    tensor = torch.zeros(8, 16, 2, 64)
    desc = CacheDesc.from_kv(describe(tensor, "BLOCK_NHD"), None)
    tensor.untyped_storage().resize_(0)
    write_kv(desc, torch.zeros(1, 2, 64), None, slots=[5])


def described(tensor: Any, other: Any = None) -> None:
    layout = "BLOCK_NHD"
    v = None if other is None else describe(other, layout)
    CacheDesc.from_kv(describe(tensor, layout), v).validate()


def read_only() -> None:
    array = np.zeros((8, 16, 2, 64), np.float32)
    array.flags.writeable = False
    desc = CacheDesc.from_kv(describe(array, "BLOCK_NHD"), None)
    write_kv(desc, np.zeros((1, 2, 64), np.float32), None, slots=[5])


def key_file(path: Path, size: int, mode: int) -> None:
    (path / "key").write_bytes(bytes(size))
    (path / "key").chmod(mode)
    read_key(path / "key")


def store(path: Path, **options: Any) -> None:
    usual = {"fingerprint": "f", "num_layers": 1, "total_kv_heads": 2, "chunk_tokens": 16}
    PrefixStore(Directory(path), precision=Precision.of(DType.F32), **usual | options)


def saved(path: Path) -> Path:
    dense = CacheView((cache(),), CacheFacts(**FACTS), dense=True)
    found = Snapshot.capture(range(9), [Section((0,), dense, None)])
    assert found is not None
    found.save(path / "file")
    return path / "file"


def other_chunks(path: Path) -> None:
    store(path)
    store(path, chunk_tokens=32)


def earlier_format(path: Path) -> None:
    (path / "kvx-store.json").write_text(json.dumps({"format": 1, "chunk_tokens": 16}))
    store(path)


def small_chunks(path: Path) -> None:
    (path / "kvx-store.json").write_text(json.dumps({"format": 3, "chunk_tokens": 1}))
    store(path, chunk_tokens=None)


def another_key(path: Path) -> None:
    store(path)
    store(path, key=b"k" * 32)


def the_same_key(path: Path) -> None:
    store(path, key=b"k" * 32)
    store(path, key=[b"n" * 32, b"k" * 32])


def a_file(path: Path) -> None:
    (path / "file").touch()
    Directory(path / "file")


def of_a_later_version(path: Path) -> None:
    file = saved(path)
    Snapshot.open(rewritten(file, with_row(kind_in(file), "layers.0.k", coding="later")))


def damaged(path: Path) -> None:
    raw = bytearray(saved(path).read_bytes())
    raw[-1] ^= 1
    (path / "file").write_bytes(raw)
    Snapshot.open(path / "file").read([0])


CASES: list[Callable[[Path], object]] = [
    lambda path: move(view(), view(rotary="interleaved")),
    lambda path: move(view(fingerprint=None), view(fingerprint=None)),
    lambda path: move(view(), view(fingerprint="n")),
    lambda path: move(view(), view(), block=8),
    lambda path: move(view(), view(), num_tokens=17),
    lambda path: move(CacheView(view().layers, view().facts, holds=lambda: 2), view()),
    lambda path: move(view(), view(cache(heads=4))),
    lambda path: move(view(), view(cache(dtype=torch.uint8))),
    lambda path: (lambda one: move(one, one))(view()),
    lambda path: migrate(view(), view(), [3]),
    lambda path: move(view(), of(cache(), cache())),
    lambda path: move(of(cache(), cache(blocks=5)), of(cache(), cache(blocks=5))),
    lambda path: write_two([cache(), cache(blocks=5)]),
    lambda path: move(view(), of(k_alone(cache()))),
    lambda path: (lambda one: move(of(cache(), cache()), of(one, one)))(cache()),
    lambda path: a_head(view(), view(), head_start=2),
    lambda path: dense_rows(3),
    lambda path: move(view(), view(cache(dim=128))),
    lambda path: migrate(view().at(block_table=[[1]]), view().at(block_table=[[2], [3]]), [3]),
    lambda path: write_kv(cache(), *torch.zeros(2, 1, 2, 64), slots=[128]),
    lambda path: moved_memory(),
    lambda path: describe(torch.zeros(3, 4, 5, 6), "NHD"),
    lambda path: describe(torch.zeros(3, 4, 5, 6, dtype=torch.float64), "BLOCK_NHD"),
    lambda path: described(torch.zeros(16, 2, 64)),
    lambda path: described(torch.zeros(8, 16, 2, 64), torch.zeros(8, 32, 2, 64)),
    lambda path: described(torch.zeros(1, 16, 2, 64).expand(8, 16, 2, 64)),
    lambda path: described(*[torch.zeros(8, 16, 2, 64)] * 2),
    lambda path: read_only(),
    lambda path: CacheView((cache(),), CacheFacts(**FACTS), k_scales=(0.5,), v_scales=(0.5,)),
    lambda path: view().at(block_table=torch.zeros(2, 4, dtype=torch.int32).t()),
    lambda path: minor("0.19.1"),
    other_chunks,
    earlier_format,
    a_file,
    lambda path: store(path, format="q9"),
    lambda path: None,  # a sentence of the command, below
    lambda path: Inventory(Directory(path)),
    small_chunks,
    another_key,
    lambda path: key_file(path, 32, 0o644),
    lambda path: key_file(path, 16, 0o600),
    of_a_later_version,
    damaged,
]


def with_heads() -> None:
    src, dst = view(first_kv_head=2), view(cache(heads=4))
    at = {"block_table": [[1]]}
    migrate(src.at(**at), dst.at(**at, head_start=2), [3], num_heads=2)


def fp8_bytes() -> None:
    tensor = torch.zeros(8, 16, 2, 64, dtype=torch.uint8)
    desc = CacheDesc.from_kv(
        *[describe(tensor, "BLOCK_NHD", dtype="float8_e4m3fn")] * 2, shared_kv=True
    )
    move(view(), CacheView((desc,), CacheFacts(**FACTS)))


def other_blocks_of_one_pool() -> None:
    one = view()
    migrate(one.at(block_table=[[2]]), one.at(block_table=[[1]]), [3])


def halves_of_one_tensor() -> None:
    """K and V lie side by side in the last axis."""
    k, v = torch.zeros(8, 16, 2, 128).split(64, dim=-1)
    move(view(), view(CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))))


def described_again() -> None:
    tensor = torch.zeros(8, 16, 2, 64)
    tensor.untyped_storage().resize_(0)
    desc = CacheDesc.from_kv(describe(torch.zeros(8, 16, 2, 64), "BLOCK_NHD"), None)
    write_kv(desc, torch.zeros(1, 2, 64), None, slots=[5])


def as_a_source() -> None:
    array = np.zeros((8, 16, 2, 64), np.float32)
    array.flags.writeable = False
    src = CacheView((CacheDesc.from_kv(describe(array, "BLOCK_NHD"), None),), CacheFacts(**FACTS))
    desc = CacheDesc.from_kv(describe(torch.zeros(8, 16, 2, 64), "BLOCK_NHD"), None)
    move(src, CacheView((desc,), CacheFacts(**FACTS)))


def chunks_left_out(path: Path) -> None:
    store(path)
    store(path, chunk_tokens=None)


def another_directory(path: Path) -> None:
    (path / "kvx-store.json").write_text(json.dumps({"format": 1, "chunk_tokens": 16}))
    store(path / "new")


def listed(path: Path) -> None:
    store(path)
    result = CliRunner().invoke(app, ["store", "ls", str(path)])
    assert result.exit_code == 0, result.output


def given_chunks(path: Path) -> None:
    (path / "kvx-store.json").write_text(json.dumps({"format": 3, "chunk_tokens": 1}))
    with pytest.raises(KvxError):
        store(path, chunk_tokens=None)
    (path / "kvx-store.json").unlink()
    store(path, chunk_tokens=16)


def saved_again(path: Path) -> None:
    with pytest.raises(KvxError):
        damaged(path)
    Snapshot.open(saved(path)).read([0])


WAYS_OUT: list[Callable[[Path], object]] = [
    lambda path: move(view(hadamard=False), view(rotary="interleaved", hadamard=False)),
    lambda path: migrate(
        view(fingerprint=None).at(block_table=[[1]]),
        view(fingerprint=None).at(block_table=[[1]]),
        [3],
        same_model=True,
    ),
    lambda path: move(view(), view()),
    lambda path: move(view(), view(), block=7),
    lambda path: move(view(), view(), num_tokens=16),
    lambda path: move(
        CacheView(view().layers, view().facts, holds=lambda: 2), view(), num_tokens=2
    ),
    lambda path: with_heads(),
    lambda path: fp8_bytes(),
    lambda path: other_blocks_of_one_pool(),
    lambda path: migrate(
        CacheView((cache(),), CacheFacts(**FACTS), dense=True), view().at(block_table=[[5]]), [3]
    ),
    lambda path: move(of(cache(), cache()), of(cache(), cache())),
    lambda path: [move(of(cache(blocks=n)), of(cache(blocks=n))) for n in (8, 5)],
    lambda path: [write_two([cache(blocks=n)]) for n in (8, 5)],
    lambda path: move(of(k_alone(cache())), of(k_alone(cache()))),
    lambda path: move(view(), view()),
    lambda path: a_head(view(), view(), head_start=1),
    lambda path: dense_rows(2),
    lambda path: halves_of_one_tensor(),
    lambda path: migrate(
        view().at(block_table=[[1], [4]]), view().at(block_table=[[2], [3]]), [3, 5]
    ),
    lambda path: write_kv(cache(), *torch.zeros(2, 1, 2, 64), slots=[127]),
    lambda path: described_again(),
    lambda path: describe(torch.zeros(3, 4, 5, 6), "BLOCK_NHD"),
    lambda path: describe(torch.zeros(3, 4, 5, 6, dtype=torch.float64).float(), "BLOCK_NHD"),
    lambda path: described(torch.zeros(8, 16, 128).unflatten(-1, (2, 64))),
    lambda path: described(torch.zeros(8, 16, 2, 64), torch.zeros(8, 16, 2, 64)),
    lambda path: described(torch.zeros(8, 16, 2, 64)),
    lambda path: described(*torch.zeros(2, 8, 16, 2, 64)),
    lambda path: as_a_source(),
    lambda path: CacheView(
        (cache(),),
        CacheFacts(**FACTS),
        k_scales=(ScaleDesc.of(0.5),),
        v_scales=(ScaleDesc.of(0.5),),
    ),
    lambda path: view().at(block_table=torch.zeros(2, 4, dtype=torch.int32).t().contiguous()),
    lambda path: minor("0.20.0"),
    chunks_left_out,
    another_directory,
    lambda path: Directory(path / "store"),
    lambda path: store(path, format="q8_0"),
    listed,
    listed,
    given_chunks,
    the_same_key,
    lambda path: key_file(path, 32, 0o600),
    lambda path: key_file(path, 4096, 0o600),
    lambda path: Snapshot.open(saved(path)),  # of the version that is here
    saved_again,
]


def said(case: Callable[[Path], object], path: Path) -> str:
    try:
        case(path)
    except KvxError as error:
        return str(error)
    result = CliRunner().invoke(app, ["store", "ls", str(path / "nowhere")])
    assert result.exit_code == 2
    return re.sub(r"\s+", " ", result.stderr)


@pytest.mark.parametrize("i", range(max(len(SENTENCES), len(CASES))))
def test_each_sentence_is_said(i: int, tmp_path: Path) -> None:
    expected = re.escape(SENTENCES[i]).replace(r"\.\.\.", ".*")
    assert re.search(expected, said(CASES[i], tmp_path), re.S), said(CASES[i], tmp_path)


@pytest.mark.parametrize("i", range(max(len(SENTENCES), len(WAYS_OUT))))
def test_each_way_out_leads_out(i: int, tmp_path: Path) -> None:
    assert SENTENCES[i]
    WAYS_OUT[i](tmp_path)
