"""kvx_adapters.kvbm: the peer's own tests, bit by bit, and what it refuses or cannot say.

Source: ai-dynamo/dynamo python/tests/test_tensor_kernels.py and tests/kernel_roundtrip.rs, whose
dimensions these are
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvx_adapters import kvbm
from kvx_core import InvalidArgumentError, KvxError, UnsupportedError
from tests.block_layouts import (
    Dims,
    all_same,
    as_operational,
    as_universal,
    filled,
    filled_stack,
    numbers,
    same,
    stack,
)
from tests.ways_out import WayOut, leads_out

DIMS = Dims(nh=3, nl=2, no=2, nt=4, hd=5, nb=3)
OPERATIONAL = Dims(nh=2, nl=3, no=2, nt=4, hd=3, nb=2)
ONE_CHUNK = Dims(nh=2, nl=1, no=1, nt=3, hd=4, nb=1)
THREE_CHUNKS = Dims(nh=2, nl=2, no=3, nt=3, hd=8, nb=2)
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def on(device: str, tensors: Any) -> Any:
    return [on(device, t) if isinstance(t, list) else t.to(device) for t in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [DIMS, ONE_CHUNK, THREE_CHUNKS], ids=["KV", "one", "three"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_universal_roundtrip(
    dims: Dims, layout: str, dtype: torch.dtype, device: str
) -> None:
    for seed in (1, 2, 3):
        blocks = stack(dims, layout, dtype, seed)
        universals = on(device, filled(dims.nb, dims.universal, dtype))
        kvbm.block_to_universal(on(device, blocks), universals, layout)
        assert all_same(universals, [as_universal(block, dims, layout) for block in blocks])
        back = on(device, filled_stack(dims, layout, dtype))
        kvbm.universal_to_block(universals, back, layout=layout)
        assert all(map(all_same, back, blocks))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [OPERATIONAL, ONE_CHUNK, THREE_CHUNKS], ids=["KV", "one", "three"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operational_roundtrip(dims: Dims, dtype: torch.dtype, device: str) -> None:
    blocks = stack(dims, "HND", dtype, 4)
    operationals = on(device, filled(dims.nb, dims.operational, dtype))
    kvbm.block_to_operational(on(device, blocks), operationals)
    assert all_same(operationals, [as_operational(block, dims) for block in blocks])
    back = on(device, filled_stack(dims, "HND", dtype))
    kvbm.operational_to_block(operationals, back)
    assert all(map(all_same, back, blocks))


@pytest.mark.parametrize("call", ["block_to_universal", "universal_to_block"])
def test_empty_batch_is_no_work(call: str) -> None:
    getattr(kvbm, call)([], [])
    kvbm.block_to_operational([], [])
    kvbm.operational_to_block([], [])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_range_of_heads(layout: str) -> None:
    """Four ranks save 2 heads each; eight ranks load 1 head each. No other head changes."""
    whole = Dims(nh=8, nl=2, no=2, nt=4, hd=8, nb=2)
    at_four, at_eight = (Dims(nh, 2, 2, 4, 8, 2) for nh in (2, 1))
    universals = filled(2, whole.universal, torch.bfloat16)
    expected = filled(2, whole.universal, torch.bfloat16)
    for rank in range(4):
        blocks = stack(at_four, layout, torch.bfloat16, rank)
        kvbm.block_to_universal(blocks, universals, layout, head_start=2 * rank)
        for out, block in zip(expected, blocks, strict=True):
            out[2 * rank : 2 * rank + 2] = as_universal(block, at_four, layout)
        assert all_same(universals, expected)
    for rank in range(8):
        loaded = filled_stack(at_eight, layout, torch.bfloat16)
        kvbm.universal_to_block(universals, loaded, layout, head_start=rank)
        for block, universal in zip(loaded, universals, strict=True):
            assert same(as_universal(block, at_eight, layout), universal[rank : rank + 1])


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float16, torch.bfloat16),
    ],
)
def test_convert_on_the_way(src: torch.dtype, dst: torch.dtype) -> None:
    blocks = stack(DIMS, "NHD", src, 5, numbers)
    universals = filled(DIMS.nb, DIMS.universal, dst)
    kvbm.block_to_universal(blocks, universals, convert=True)
    for universal, block in zip(universals, blocks, strict=True):
        assert same(universal, as_universal(block, DIMS, "NHD").float().to(dst))
    operationals = filled(DIMS.nb, DIMS.operational, dst)
    kvbm.block_to_operational(blocks, operationals, convert=True)
    for operational, block in zip(operationals, blocks, strict=True):
        assert same(operational, as_operational(block, DIMS).float().to(dst))


def test_strided_chunks() -> None:
    """Chunks that are slices of an engine's cache: every other head, the first numbers of each."""
    pools = [torch.randn(DIMS.nb, 4, 6, 8) for _ in range(4)]
    blocks = [[pool[b, :, ::2, :5] for pool in pools] for b in range(DIMS.nb)]
    before = [pool.clone() for pool in pools]
    universals = filled(DIMS.nb, DIMS.universal, torch.float32)
    kvbm.block_to_universal(blocks, universals)
    assert all_same(universals, [as_universal(block, DIMS, "NHD") for block in blocks])
    for universal in universals:
        universal.neg_()
    kvbm.universal_to_block(universals, blocks)
    for pool, old in zip(pools, before, strict=True):
        old[:, :, ::2, :5].neg_()
        assert torch.equal(pool, old)
    operationals = filled(DIMS.nb, DIMS.operational, torch.float32)
    for backend in ("vectorized", "async", "batch"):  # which copy no strides
        said = refusal(lambda b=backend: kvbm.block_to_operational(blocks, operationals, b))
        assert said == (
            f"backend is '{backend}', expected 'auto' or 'kernel' for tensors that are not "
            "contiguous or have two dtypes (spec E.15)"
        )
    for backend in ("auto", "kernel"):
        operationals = filled(DIMS.nb, DIMS.operational, torch.float32)
        kvbm.block_to_operational(blocks, operationals, backend)
        assert all_same(operationals, [as_operational(block, DIMS) for block in blocks])
    whole = [[chunk.contiguous() for chunk in block] for block in blocks]
    for backend in ("vectorized", "auto", "kernel"):
        operationals = filled(DIMS.nb, DIMS.operational, torch.float32)
        kvbm.block_to_operational(whole, operationals, backend)
        assert all_same(operationals, [as_operational(block, DIMS) for block in blocks])


