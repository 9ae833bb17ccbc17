"""benchmarks/hybrid.py: what is timed leaves the same bytes, whoever does it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import hybrid_steps, tables
from benchmarks.hybrid import CASES


@pytest.mark.parametrize("of_vllm", ["if it runs here", "without"])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("name", CASES)
def test_ways_leave_the_same_bytes(
    name: str, tokens: int, of_vllm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVX, torch and, where the processor runs them, vLLM's CPU ops; 70 are in two pages."""
    if of_vllm == "without":
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    with torch.inference_mode():
        work = CASES[name](tokens)
        assert {"kvx", "torch"} <= work.ways.keys()
        assert of_vllm != "without" or "vllm" not in work.ways
        work.verify()


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        *((code | sign, sign, True) for code in (1, 5, 8) for sign in (0, 0x80)),
        *((code | sign, sign ^ 0x80, False) for code in (1, 8) for sign in (0, 0x80)),
        *((9 | sign, sign, False) for sign in (0, 0x80)),
        (5, 4, False),
        (0, 1, False),
        (0x80, 0, False),
    ],
)
def test_vllms_op_may_flush_small_numbers_and_no_other_byte(
    ours: int, theirs: int, is_same: bool
) -> None:
    """On every processor: a way that leaves one byte as KVX leaves it, or as `theirs`."""
    work = CASES["append: pages"](2)
    (pages,), codes = work.outputs, work.codes
    assert codes is not None
    assert int(codes.sum()) == 64 * 448
    for name, at, accepts in (
        ("vllm", (0, 576 + 447), is_same),
        ("torch", (0, 576 + 447), False),
        ("vllm", (0, 576 + 448), False),  # a byte of a BF16 number
        ("vllm", (0, 64 * 576), False),  # a scale
    ):

        def write(byte: int, at: tuple[int, int] = at) -> None:
            pages[at] = byte

        ways = {"kvx": lambda: write(ours), name: lambda: write(theirs)}
        one = replace(work, ways=ways)
        if accepts:
            one.verify()
        else:
            with pytest.raises(AssertionError, match=f"{name}: .* of output 0 differ"):
                one.verify()


def test_the_budget_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 requests have one; the table of results names it."""
    monkeypatch.setattr(hybrid_steps, "REQUESTS", (2, 256))
    monkeypatch.setattr(hybrid_steps, "_CONTEXT", 256)
    monkeypatch.setattr(hybrid_steps, "_STEPS", 4)
    few, many = hybrid_steps.run(1, "")
    assert few["goals"] == []
    assert many["goals"][0]["versus"] == "0.3 ms"
    assert "| prepare_forward, 256 |" in tables.of("hybrid", {"results": [few, many]})


def test_steps_that_are_timed_take_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_steps, "_CONTEXT", 512)
    steps = hybrid_steps.Steps(3)
    for _ in range(5):  # requests come anew
        assert steps() > 0
        for layer, schema in steps.caches.schemas.items():
            for slot, count in zip(steps.slots, steps.counts, strict=True):
                assert steps.caches.num_held(layer, slot) == schema.blocks(count)
