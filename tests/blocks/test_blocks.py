"""Block stacks, operational and universal blocks as ends of migrate, Plan and verify. Spec: E.15"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    Plan,
    describe,
    migrate,
    verify,
)
from kvx_core._c import abi
from kvx_core.blocks import block_stack, operational_blocks, universal_blocks
from tests.block_layouts import (
    Dims,
    all_same,
    as_operational,
    as_universal,
    filled,
    filled_stack,
    same,
    stack,
)
from tests.calls import Backend

DIMS = Dims(nh=3, nl=2, no=2, nt=4, hd=8, nb=5)
BF16 = torch.bfloat16


def run(on: Backend, src: CacheSpan, dst: CacheSpan, tokens: list[int], heads: int = 0) -> None:
    """kvx_migrate_kv on this backend. Addresses in tables are not mirrored."""
    if on.mirror is not None:
        pytest.skip("tables hold addresses of host memory")
    lens = torch.tensor(tokens)
    struct = on.seq_lens(lens)
    desc = abi.kvx_migrate_desc_t(
        num_heads=heads,
        seq_lens=ctypes.pointer(struct),
        src=abi.pointer_to(on.moved_span(src)),
        dst=abi.pointer_to(on.moved_span(dst)),
    )
    on.call("kvx_migrate_kv", desc)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stack_to_universal_to_operational_to_stack(
    backend: Backend, layout: str, seed: int
) -> None:
    blocks = stack(DIMS, layout, BF16, seed)
    universals = filled(5, DIMS.universal, BF16)
    tokens = [5 * 4]
    run(backend, block_stack(blocks, layout), universal_blocks(universals), tokens)
    assert all_same(universals, [as_universal(block, DIMS, layout) for block in blocks])
    operationals = filled(5, DIMS.operational, BF16)
    other = "HND" if layout == "NHD" else "NHD"
    whole = operational_blocks(operationals, DIMS.chunk(other), other)
    run(backend, universal_blocks(universals), whole, tokens)
    turned = [[chunk.transpose(0, 1) for chunk in block] for block in blocks]
    assert all_same(operationals, [as_operational(block, DIMS) for block in turned])
    back = filled_stack(DIMS, layout, BF16)
    run(backend, whole, block_stack(back, layout), tokens)
    assert all(map(all_same, back, blocks))


def test_sequences_that_end_within_a_block(backend: Backend) -> None:
    """Two sequences of 2 and 3 blocks, 7 and 9 tokens, heads 1 and 2: the rest stays as it was."""
    blocks, universals = stack(DIMS, "NHD", BF16, 4), filled(5, DIMS.universal, BF16)
    run(
        backend,
        block_stack(blocks, blocks_per_seq=[2, 3], head_start=1),
        universal_blocks(universals, blocks_per_seq=[2, 3], head_start=1),
        [7, 9],
        heads=2,
    )
    expected = filled(5, DIMS.universal, BF16)
    for b, tokens in enumerate([4, 3, 4, 4, 1]):
        moved = as_universal(blocks[b], DIMS, "NHD")
        expected[b][1:, :, :, :tokens] = moved[1:, :, :, :tokens]
    assert all_same(universals, expected)


def paged(seed: int, block_size: int) -> tuple[CacheView, list[Tensor]]:
    """An engine's cache: [num_blocks, 2, block_size, heads, dim] per layer, float32."""
    generator = torch.Generator().manual_seed(seed)
    layers = [torch.randn(9, 2, block_size, 3, 8, generator=generator) for _ in range(2)]
    descs = [
        CacheDesc.from_kv(describe(t[:, 0], "BLOCK_NHD"), describe(t[:, 1], "BLOCK_NHD"))
        for t in layers
    ]
    return CacheView(tuple(descs), CacheFacts()), layers


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_any_cache_on_the_other_side(block_size: int) -> None:
    """A paged float32 cache with other blocks into universal bfloat16 blocks, and back."""
    view, layers = paged(5, block_size)
    tokens = min(9 * block_size, 18)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(6)).tolist()
    span = view.at(block_table=[order])
    universals = filled(5, DIMS.universal, BF16)
    migrate(span, universal_blocks(universals), [tokens], same_model=True)
    expected = filled(5, DIMS.universal, BF16)
    for token in range(tokens):
        block, offset = divmod(token, block_size)
        for layer in range(2):
            row = layers[layer][order[block], :, offset]  # [K and V, head, dim]
            to = expected[token // 4]
            to[:, layer, :, token % 4] = row.transpose(0, 1).to(BF16)
    assert all_same(universals, expected)
    rounded = [t.to(BF16).float() for t in layers]
    for layer in layers:
        layer.zero_()
    migrate(universal_blocks(universals), span, [tokens], same_model=True)
    for token in range(tokens):
        block, offset = divmod(token, block_size)
        for layer, right in zip(layers, rounded, strict=True):
            assert same(layer[order[block], :, offset], right[order[block], :, offset])


def test_a_plan_and_verify() -> None:
    """A plan says what it moves, runs again, and verify sees one changed bit."""
    blocks, universals = stack(DIMS, "HND", BF16, 7), filled(5, DIMS.universal, BF16)
    src, dst = block_stack(blocks, "HND"), universal_blocks(universals)
    plan = Plan.migrate(src, dst, [20], same_model=True)
    assert (plan.info.num_moved, plan.info.exact) == (20, True)
    plan.run()
    for chunk in blocks[3]:
        chunk.copy_(chunk.flip(0))
    plan.run()
    assert all_same(universals, [as_universal(block, DIMS, "HND") for block in blocks])
    assert len(plan.ranges()) == 5 * 4 * 3  # a head of a chunk is contiguous at both ends
    assert verify(src, dst, [20])
    universals[2].view(torch.int16)[1, 1, 0, 2, 3] ^= 1
    assert not verify(src, dst, [20])


def test_facts_are_compared() -> None:
    blocks, universals = filled_stack(DIMS, "NHD", BF16), filled(5, DIMS.universal, BF16)
    one, other = CacheFacts(fingerprint="one"), CacheFacts(fingerprint="other")
    with pytest.raises(FactsMismatchError, match="fingerprint"):
        migrate(block_stack(blocks, facts=one), universal_blocks(universals, facts=other), [20])


def test_fp8_in_bytes_with_a_scale_of_its_own_dtype() -> None:
    """uint8 tensors that hold FP8 are described as what they are."""
    fp8 = torch.float8_e4m3fn
    chunks = [[torch.randn(4, 3, 8).to(fp8) for _ in range(4)] for _ in range(5)]
    as_bytes = [[chunk.view(torch.uint8) for chunk in block] for block in chunks]
    universals = filled(5, DIMS.universal, torch.float32)
    src = block_stack(as_bytes, dtype="float8_e4m3fn")
    migrate(src, universal_blocks(universals), [20], same_model=True)
    floats = [[chunk.float() for chunk in block] for block in chunks]
    assert all_same(universals, [as_universal(block, DIMS, "NHD") for block in floats])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda b, u: block_stack([]), "blocks is empty, expected at least one tensor (spec E.15)"),
        (lambda b, u: block_stack(b, no=3), "blocks[0] has 4 tensors, expected nl * no, with no"),
        (
            lambda b, u: block_stack(b, blocks_per_seq=[2, 2]),
            "blocks_per_seq adds up to 4, expected 5 blocks (spec E.15)",
        ),
        (lambda b, u: universal_blocks(b[0]), "universals[0].ndim is 3, expected 5: (nh, nl, no"),
        (
            lambda b, u: operational_blocks(u, (4, 3, 8)),
            "operationals[0].ndim is 5, expected 3: (nl, no, inner)",
        ),
        (lambda b, u: block_stack(b, "nhd"), "layout is 'nhd', expected 'NHD' or 'HND'"),
    ],
)
def test_what_is_refused(call: Any, sentence: str) -> None:
    blocks, universals = filled_stack(DIMS, "NHD", BF16), filled(5, DIMS.universal, BF16)
    with pytest.raises(InvalidArgumentError) as refused:
        call(blocks, universals)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("odd", range(5))