def test_numpy() -> None:
    blocks = stack(DIMS, "HND", torch.float64, 6)
    universals = [np.zeros(DIMS.universal) for _ in range(DIMS.nb)]
    kvbm.block_to_universal([[t.numpy() for t in block] for block in blocks], universals, "HND")
    expected = [as_universal(block, DIMS, "HND") for block in blocks]
    assert all_same(list(map(torch.from_numpy, universals)), expected)


# --- what is refused ----------------------------------------------------------------------------


def good(dims: Dims = DIMS, dtype: torch.dtype = torch.float16) -> tuple[Any, Any]:
    return filled_stack(dims, "NHD", dtype), filled(dims.nb, dims.universal, dtype)


def one_block_less(blocks: Any, universals: Any) -> None:
    universals.pop()


def one_tensor_less(blocks: Any, universals: Any) -> None:
    blocks[1].pop()


def odd_count(blocks: Any, universals: Any) -> None:
    for block in blocks:
        block.append(block[0].clone())


def one_layer_less(blocks: Any, universals: Any) -> None:
    for block in blocks:
        del block[2:]


def one_dtype(blocks: Any, universals: Any) -> None:
    blocks[2][1] = blocks[2][1].to(torch.bfloat16)


def all_dtypes(blocks: Any, universals: Any) -> None:
    universals[:] = [t.to(torch.float32) for t in universals]


