"""The rules of KvCacheStore: what goes in and comes out, what fails and leaves it as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import (
    DType,
    InvalidArgumentError,
    KvCacheStore,
    KvCacheStoreLike,
    KvMemoryReport,
    KvStorage,
    KvxError,
    OutOfRangeError,
)
from tests.kv_stores import DIM, HEADS, LAYERS, TOKEN, contents, fill, same, some, store_of


def refused(
    store: KvCacheStore, error: type[KvxError], sentence: str, call: Callable[[], object]
) -> None:
    """`call` fails with this whole sentence, and leaves the store as it was."""
    before = contents(store)
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        call()
    assert same(contents(store), before)


@pytest.mark.parametrize("dtype", ["Q8_0", "float8_e4m3fn", "bfloat16"])
def test_layers_take_their_tokens_in_any_order(dtype: str) -> None:
    """Step by step through the layers, layer by layer token by token, and at random: one store."""
    tokens = some(9, 1)
    wanted = contents(fill(store_of(dtype, dtype), tokens, [1] * 9))
    backwards = [(layer, t) for layer in reversed(range(LAYERS)) for t in range(9)]
    mixed = [(1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2), (0, 3)]
    mixed += [(0, t) for t in range(4, 9)] + [(1, t) for t in range(3, 9)]
    for order in (backwards, mixed):
        store = store_of(dtype, dtype)
        held = [0] * LAYERS
        for layer, t in order:
            store.append_token(layer, tokens[layer, 0, t], tokens[layer, 1, t])
            held[layer] += 1
            assert [store.layer_seq_len(i) for i in range(LAYERS)] == held
            assert store.current_seq_len == min(held)
        assert same(contents(store), wanted)


def test_a_read_sees_what_its_layer_holds() -> None:
    """Layer 0 has its whole prompt, layer 1 nothing of it yet."""
    tokens = some(7, 1)
    store = fill(store_of(), tokens[:, :, :4])
    whole = fill(store_of(), tokens)
    store.append(0, *tokens[0, :, 4:])
    assert repr(store).split(", ")[1:3] == ["4 of 41 tokens", "3 more in 1 layer"]
    assert [store.layer_seq_len(layer) for layer in range(2)] == [7, 4]
    assert store.current_seq_len == 4
    assert store.read_keys(0).shape[1] == store.read_keys(1).shape[1] == 4
    assert torch.equal(store.read_keys(0, 0, 7), whole.read_keys(0))
    query = torch.ones(HEADS, DIM)
    assert torch.equal(store.attend(0, query), whole.attend(0, query))
    sentence = "end is 7, expected 0 to 4: layer 1 holds 4 tokens"
    for read in (store.read_keys, store.read_values, store.read_key_storage):
        refused(store, InvalidArgumentError, sentence, lambda r=read: r(1, 0, 7))  # type: ignore[misc]
    refused(store, InvalidArgumentError, sentence, lambda: store.attend(1, query, end=7))
    refused(
        store,
        InvalidArgumentError,
        "layer 1 holds 4 tokens, expected 7 as another layer holds: append to it first, or drop "
        "the others' with evict(4)",
        lambda: store.append_zeros(1),
    )
    store.evict(6)
    assert [store.layer_seq_len(layer) for layer in range(2)] == [6, 4]
    store.evict(4)
    assert same(contents(store), contents(fill(store_of(), tokens[:, :, :4])))
    store.append(1, *tokens[1, :, 4:])
    store.append(0, *tokens[0, :, 4:])
    assert same(contents(store), contents(whole))


def test_a_layer_that_is_not_there() -> None:
    refused(
        store_of(),
        InvalidArgumentError,
        "layer is 2, expected 0 to 1",
        lambda: store_of().append_token(2, TOKEN, TOKEN),
    )


def test_lists_and_float64_are_rounded_to_float32() -> None:
    tokens = some(3, 5).double() * (1 + 2.0**-40)
    wanted = contents(fill(store_of("float32", "Q8_0"), tokens.float()))
    kinds: list[Callable[[torch.Tensor], object]] = [
        lambda t: t,
        lambda t: t.flatten(),
        lambda t: t.numpy(),
        lambda t: t.tolist(),
        lambda t: t.flatten().tolist(),
        lambda t: tuple(map(tuple, t.tolist())),
    ]
    for kind in kinds:
        store = store_of("float32", "Q8_0")
        for t in range(3):
            for layer in range(LAYERS):
                store.append_token(layer, kind(tokens[layer, 0, t]), kind(tokens[layer, 1, t]))
        assert same(contents(store), wanted)
    store = store_of("float32", "Q8_0")
    for layer, (keys, values) in enumerate(tokens):
        store.append(layer, keys.tolist(), values.numpy())
    assert same(contents(store), wanted)
    ones = store_of("float32", "float32")
    ones.append(0, [[[1] * DIM] * HEADS], [[[1.0] * DIM] * HEADS])  # integers of a list
    assert (ones.read_keys(0, 0, 1) == 1).all()


def test_numbers_that_float32_does_not_reach() -> None:
    large = torch.zeros(HEADS, DIM, dtype=torch.float64)
    large[1, 5] = -1e39
    said = "key has numbers past the largest of float32, expected at most 3.4028235e38"
    for key in (large, large.numpy(), large.tolist()):
        store = store_of()
        refused(
            store,
            InvalidArgumentError,
            said,
            lambda s=store, k=key: s.append_token(0, k, TOKEN),  # type: ignore[misc]
        )
    store = store_of("float32", "float32")
    store.append_token(0, large * float("inf"), TOKEN)  # an infinity stays one
    assert store.read_keys(0, 0, 1)[1, 0, 5] == -float("inf")


@pytest.mark.parametrize(
    "wrong",
    [["a"] * HEADS * DIM, [[1.0], [1.0, 2.0]], [10**400], [True], [None], [1j]],
    ids=["words", "of unequal length", "past float64", "truths", "nothing", "complex"],
)
def test_lists_that_are_no_numbers(wrong: list[object]) -> None:
    store = store_of()
    said = "value is a list, expected a list of numbers, or such lists of equal length"
    refused(store, InvalidArgumentError, said, lambda: store.append_token(0, TOKEN, wrong))


class ListStore:
    """A store of others: float32, in lists."""

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, max_seq_len: int) -> None:
        self.num_layers, self.num_heads, self.head_dim = num_layers, num_heads, head_dim
        self.max_seq_len = max_seq_len
        self.key_encoding = self.value_encoding = DType.F32
        self.placement = torch.device("cpu")
        self._tokens: list[list[list[torch.Tensor]]] = [[[], []] for _ in range(num_layers)]

    @property
    def current_seq_len(self) -> int:
        return min(len(keys) for keys, _ in self._tokens)

    def append_token(self, layer: int, key: Any, value: Any) -> None:
        for held, new in zip(self._tokens[layer], (key, value), strict=True):
            held.append(torch.as_tensor(new).view(self.num_heads, self.head_dim).clone())

    def _read(self, half: int, layer: int, start: int, end: int | None) -> torch.Tensor:
        stop = self.current_seq_len if end is None else end
        return torch.stack(self._tokens[layer][half])[start:stop].transpose(0, 1)

    def read_keys(self, layer: int, start: int = 0, end: int | None = None) -> torch.Tensor:
        return self._read(0, layer, start, end)

    def read_values(self, layer: int, start: int = 0, end: int | None = None) -> torch.Tensor:
        return self._read(1, layer, start, end)

    def read_key_storage(self, layer: int, start: int = 0, end: int | None = None) -> KvStorage:
        return KvStorage(self.read_keys(layer, start, end), DType.F32, None)

    def read_value_storage(self, layer: int, start: int = 0, end: int | None = None) -> KvStorage:
        return KvStorage(self.read_values(layer, start, end), DType.F32, None)

    def evict(self, from_pos: int) -> None:
        for halves in self._tokens:
            for held in halves:
                del held[from_pos:]

    def clear(self) -> None:
        self.evict(0)

    def memory_report(self) -> KvMemoryReport:
        return store_of("float32", "float32").memory_report()


def decoded(store: KvCacheStoreLike, tokens: torch.Tensor) -> list[torch.Tensor]:
    """What a backend does with a store, whosever it is."""
    store.clear()
    for t in range(tokens.shape[2]):
        for layer in range(store.num_layers):
            store.append_token(layer, tokens[layer, 0, t].flatten(), tokens[layer, 1, t].flatten())
    store.evict(5)
    assert store.current_seq_len == 5
    assert store.key_encoding is store.value_encoding is store.read_key_storage(0).encoding
    return [
        part
        for layer in range(store.num_layers)
        for read in (store.read_keys, store.read_values)
        for part in (read(layer), read(layer, 2), read(layer, 1, 3))
    ]


def test_others_can_implement_a_store() -> None:
    theirs: KvCacheStoreLike = ListStore(LAYERS, HEADS, DIM, 41)
    ours: KvCacheStoreLike = store_of("float32", "float32")
    assert isinstance(theirs, KvCacheStoreLike)
    assert isinstance(ours, KvCacheStoreLike)
    assert not isinstance(torch.zeros(1), KvCacheStoreLike)
    tokens = some(7, 2)
    for mine, other in zip(decoded(ours, tokens), decoded(theirs, tokens), strict=True):
        assert torch.equal(mine, other)


def test_the_interface_has_every_name_of_a_store() -> None:
    """Properties and functions, and what a store may have besides."""
    names = {name for name in dir(KvCacheStoreLike) if not name.startswith("_")}
    assert names == {
        "append_token", "clear", "current_seq_len", "evict", "head_dim", "key_encoding",
        "max_seq_len", "memory_report", "num_heads", "num_layers", "placement", "read_key_storage",
        "read_keys", "read_value_storage", "read_values", "value_encoding",
    }  # fmt: skip
    assert names < set(dir(KvCacheStore))
    for name in names:
        assert getattr(KvCacheStoreLike, name).__doc__
        assert getattr(KvCacheStore, name) is not None


def test_a_full_store() -> None:
    store = fill(store_of(max_seq_len=6), some(5, 1))
    two = torch.zeros(2, HEADS, DIM)
    for call, count, holder in (
        (lambda: store.append(0, two, two), "2 tokens", "layer 0"),
        (lambda: store.append_zeros(7), "7 tokens", "the store"),
    ):
        refused(
            store,
            OutOfRangeError,
            f"{holder} holds 5 of max_seq_len 6 tokens, expected room for {count} more. Evict "
            "tokens, or make a larger store",
            call,
        )
    fill(store, some(1, 2))
    with pytest.raises(OutOfRangeError, match="room for 1 token more"):
        store.append_token(0, TOKEN, TOKEN)


@pytest.mark.parametrize("dtype", ["Q8_0", "float8_e4m3fn"])
def test_wrong_tokens_leave_the_store_as_it_was(dtype: str) -> None:
    store = fill(store_of(dtype, dtype), some(4, 1))
    flat = HEADS * DIM
    expected = f"expected ({flat},), num_heads {HEADS} * head_dim {DIM}, or ({HEADS}, {DIM})"
    short = torch.zeros(flat - 1)
    for key, value, sentence in (
        (short, TOKEN, f"key.shape is ({flat - 1},), {expected}"),
        (TOKEN, short, f"value.shape is ({flat - 1},), {expected}"),
        (TOKEN, TOKEN.T, f"value.shape is ({DIM}, {HEADS}), {expected}"),
        (
            None,
            TOKEN,
            "key is None, expected a list of numbers, a torch.Tensor, a numpy.ndarray or an object "
            "with __dlpack__",
        ),
    ):
        refused(
            store,
            InvalidArgumentError,
            sentence,
            lambda key=key, value=value: store.append_token(0, key, value),
        )
    many = torch.zeros(3, HEADS, DIM)
    of_store = "at least one token, num_heads and head_dim of the store"
    for keys, values, sentence in (
        (
            many[:0],
            many[:0],
            f"keys.shape is (0, {HEADS}, {DIM}), expected (num_tokens, {HEADS}, {DIM}): {of_store}",
        ),
        (many, many[:2], "values.shape[0] is 2, expected 3 tokens as keys has"),
        (
            many[0],
            many,
            f"keys.shape is ({HEADS}, {DIM}), expected (num_tokens, {HEADS}, {DIM}): {of_store}",
        ),
    ):
        refused(
            store,
            InvalidArgumentError,
            sentence,
            lambda keys=keys, values=values: store.append(0, keys, values),
        )
    floats = ", expected float32, float16, bfloat16 or float64$"
    for wrong in (many.long(), many.bool(), many.int().numpy(), many.cfloat()):
        with pytest.raises(KvxError, match=rf"^values\.dtype is '[\w.]+'{floats}"):
            store.append(0, many, wrong)
        with pytest.raises(KvxError, match=rf"^keys\.dtype is '[\w.]+'{floats}"):
            store.append(0, wrong, many)
    assert [store.layer_seq_len(layer) for layer in range(LAYERS)] == [4, 4]
    assert same(contents(store), contents(fill(store_of(dtype, dtype), some(4, 1))))


def test_storages_that_were_shrunk_are_not_read_past_their_end() -> None:
    store = fill(store_of(), some(4, 1))

    def shrunk(*shape: int) -> torch.Tensor:
        tensor = torch.ones(shape)
        tensor.untyped_storage().resize_(tensor.nbytes - 1)
        return tensor

    short, tokens, query = shrunk(2, HEADS, DIM), torch.ones(2, HEADS, DIM), shrunk(HEADS, DIM)
    sizes = f"has a storage of {short.nbytes - 1} bytes, expected at least {short.nbytes}"
    tail = ": it has been resized since the tensor was made"
    for name, keys, values in (("keys", short, tokens), ("values", tokens, short)):
        refused(
            store,
            InvalidArgumentError,
            f"{name} {sizes}{tail}",
            lambda keys=keys, values=values: store.append(0, keys, values),
        )
    with pytest.raises(InvalidArgumentError, match=r"^query has a storage of"):
        store.attend(0, query)


def test_ranges_that_are_not_there() -> None:
    store = fill(store_of(), some(4, 1))
    store.append_token(0, TOKEN, TOKEN)
    assert store.read_keys(0).shape[1] == 4
    assert store.read_keys(0, 4, 5).shape[1] == 1
    for read in (store.read_keys, store.read_value_storage):
        for layer, start, end, sentence in (
            (0, 0, 6, "end is 6, expected 0 to 5: layer 0 holds 5 tokens"),
            (1, 0, 5, "end is 5, expected 0 to 4: layer 1 holds 4 tokens"),
            (0, 3, 2, "start is 3, expected 0 to 2"),
            (0, -1, 2, "start is -1, expected 0 to 2"),
            (2, 0, 1, "layer is 2, expected 0 to 1"),
        ):
            refused(
                store,
                InvalidArgumentError,
                sentence,
                lambda r=read, a=(layer, start, end): r(*a),  # type: ignore[misc]
            )
    with pytest.raises(InvalidArgumentError, match=r"^head is 3, expected 0 to 2$"):
        store.read_keys(0, head=3)
    with pytest.raises(InvalidArgumentError, match=r"^out\.shape is \(2, 2\), expected"):
        store.read_keys(0, out=torch.zeros(2, 2))
    with pytest.raises(KvxError, match=r"^out\.dtype is"):
        store.read_keys(0, out=torch.zeros(HEADS, 4, DIM, dtype=torch.int32))
    fixed = np.zeros((HEADS, 4, DIM), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match=r"^out is read-only memory"):
        store.read_keys(0, out=fixed)
