"""The examples of docs/blocks.md, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from kvx_core import CacheDesc, CacheFacts, CacheView, describe
from tests.block_layouts import (
    Dims,
    all_same,
    as_operational,
    as_universal,
    filled,
    stack,
)
from tests.documents import Document
from tests.native import ROOT

PAGE = Document("blocks.md")
DIMS = Dims(nh=4, nl=2, no=2, nt=8, hd=16, nb=3)

C_PROGRAM = r"""
#include <stdio.h>
#include "kvx/kvx_ext.h"

int main(void) {
  float k[4] = {0, 1, 2, 3}, v[4] = {4, 5, 6, 7}, universal[8]; /* [token, head] */
  const void *const blocks[] = {k, v};
  void *const universals[] = {universal};
  %s
  if (status != KVX_STATUS_OK) return puts(kvx_last_error()), 1;
  for (int i = 0; i < 8; ++i) printf("%%g ", universal[i]); /* [head, K or V, token] */
  return kvx_has_memcpy_batch_async() && kvx_is_stub_build();
}
"""


def paged(facts: CacheFacts) -> CacheView:
    generator = torch.Generator().manual_seed(1)
    layers = [torch.randn(9, 2, 16, 4, 16, generator=generator) for _ in range(2)]
    return CacheView(
        tuple(
            CacheDesc.from_kv(describe(t[:, 0], "BLOCK_NHD"), describe(t[:, 1], "BLOCK_NHD"))
            for t in layers
        ),
        facts,
    )


def test_python_examples() -> None:
    facts = CacheFacts(fingerprint="a model", rotary="half", rotary_dim=16, rope_applied=True)
    dtype = torch.bfloat16
    blocks = stack(DIMS, "NHD", dtype, 1)
    rank = Dims(nh=2, nl=2, no=2, nt=8, hd=16, nb=3)
    names: dict[str, Any] = {
        "blocks": blocks,
        "universals": filled(3, DIMS.universal, dtype),
        "operationals": filled(3, DIMS.operational, dtype),
        "rank_blocks": stack(rank, "NHD", dtype, 2),
        "srcs": [torch.randn(7) for _ in range(3)],
        "dsts": [torch.zeros(7) for _ in range(3)],
        "facts": facts,
        "paged": paged(facts),
    }
    copies, a_rank, lists, other_end, plan = PAGE.snippets()
    PAGE.run(names, copies)
    expected = [as_universal(block, DIMS, "NHD") for block in blocks]
    assert all_same(names["universals"], expected)
    assert all_same(names["operationals"], [as_operational(block, DIMS) for block in blocks])
    PAGE.run(names, a_rank)
    for right, block in zip(expected, names["rank_blocks"], strict=True):
        right[2:] = as_universal(block, rank, "NHD")
    assert all_same(names["universals"], expected)
    PAGE.run(names, lists)
    assert all_same(names["dsts"], names["srcs"])
    PAGE.run(names, other_end)
    layers = [layer.k.owner for layer in names["paged"].layers]
    for token in range(24):
        block, offset = (7, 2)[token // 16], token % 16
        found = names["universals"][token // 8][:, :, 0, token % 8]
        right = torch.stack([k[block, offset] for k in layers], dim=1).to(dtype)
        assert torch.equal(found, right)
    PAGE.run(names, plan)
    assert all_same(names["universals"], [as_universal(b, DIMS, "NHD") for b in blocks])


def test_c_example(tmp_path: Path) -> None:
    printed = PAGE.run_c(C_PROGRAM, tmp_path)
    assert printed.split() == ["0", "2", "4", "6", "1", "3", "5", "7"]


def test_every_function_of_the_header_is_there() -> None:
    header = (ROOT / "csrc/include/kvx/kvx_blocks.h").read_text()
    functions = set(re.findall(r"KVX_API \w+ (\w+)\(", header))
    assert len(functions) == 7
    assert functions == set(re.findall(r"`(kvx_\w+)\(", PAGE.text))