def one_strided(blocks: Any, universals: Any) -> None:
    blocks[0][3] = torch.zeros(4, 5, 3, dtype=torch.float16).transpose(1, 2)


def one_shape(blocks: Any, universals: Any) -> None:
    blocks[0][1] = torch.zeros(4, 3, 6, dtype=torch.float16)


def other_heads(blocks: Any, universals: Any) -> None:
    universals[:] = [t[:2] for t in universals]


def other_tokens(blocks: Any, universals: Any) -> None:
    universals[:] = [torch.zeros(3, 2, 2, 5, 5, dtype=torch.float16) for _ in universals]


def axes_missing(blocks: Any, universals: Any) -> None:
    universals[:] = [t[0] for t in universals]


def twice(blocks: Any, universals: Any) -> None:
    universals[1] = universals[0]


def a_number(blocks: Any, universals: Any) -> None:
    blocks[0][1] = 3


def no_list(blocks: Any, universals: Any) -> None:
    blocks[1] = 3


SENTENCES: list[tuple[Callable[[Any, Any], None], str]] = [
    (one_block_less, "universals has 2 blocks, expected 3 as blocks has (spec E.15)"),
    (one_tensor_less, "blocks[1] has 3 tensors, expected nl * no = 4 as blocks[0] has (spec E.15)"),
    (odd_count, "blocks[0] has 5 tensors, expected nl * no, with no = 2 (spec E.15)"),
    (
        one_layer_less,
        "blocks[0] has 2 tensors, expected nl * no = 4 as universals[0] has (spec E.15)",
    ),
    (
        one_dtype,
        "blocks[2][1].dtype is torch.bfloat16, expected torch.float16 as blocks[0][0] has: convert "
        "the tensors to one dtype (spec E.15)",
    ),
    (
        all_dtypes,
        "universals[0].dtype is float32, expected float16 as blocks[0][0] has. Give convert=True "
        "to convert numbers on the way (spec E.15)",
    ),
    (
        one_strided,
        "blocks[0][3].stride is (15, 1, 3), expected (15, 5, 1) as blocks[0][0] has: pass "
        "contiguous copies (spec E.15)",
    ),
    (
        one_shape,
        "blocks[0][1].shape is (4, 3, 6), expected (4, 3, 5) as blocks[0][0] has (spec E.15)",
    ),
    (
        other_heads,
        "blocks[0][0].shape is (4, 3, 5), expected (4, 2, 5) as universals[0] is (2, 2, 2, 4, 5) "
        "(nh, nl, no, nt, hd). Give head_start to copy some of the heads (spec E.15)",
    ),
    (
        other_tokens,
        "blocks[0][0].shape is (4, 3, 5), expected (5, 3, 5) as universals[0] is (3, 2, 2, 5, 5) "
        "(nh, nl, no, nt, hd) (spec E.15)",
    ),
    (axes_missing, "universals[0].ndim is 4, expected 5: (nh, nl, no, nt, hd)"),
    (
        twice,
        "universals has a tensor twice, expected memory of its own for each: the call writes them "
        "(spec E.15)",
    ),
    (a_number, "blocks[0][1] is 3, expected a torch.Tensor as blocks[0][0] is"),
    (no_list, "blocks[1] is 3, expected a list of tensors"),
]


@pytest.mark.parametrize(
    ("break_", "sentence"), SENTENCES, ids=lambda v: getattr(v, "__name__", "")
)
def test_what_is_refused(break_: Callable[[Any, Any], None], sentence: str) -> None:
    blocks, universals = good()
    break_(blocks, universals)
    before = [t.clone() for t in universals]
    with pytest.raises(InvalidArgumentError) as refused:
        kvbm.block_to_universal(blocks, universals)
    assert str(refused.value) == sentence
    assert isinstance(refused.value, TypeError) == ("dtype" in break_.__name__)
    assert all_same(universals, before)


def refusal(call: Callable[[], None], error: type[KvxError] = InvalidArgumentError) -> str:
    with pytest.raises(error) as refused:
        call()
    return str(refused.value)


