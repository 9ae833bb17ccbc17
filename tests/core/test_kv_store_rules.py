"""The rules of KvCacheStore: layers take turns, and what fails leaves the store as it was."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvx_core import InvalidArgumentError, KvCacheStore, KvxError, OutOfRangeError
from tests.kv_stores import DIM, HEADS, LAYERS, TOKEN, contents, fill, same, some, store_of


def refused(
    store: KvCacheStore, error: type[KvxError], sentence: str, call: Callable[[], object]
) -> None:
    """`call` fails with this whole sentence, and leaves the store as it was."""
    before = contents(store)
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        call()
    assert same(contents(store), before)


def test_layers_take_turns() -> None:
    store = fill(store_of(), some(4, 1))
    missing = "layer is 1 at position 4, expected 0, which is missing: layers take their tokens one"
    refused(
        store,
        InvalidArgumentError,
        f"{missing} after the other",
        lambda: store.append_token(1, TOKEN, TOKEN),
    )
    store.append_token(0, TOKEN, TOKEN)
    assert store.current_seq_len == 4
    assert [store.layer_seq_len(layer) for layer in range(2)] == [5, 4]
    refused(
        store,
        InvalidArgumentError,
        "layer 0 has been appended already at position 4, expected layer 1: a layer takes its "
        "tokens once per step. Or drop the step with evict(4)",
        lambda: store.append_token(0, TOKEN, TOKEN),
    )
    refused(
        store,
        InvalidArgumentError,
        "layer 1 is given 2 tokens, expected 1 as the layers before it were given in this step",
        lambda: store.append(1, torch.zeros(2, HEADS, DIM), torch.zeros(2, HEADS, DIM)),
    )
    refused(
        store,
        InvalidArgumentError,
        "layer 1 is missing in this step, expected all layers or none: append to the others "
        "first, or drop the step with evict(4)",
        lambda: store.append_zeros(1),
    )
    refused(
        store,
        InvalidArgumentError,
        "layer is 2, expected 0 to 1",
        lambda: store.append_token(2, TOKEN, TOKEN),
    )
    store.append_token(1, TOKEN, TOKEN)
    assert store.current_seq_len == 5


def test_a_missing_layer_in_the_midst_of_a_step() -> None:
    store = KvCacheStore(3, HEADS, DIM, 4)
    store.append_token(0, TOKEN, TOKEN)
    refused(
        store,
        InvalidArgumentError,
        "layer is 2 at position 0, expected 1, which is missing: layers take their tokens one "
        "after the other. Or drop the step with evict(0)",
        lambda: store.append_token(2, TOKEN, TOKEN),
    )
    store.evict(0)
    store.append_token(0, TOKEN, TOKEN)


def test_a_full_store() -> None:
    store = fill(store_of(max_seq_len=6), some(5, 1))
    two = torch.zeros(2, HEADS, DIM)
    for call, count in (
        (lambda: store.append(0, two, two), "2 tokens"),
        (lambda: store.append_zeros(7), "7 tokens"),
    ):
        refused(
            store,
            OutOfRangeError,
            f"the store holds 5 of max_seq_len 6 tokens, expected room for {count} more. Evict "
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
            "key is None, expected a torch.Tensor, a numpy.ndarray or an object with __dlpack__",
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
    for wrong in (many.long(), many.bool()):
        with pytest.raises(KvxError, match=r"^values\.dtype is"):
            store.append(0, many, wrong)
        with pytest.raises(KvxError, match=r"^keys\.dtype is"):
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
            (0, 0, 6, "end is 6, expected 0 to 5"),
            (1, 0, 5, "end is 5, expected 0 to 4"),
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
