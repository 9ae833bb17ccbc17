"""The examples of docs/plans.md, run as they stand."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

import kvx_core
from kvx_core import CacheDesc, CacheFacts, CacheView, Plan, describe
from kvx_core.ops.end_ranges import cut, cut_of, end_ranges
from kvx_core.types import Layout
from tests.documents import Document

PAGE = Document("plans.md")

C_PROGRAM = r"""
#include <stdio.h>
#include <string.h>
#include "kvx/kvx_ext.h"

static int fail(const char *why) { return puts(why), 1; }

static kvx_tensor_desc_t tensor(float *data, kvx_layout_t layout) {
  kvx_tensor_desc_t made = {sizeof made, KVX_DTYPE_F32, layout, KVX_MEMORY_HOST, 4};
  const int64_t shape[4] = {3, 2, 2, 2}, stride[4] = {8, 4, 2, 1};
  memcpy(made.shape, shape, sizeof shape), memcpy(made.stride, stride, sizeof stride);
  made.data = data;
  return made;
}

int main(void) {
  static float a[24], b[24];
  const int64_t one[1] = {1}, two[1] = {2}, none = 0, length = 2;
  kvx_cache_desc_t from = {sizeof from, 3, 2, 2, 2, tensor(a, KVX_LAYOUT_BLOCK_NHD)};
  kvx_cache_desc_t to = {sizeof to, 3, 2, 2, 2, tensor(b, KVX_LAYOUT_BLOCK_HND)};
  from.v.size = to.v.size = sizeof from.v;
  const kvx_cache_desc_t *const src_layers[] = {&from}, *const dst_layers[] = {&to};
  kvx_block_table_t table = {sizeof table, KVX_BLOCK_TABLE_PACKED, KVX_DTYPE_S64};
  table.seq_count = table.max_blocks_per_seq = table.indices_count = 1;
  table.indices = one;
  kvx_block_table_t other_src = table, other_dst = table;
  other_dst.indices = two;
  kvx_seq_lens_t lens = {sizeof lens, KVX_DTYPE_S64, 1, &none}, other_lens = lens;
  other_lens.lengths = &length;
  kvx_span_t src = {sizeof src, 1, src_layers, &table}, dst = {sizeof dst, 1, dst_layers, &table};
  kvx_migrate_desc_t migrate = {sizeof migrate};
  migrate.seq_lens = &lens, migrate.src = &src, migrate.dst = &dst;
  for (int i = 0; i < 24; ++i) a[i] = (float)i;
  %s
  if (status != KVX_STATUS_OK) return fail(kvx_last_error());
  for (int i = 0; i < 24; ++i) printf("%%g ", b[i]);
  return 0;
}
"""


def views() -> tuple[CacheView, CacheView]:
    generator = torch.Generator().manual_seed(1)

    def view(shape: tuple[int, ...], layout: Layout) -> CacheView:
        tensors = [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]
        layers = [
            CacheDesc.from_kv(describe(k, layout), describe(v, layout))
            for k, v in (tensors[:2], tensors[2:])
        ]
        return CacheView(tuple(layers), CacheFacts())

    return view((9, 16, 8, 128), Layout.BLOCK_NHD), view((6, 8, 32, 128), Layout.BLOCK_HND)


def test_python_examples(capsys: object) -> None:
    src, dst = views()
    names: dict[str, Any] = {"src": src, "dst": dst, "kvx_core": kvx_core, "math": math}
    names |= {"end_ranges": end_ranges, "cut": cut, "cut_of": cut_of, "Plan": Plan}
    stored = [torch.zeros(3, 4, 2, 8) for _ in range(2)]
    key, value = torch.randn(2, 6, 2, 8)
    names |= {"cache": CacheDesc.from_kv(*(describe(t, Layout.BLOCK_NHD) for t in stored))}
    names |= {"key": key, "value": value, "slots": torch.arange(3, 9)}
    names |= {"block_table": torch.tensor([[0, 1, 2]]), "seq_lens": torch.tensor([6])}
    layers, keys = torch.zeros(2, 5, 3, 4, 2, 8), torch.randn(5, 6, 2, 8)
    caches = [
        CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD), describe(v, Layout.BLOCK_NHD))
        for k, v in zip(*layers, strict=True)
    ]
    names |= {"caches": caches, "keys": keys, "values": -keys}
    blocks = PAGE.snippets()
    assert len(blocks) == 4
    for block in blocks:
        PAGE.run(names, block)
        if "Plan.write" not in block:
            continue
        copies = names["copies"]
        assert copies["bytes"].sum() == 6 * 2 * 2 * 8 * 4
    shown = re.search(r"^    PlanInfo.*?\n\n", PAGE.text, re.DOTALL | re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()  # type: ignore[attr-defined]
    assert shown is not None
    expected = [line[4:] for line in shown[0].rstrip().splitlines()]

    def without_figures(line: str) -> str:
        return re.sub(r"\d+ threads?, |, about .*", "", line)

    assert torch.equal(stored[1].view(12, 2, 8)[:6], value)  # as the last of them gathered it
    assert torch.equal(stored[0].view(12, 2, 8)[:6], key)
    assert not key[:3].any()
    assert torch.equal(layers[0].view(5, 12, 2, 8)[:, 3:9], keys)
    assert torch.equal(layers[1], -layers[0])
    assert list(map(without_figures, printed[: len(expected)])) == list(
        map(without_figures, expected)
    )
    k_from, k_to = src.layers[1].k.owner, dst.layers[1].k.owner
    for token in range(33):
        block, to = (5, 2, 7)[token // 16], (4, 0)[token // 32]
        assert torch.equal(k_to[to, :, token % 32], k_from[block, token % 16])


def test_c_example(tmp_path: Path) -> None:
    first, *numbers = PAGE.run_c(C_PROGRAM, tmp_path).splitlines()
    assert re.fullmatch(r"0 bytes in about 0 us", first)
    # Block 1 of [token, head, dim] in block 2 of [head, token, dim].
    assert numbers[0].split() == ["0"] * 16 + ["8", "9", "12", "13", "10", "11", "14", "15"]