def test_other_refusals() -> None:
    blocks, universals = good()
    assert refusal(lambda: kvbm.block_to_universal(blocks, universals, "NDH")) == (
        "layout is 'NDH', expected 'NHD' or 'HND'"
    )
    assert refusal(lambda: kvbm.block_to_universal(blocks, universals, head_start=1)) == (
        "head_start is 1, expected at most 0: the 3 heads of blocks[0][0] reach past the 3 of "
        "universals[0] (spec E.15)"
    )
    wrong_inner = [torch.zeros(2, 2, 59, dtype=torch.float16) for _ in range(3)]
    assert refusal(lambda: kvbm.block_to_operational(blocks, wrong_inner)) == (
        "operationals[0].shape[2] is 59, expected nt * nh * hd = 60 of chunks (4, 3, 5) (spec E.15)"
    )
    for some, none in ((blocks, []), ([], universals)):
        with pytest.raises(InvalidArgumentError, match="expected"):
            kvbm.block_to_universal(some, none)
    assert refusal(lambda: kvbm.block_to_universal(tuple(blocks), universals[0])).startswith(
        "universals is a Tensor, expected a list with an entry per block"
    )
    for none in ("", {}, 0):
        with pytest.raises(InvalidArgumentError, match="expected a list with an entry per block"):
            kvbm.block_to_universal([], none)
    strided = [torch.zeros(2, 2, 120, dtype=torch.float16)[:, :, ::2] for _ in range(3)]
    assert refusal(lambda: kvbm.block_to_operational(blocks, strided)) == (
        "operationals[0].stride[2] is 2, expected 1: `inner` is one axis (spec E.15)"
    )
    frozen = [np.zeros(DIMS.universal, np.float16) for _ in range(3)]
    frozen[1].flags.writeable = False
    numpy = [[t.numpy() for t in block] for block in blocks]
    assert refusal(lambda: kvbm.block_to_universal(numpy, frozen)) == (
        "universals has read-only memory, expected writable. Pass writable copies"
    )
    halves = [[torch.zeros(4, 3, 10, dtype=torch.float64)[:, :, ::2]] * 4] * 3
    doubles = filled(3, DIMS.universal, torch.float64)
    assert refusal(lambda: kvbm.block_to_universal(halves, doubles), UnsupportedError) == (
        "blocks[0][0] is float64, which is copied as bytes, and the numbers of its last axis do "
        "not follow each other. Pass a contiguous copy (spec E.15)"
    )


def test_numbers_are_converted_only_if_asked() -> None:
    blocks, universals = good()
    wide = [[t.float() for t in block] for block in blocks]
    operationals = [torch.zeros(2, 2, 60, dtype=torch.float16) for _ in blocks]
    for call in (
        lambda: kvbm.block_to_universal(wide, universals),
        lambda: kvbm.universal_to_block(universals, wide),
        lambda: kvbm.block_to_operational(wide, operationals),
        lambda: kvbm.operational_to_block(operationals, wide),
    ):
        with pytest.raises(
            InvalidArgumentError, match="Give convert=True to convert numbers on the"
        ):
            call()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.complex64], ids=str)
def test_what_is_copied_as_bytes_is_not_converted(dtype: torch.dtype) -> None:
    blocks, universals = good()
    label = str(dtype).removeprefix("torch.")
    sentence = (
        f"{{}}.dtype is {label}, whose numbers KVX copies and does not convert. Pass both ends"
    )
    odd = [[t.to(dtype) for t in block] for block in blocks]
    text = refusal(lambda: kvbm.block_to_universal(odd, universals, convert=True), UnsupportedError)
    assert text.startswith(sentence.format("blocks[0][0]"))
    wide = [torch.zeros(2, 2, 60, dtype=dtype) for _ in blocks]
    text = refusal(lambda: kvbm.block_to_operational(blocks, wide, convert=True), UnsupportedError)
    assert text.startswith(sentence.format("operationals[0]"))
    for universal in universals:
        assert same(universal, filled(1, universal.shape, torch.float16)[0])


