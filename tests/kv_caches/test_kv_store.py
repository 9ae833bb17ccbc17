"""KvCacheStore: what it stores and reads, byte for byte, and the rules of appending.

The oracles of the bytes are gguf-py and torch, as in tests/test_formats.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvx_core import (
    DType,
    InvalidArgumentError,
    KvCacheStore,
    KvxError,
    UnsupportedError,
)
from kvx_core.caches.kv import PRESETS
from tests.format_moves import FORMATS as WITH_ORACLE
from tests.format_moves import decode, encode
from tests.kv_stores import (
    DIM,
    FORMATS,
    HEADS,
    LAYERS,
    OTHERS,
    SEEDS,
    TOKEN,
    contents,
    dim_of,
    fill,
    same,
    some,
    store_of,
    stored,
)

SENTINEL = 0xA5
of_formats = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: dtype.name)


def raw(store: KvCacheStore) -> list[Tensor]:
    """Every byte that the store has allocated, as views; scales among them."""
    buffers = []
    for read in (store.read_key_storage, store.read_value_storage):
        found = read(0, 0, store.layer_seq_len(0))
        buffers += [part for part in (found.data, found.scale) if part is not None]
    return [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in buffers]


# ---- bytes ----


@of_formats
def test_appends_store_the_bytes_of_a_bulk_append(dtype: DType) -> None:
    """One by one, in odd steps and at once; nothing behind the last token is written."""
    for seed, other in zip(SEEDS, OTHERS, strict=True):
        tokens, held = some(37, seed, dim=dim_of(dtype, other)), []
        for counts in ([1] * 37, [5, 1, 13, 18], [37]):
            store = store_of(dtype, other)
            for buffer in raw(store):
                buffer.fill_(SENTINEL)
            fill(store, tokens, counts)
            assert store.current_seq_len == 37
            held.append([*contents(store), *(buffer.clone() for buffer in raw(store))])
            for buffer in raw(store):
                tail = buffer.view(LAYERS, 41, -1)[:, 37:]
                assert (tail == SENTINEL).all()
        assert same(held[0], held[1])
        assert same(held[0], held[2])


@pytest.mark.parametrize("dtype", WITH_ORACLE, ids=lambda dtype: dtype.name)
def test_bytes_are_those_of_the_oracle(dtype: DType) -> None:
    for seed in SEEDS:
        tokens = some(19, seed, dim=dim_of(dtype))
        store = fill(store_of(dtype, dtype), tokens, [1, 11, 7])
        for layer, (keys, values) in enumerate(tokens):
            for numbers, found, read in (
                (keys, store.read_key_storage(layer), store.read_keys(layer)),
                (values, store.read_value_storage(layer), store.read_values(layer)),
            ):
                scale = torch.ones(19, HEADS)
                if dtype.format.scaled:
                    assert found.scale is not None
                    assert dtype.format.rounding is not None
                    scale = numbers.abs().amax(-1) / dtype.format.rounding.largest
                    assert torch.equal(found.scale.T, scale)
                wanted = encode((numbers / scale[..., None]).numpy(), dtype)
                np.testing.assert_array_equal(stored(found)[0].transpose(0, 1), wanted)
                decoded = torch.from_numpy(decode(wanted, dtype)) * scale[..., None]
                assert torch.equal(read.transpose(0, 1), decoded)


@of_formats
def test_ranges_and_heads(dtype: DType) -> None:
    store = fill(store_of(dtype, dtype), some(37, 4, dim=dim_of(dtype)))
    for read in (store.read_keys, store.read_values):
        everything = read(1)
        assert everything.shape == (HEADS, 37, dim_of(dtype))
        assert everything.dtype == torch.float32
        for start, end in ((0, 1), (36, 37), (5, 23), (9, 9), (37, 37)):
            wanted = everything[:, start:end]
            assert torch.equal(read(1, start, end), wanted)
            for head in range(HEADS):
                assert torch.equal(read(1, start, end, head=head), wanted[head : head + 1])
        assert torch.equal(read(1, 30), everything[:, 30:])


@pytest.mark.parametrize("dtype", [d for d in FORMATS if d.format.scaled], ids=lambda d: d.name)
def test_a_read_decodes_its_range_and_nothing_else(dtype: DType) -> None:
    """All scales but those of the range are 0, for which any read of their tokens fails."""
    store = fill(store_of(dtype, dtype), some(37, 5))
    query = torch.ones(HEADS, DIM)
    wanted = store.read_keys(0, 11, 17), store.attend(0, query, start=11, end=17)
    for found in (store.read_key_storage(0), store.read_value_storage(0)):
        assert found.scale is not None
        found.scale[:, :11] = found.scale[:, 17:] = 0
    assert torch.equal(store.read_keys(0, 11, 17), wanted[0])
    assert torch.equal(store.attend(0, query, start=11, end=17), wanted[1])
    for start, end in ((10, 17), (11, 18)):
        with pytest.raises(KvxError, match="scale"):
            store.read_keys(0, start, end)
        with pytest.raises(KvxError, match=r"_scale is 0 for token"):
            store.attend(0, query, start=start, end=end)


def test_outputs_of_the_caller() -> None:
    store = fill(store_of(), some(20, 6))
    wanted = store.read_keys(1, 3, 9)
    for out in (
        np.full((HEADS, 6, DIM), 7, np.float32),
        torch.full((6, DIM, HEADS), 7.0).permute(2, 0, 1),
        torch.full((HEADS, 6, DIM), 7, dtype=torch.float16),
    ):
        assert store.read_keys(1, 3, 9, out=out) is out
        expected = wanted.half() if getattr(out, "dtype", None) == torch.float16 else wanted
        assert torch.equal(torch.as_tensor(out), expected)
    one = np.zeros((1, 6, DIM), np.float32)
    store.read_keys(1, 3, 9, head=2, out=one)
    np.testing.assert_array_equal(one, wanted[2:].numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tokens_of_torch_and_numpy(dtype: str) -> None:
    """Any strides and float dtype, flat or by head."""
    tokens = some(3, 7).to(getattr(torch, dtype))
    wanted = contents(fill(store_of(), tokens))
    kinds: list[Callable[[Tensor], Any]] = [
        lambda t: t,
        lambda t: t.flatten(),
        lambda t: t.T.contiguous().T,
        lambda t: t.clone().requires_grad_(),
    ]
    if dtype != "bfloat16":
        kinds += [lambda t: t.numpy(), lambda t: t.flatten().numpy()]
    for kind in kinds:
        store = store_of()
        for t in range(3):
            for layer, (keys, values) in enumerate(tokens):
                store.append_token(layer, kind(keys[t]), kind(values[t]))
        assert same(contents(store), wanted)


def test_storage_is_the_memory_of_the_store() -> None:
    store = fill(store_of("Q8_0", "float8_e4m3fn"), some(20, 8))
    found = store.read_key_storage(1, 4, 9)
    assert found.data.shape == (HEADS, 5, DIM // 32 * 34)
    assert found.data.dtype == torch.uint8
    assert found.encoding is DType.Q8_0
    assert found.scale is None
    assert found.nbytes == 5 * HEADS * DIM // 32 * 34
    whole = store.read_key_storage(1)
    assert found.data.data_ptr() - whole.data.data_ptr() == 4 * HEADS * DIM // 32 * 34
    before = store.read_keys(1, 6, 7)
    store.read_key_storage(1, 6, 7).data.zero_()
    assert before.any()
    assert not store.read_keys(1, 6, 7).any()
    values = store.read_value_storage(1, 4, 9)
    assert values.data.dtype == torch.float8_e4m3fn
    assert values.scale is not None
    assert values.scale.shape == (HEADS, 5)
    assert values.nbytes == 5 * HEADS * (DIM + 4)


# ---- evict, clear ----


def test_evict_drops_the_tail() -> None:
    tokens = some(20, 9)
    store = fill(store_of(), tokens)
    store.evict(13)
    assert store.current_seq_len == 13
    wanted = contents(fill(store_of(), tokens[:, :, :13]))
    assert same(contents(store), wanted)
    store.append_token(0, TOKEN, TOKEN)
    store.evict(13)  # the step
    assert same(contents(store), wanted)
    fill(store, tokens[:, :, 13:], [3, 4])
    assert same(contents(store), contents(fill(store_of(), tokens)))
    for wrong in (-1, 21):
        with pytest.raises(InvalidArgumentError, match=rf"^from_pos is {wrong}, expected 0 to 20$"):
            store.evict(wrong)
        assert store.current_seq_len == 20
    store.clear()
    assert store.current_seq_len == 0
    assert store.read_keys(0).shape == (HEADS, 0, DIM)
    assert same(contents(fill(store, tokens)), contents(fill(store_of(), tokens)))


@of_formats
def test_zeros_are_zeros(dtype: DType) -> None:
    """Also where other tokens were."""
    tokens = some(20, 3, dim=dim_of(dtype))
    store = fill(store_of(dtype, dtype), tokens)
    before = contents(store)
    store.evict(5)
    store.append_zeros(9)
    assert store.current_seq_len == 14
    for layer in range(LAYERS):
        for read in (store.read_keys, store.read_values):
            assert not read(layer, 5).any()
    store.evict(5)
    fill(store, tokens[:, :, 5:])
    assert same(contents(store), before)


# ---- formats and presets ----


def test_presets() -> None:
    formats = {
        "safe-lowbit": (DType.Q8_0, DType.TQ4),
        "balanced": (DType.TQ4, DType.TQ4),
        "experimental-max": (DType.TQ3, DType.TQ3),
    }
    assert formats == PRESETS
    for preset, (of_keys, of_values) in formats.items():
        for dim in (128, 256):
            store = KvCacheStore.from_preset(preset, LAYERS, HEADS, dim, 8)
            assert (store.key_encoding, store.value_encoding) == (of_keys, of_values)
            fill(store, some(5, 1, dim=dim))
            report = store.memory_report()
            assert [report.key_bytes_per_token, report.value_bytes_per_token] == [
                HEADS * dim // dtype.numbers * dtype.itemsize for dtype in (of_keys, of_values)
            ]
        half, name = ("value", "TQ4") if preset == "safe-lowbit" else ("key", of_keys.name)
        for dim in (64, 96, 192):
            with pytest.raises(
                InvalidArgumentError,
                match=rf"^head_dim is {dim} and num_heads \* head_dim {HEADS * dim}, expected one "
                rf"of them to be a multiple of 128: {half}_encoding is {name},",
            ):
                KvCacheStore.from_preset(preset, LAYERS, HEADS, dim, 8)
    with pytest.raises(InvalidArgumentError, match=r"^preset is 'best', expected 'safe-lowbit' or"):
        KvCacheStore.from_preset("best", 2, 3, DIM, 8)


def test_a_preset_of_units_that_span_heads() -> None:
    """Two heads of 64 are one unit of TurboQuant: the bytes of a head of 128."""
    keys, values = torch.randn(2, 5, 2, 64, generator=torch.Generator().manual_seed(4))
    spans = KvCacheStore.from_preset("balanced", 1, 2, 64, 8)
    whole = KvCacheStore.from_preset("balanced", 1, 1, 128, 8)
    spans.append(0, keys, values)
    whole.append(0, keys.view(5, 1, 128), values.view(5, 1, 128))
    assert spans.memory_report().used_bytes == whole.memory_report().used_bytes == 2 * 5 * 66
    assert torch.equal(spans.read_key_storage(0).data, whole.read_key_storage(0).data)
    assert torch.equal(
        spans.read_values(0).transpose(0, 1).reshape(5, 128), whole.read_values(0)[0]
    )


def test_formats_that_do_not_fit() -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=r"^head_dim is 80 and num_heads \* head_dim 80, expected one of them to be a "
        r"multiple of 32: value_encoding is Q4_0",
    ):
        KvCacheStore(1, 1, 80, 8, value_encoding="Q4_0")
    for name, label in (("U8", "uint8"), ("S32", "int32"), ("U8_ZERO", "U8_ZERO")):
        with pytest.raises(KvxError, match=f"^key_encoding is '{label}', expected one of float16"):
            KvCacheStore(1, 1, 64, 8, key_encoding=name)
    for wrong in ("INVALID", "Q9", None, 7.5):
        with pytest.raises(InvalidArgumentError, match=r"^key_encoding is"):
            KvCacheStore(1, 1, 64, 8, key_encoding=wrong)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"^keys.device is meta, expected a device that"):
        KvCacheStore(1, 1, 64, 8, placement="meta")
    with pytest.raises(InvalidArgumentError, match=r"^placement is 'moon', expected"):
        KvCacheStore(1, 1, 64, 8, placement="moon")


# ---- memory ----


@of_formats
def test_memory_is_the_arithmetic_of_the_format(dtype: DType) -> None:
    other, tokens, dim = DType.Q8_0, 15, dim_of(dtype)
    store = fill(store_of(dtype, other), some(tokens, 1, dim=dim))
    per_token = [
        HEADS * (dim // d.numbers * d.itemsize + 4 * d.format.scaled) for d in (dtype, other)
    ]
    report = store.memory_report()
    assert [report.key_bytes_per_token, report.value_bytes_per_token] == per_token
    assert report.allocated_bytes == LAYERS * 41 * sum(per_token)
    assert report.allocated_bytes == sum(map(len, raw(store)))
    assert report.used_bytes == LAYERS * tokens * sum(per_token)
    assert report.key_used_bytes == sum(store.read_key_storage(i).nbytes for i in range(LAYERS))
    assert report.logical_bytes == 2 * LAYERS * tokens * HEADS * dim * 4
    assert report.compression_ratio == pytest.approx(report.logical_bytes / report.used_bytes)
    assert report.utilization_ratio == tokens / 41
    store.append_token(0, torch.zeros(HEADS, dim), torch.zeros(HEADS, dim))
    assert store.memory_report().used_bytes == report.used_bytes + sum(per_token)
    store.clear()
    empty = store.memory_report()
    assert (empty.used_bytes, empty.logical_bytes, empty.utilization_ratio) == (0, 0, 0)
    assert empty.allocated_bytes == report.allocated_bytes
    assert empty.compression_ratio == report.compression_ratio


def test_nothing_is_allocated_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends and reads of a few tokens make no tensor as large as the store's."""
    store = store_of(max_seq_len=4096)
    fill(store, some(4000, 1))
    sizes: list[int] = []

    def counted(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def called(*args: Any, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            sizes.append(made.nbytes)
            return made

        return called

    for name in ("arange", "empty", "zeros", "tensor"):
        monkeypatch.setattr(torch, name, counted(getattr(torch, name)))
    fill(store, some(1, 2))
    store.read_keys(0, 3990, 4000)
    store.attend(0, TOKEN)
    assert max(sizes) <= 10 * HEADS * DIM * 4


# ---- costs ----


def seconds(call: Callable[[], object], repeats: int = 25) -> float:
    """Of the fastest call."""
    taken = []
    for _ in range(repeats):
        begin = time.thread_time()  # others on this machine do not count
        call()
        taken.append(time.thread_time() - begin)
    return min(taken)


def test_costs_do_not_grow_with_the_length() -> None:
    """A cost that grows with the tokens held would be 32 times as high at 32k as at 1k."""
    store = store_of(max_seq_len=33000)

    def append() -> None:
        for layer in range(LAYERS):
            store.append_token(layer, TOKEN, TOKEN)

    def read() -> None:
        store.read_keys(1, store.current_seq_len - 128)
        store.read_values(1, store.current_seq_len - 128)

    taken = []
    for length in (1000, 32000):
        store.append_zeros(length - store.current_seq_len)
        taken.append((seconds(append), seconds(read)))
    for short, long in zip(*taken, strict=True):
        assert long < 8 * short


def test_views_of_the_store_are_appended_as_they_were() -> None:
    """Their rows are where the tokens go: without a copy, the first would overwrite the next."""
    forms = Tensor.clone, lambda t: t, Tensor.numpy
    for as_given, others in itertools.product(forms, ((), (0,), (1,))):
        store = KvCacheStore(1, 2, 32, 24, key_encoding="float32", value_encoding="float32")
        keys, values = torch.randn(2, 10, 2, 32, generator=torch.Generator().manual_seed(3))
        store.append(0, keys, values)
        held = store.read_key_storage(0).data, store.read_value_storage(0).data
        store.evict(5)
        given = [as_given(data.transpose(0, 1)) for data in held]
        for half in others:  # keys or values alone are views of the store
            given[half] = (keys, values)[half]
        store.append(0, *given)
        assert torch.equal(store.read_keys(0, 5), keys.transpose(0, 1))
        assert torch.equal(store.read_values(0, 5), values.transpose(0, 1))


@pytest.mark.parametrize("encoding", ["int32", "uint8"])
def test_formats_that_are_no_numbers(encoding: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=rf"^value_encoding is '{encoding}', expected one of float16, "
    ):
        KvCacheStore(1, 2, 64, 8, value_encoding=encoding)