def test_blocks_that_are_aligned_differently(odd: int) -> None:
    """One block of a plane lies two bytes further on than all others, whichever it is."""
    blocks = filled_stack(DIMS, "NHD", BF16)
    for chunk in range(len(blocks[odd])):
        moved = torch.empty(1 + blocks[odd][chunk].numel(), dtype=BF16)[1:].view(4, 3, 8)
        assert moved.data_ptr() % 16 == 2
        blocks[odd][chunk] = moved.copy_(blocks[odd][chunk])
    universals = filled(5, DIMS.universal, BF16)
    universals[odd] = torch.empty(1 + universals[odd].numel(), dtype=BF16)[1:].view(DIMS.universal)
    migrate(block_stack(blocks), universal_blocks(universals), [20], same_model=True)
    assert all_same(universals, [as_universal(block, DIMS, "NHD") for block in blocks])
    back = stack(DIMS, "NHD", BF16, 9)
    migrate(universal_blocks(universals), block_stack(back), [20], same_model=True)
    for block, wanted in zip(back, blocks, strict=True):
        assert all_same(block, wanted)


def test_storage_that_moves_is_refused() -> None:
    blocks, universals = stack(DIMS, "NHD", BF16, 8), filled(5, DIMS.universal, BF16)
    src, dst = block_stack(blocks), universal_blocks(universals)
    migrate(src, dst, [20], same_model=True)
    blocks[4][2].untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentError, match="memory that its tensor no longer has"):
        migrate(src, dst, [20], same_model=True)