@pytest.mark.parametrize("dims", [Dims(0, 2, 2, 4, 8, 2), Dims(3, 2, 2, 0, 8, 2)], ids=["nh", "nt"])
def test_blocks_of_no_numbers_are_no_work(dims: Dims) -> None:
    blocks, universals = good(dims)
    operationals = filled(dims.nb, dims.operational, torch.float16)
    kvbm.block_to_universal(blocks, universals)
    kvbm.universal_to_block(universals, blocks)
    kvbm.block_to_operational(blocks, operationals)
    kvbm.operational_to_block(operationals, blocks)


def test_tensors_that_overlap_are_refused() -> None:
    """Two universal blocks of one buffer, half a block apart; a block that is its own source."""
    blocks, _ = good(ONE_CHUNK)
    buffer = torch.zeros(60, dtype=torch.float16)
    size = 2 * 3 * 4
    universals = [buffer[at : at + size].view(ONE_CHUNK.universal) for at in (0, size // 2)]
    sentence = "those of a block that the call writes, and of another block"
    assert sentence in refusal(
        lambda: kvbm.block_to_universal([blocks[0], [blocks[0][0].clone()]], universals)
    )
    own = [blocks[0][0].view(1, 1, size)]
    assert sentence in refusal(lambda: kvbm.block_to_operational(blocks, own))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_every_tensor_is_looked_at(dtype: torch.dtype, at: int, seed: int) -> None:
    torch.manual_seed(seed)
    dst = [torch.full((5,), -1, dtype=dtype) for _ in range(7)]
    src = [torch.randn(5).to(dtype) for _ in range(7)]
    good = src[at]
    bits = {"neg": torch._neg_view(good)} | ({"conj": good.conj()} if dtype.is_complex else {})
    for bit, odd in bits.items():
        src[at] = odd
        text = refusal(lambda: kvbm.vectorized_copy(src, dst), UnsupportedError)
        assert text.startswith(f"srcs[{at}].is_{bit}() is True, expected False")
    src[at] = good.clone()
    src[at].untyped_storage().resize_(good.itemsize * 4)
    for name, call in (
        ("srcs", lambda: kvbm.vectorized_copy(src, dst)),
        ("dsts", lambda: kvbm.memcpy_batch(dst, src)),
    ):
        text = refusal(call)
        assert text.startswith(f"{name}[{at}] has a storage of {good.itemsize * 4} bytes, expected")
    assert all(same(one, torch.full((5,), -1, dtype=dtype)) for one in dst)
    src[at] = torch.cat([good, good])[5:]
    kvbm.vectorized_copy(src, dst)
    assert all(same(*pair) for pair in zip(dst, src, strict=True))


# --- ways out -----------------------------------------------------------------------------------


def to_universal(
    change: Callable[[Any, Any], Any] = lambda *_: None, layout: str = "NHD", **options: Any
) -> None:
    """A stack of random numbers, changed, into universal blocks that then have its numbers."""
    blocks, universals = stack(DIMS, "NHD", torch.float16, 3), good()[1]
    change(blocks, universals)
    kvbm.block_to_universal(blocks, universals, layout, **options)
    first = universals[0]
    expected = as_universal(blocks[0], DIMS, "NHD").to(first.dtype)
    assert same(first[: len(expected)], expected)


def more_heads(blocks: Any, universals: Any) -> None:
    universals[:] = [torch.cat([t, t]) for t in universals]


def contiguous(blocks: Any, universals: Any) -> None:
    one_strided(blocks, universals)
    blocks[:] = [[t.contiguous() for t in block] for block in blocks]


def of_int16(blocks: Any, universals: Any) -> None:
    blocks[:] = [[t.to(torch.int16) for t in block] for block in blocks]


def both_of_int16(blocks: Any, universals: Any) -> None:
    of_int16(blocks, universals)
    universals[:] = [t.to(torch.int16) for t in universals]


def to_operational(backend: str, dtype: torch.dtype) -> None:
    operationals = filled(DIMS.nb, DIMS.operational, dtype)
    kvbm.block_to_operational(
        stack(DIMS, "NHD", torch.float16, 3), operationals, backend, convert=dtype != torch.float16
    )


def into_numpy(*, copied: bool) -> None:
    blocks = [[t.numpy() for t in block] for block in stack(DIMS, "NHD", torch.float16, 3)]
    frozen = [np.zeros(DIMS.universal, np.float16) for _ in range(DIMS.nb)]
    for each in frozen:
        each.flags.writeable = False
    kvbm.block_to_universal(blocks, [t.copy() for t in frozen] if copied else frozen)


def of_doubles(*, copied: bool) -> None:
    wide = [
        [torch.randn(4, 3, 10, dtype=torch.float64)[:, :, ::2] for _ in range(4)] for _ in "abc"
    ]
    blocks = [[t.contiguous() for t in block] for block in wide] if copied else wide
    kvbm.block_to_universal(blocks, filled(3, DIMS.universal, torch.float64))


def copies(change: Callable[[Any], Any], call: Any = kvbm.vectorized_copy) -> None:
    dst = [torch.zeros(5) for _ in range(2)]
    call([change(torch.randn(10)) for _ in dst], dst)


WAYS_OUT = [
    WayOut(
        "Give head_start to copy some of the heads (spec E.15)",
        lambda: to_universal(more_heads),
        lambda: to_universal(more_heads, head_start=0),
    ),
    WayOut(
        "expected at most 3: the 3 heads of blocks[0][0] reach past the 6 of universals[0] "
        "(spec E.15)",
        lambda: to_universal(more_heads, head_start=4),
        lambda: kvbm.block_to_universal(
            good()[0], [torch.cat([t, t]) for t in good()[1]], head_start=3
        ),
    ),
    WayOut(
        "Give convert=True to convert numbers on the way (spec E.15)",
        lambda: to_universal(all_dtypes),
        lambda: to_universal(all_dtypes, convert=True),
    ),
    WayOut(
        "convert the tensors to one dtype (spec E.15)",
        lambda: to_universal(one_dtype),
        to_universal,
    ),
    WayOut(
        "pass contiguous copies (spec E.15)",
        lambda: to_universal(one_strided),
        lambda: to_universal(contiguous),
    ),
    WayOut(
        "whose numbers KVX copies and does not convert. Pass both ends in one dtype (spec E.15)",
        lambda: to_universal(of_int16, convert=True),
        lambda: to_universal(both_of_int16, convert=True),
    ),
    WayOut(
        "expected 'auto' or 'kernel' for tensors that are not contiguous or have two dtypes "
        "(spec E.15)",
        lambda: to_operational("batch", torch.float32),
        lambda: [to_operational(name, torch.float32) for name in ("auto", "kernel")],
    ),
    WayOut(
        "universals has read-only memory, expected writable. Pass writable copies",
        lambda: into_numpy(copied=False),
        lambda: into_numpy(copied=True),
    ),
    WayOut(
        "do not follow each other. Pass a contiguous copy (spec E.15)",
        lambda: of_doubles(copied=False),
        lambda: of_doubles(copied=True),
    ),
    WayOut(
        "srcs[0].stride is (2,), expected contiguous. Pass contiguous copies",
        lambda: copies(lambda t: t[::2]),
        lambda: copies(lambda t: t[::2].contiguous()),
    ),
    WayOut(
        "in memory they have the other sign. Pass srcs[0].resolve_neg()",
        lambda: copies(lambda t: torch._neg_view(t[:5])),
        lambda: copies(lambda t: torch._neg_view(t[:5]).resolve_neg()),
    ),
    WayOut(
        "layout is 'hnd', expected 'NHD' or 'HND'",
        lambda: to_universal(layout="hnd"),
        lambda: to_universal(layout="NHD"),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)
