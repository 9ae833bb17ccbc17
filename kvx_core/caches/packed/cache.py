"""The keys and values of one layer as two tensors (batch, seq, dim) that grow at their end.

dim is num_kv_heads * head_dim, or num_heads * head_dim where the model has repeated its heads.
There is room behind the last token, so that a step copies no more than its own tokens.

Threads: caches share nothing, so that each thread may use its own. append_packed, set_packed,
truncate and clear of one cache take one caller at a time; there are no locks. Meanwhile other
threads may ask for its keys and values and read them: what a cache holds is replaced in one
assignment, and an append writes behind all views that were handed out. This does not hold across
truncate: the next append overwrites the dropped tokens in the views that still show them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvx_core._c import bound
from kvx_core.argument_checks import format_repr, instance, integer, product
from kvx_core.desc.tensors import require_whole
from kvx_core.errors import InvalidArgumentError
from kvx_core.ops.append_op import kvcache_append

_SPARE = 256  # tokens of room that a new allocation has, at least
# How many times as large the next allocation is, at least. On a host, pages that nobody has touched
# take no memory.
_GROWTH = {"cpu": 4}
_GROWTH_OF_DEVICES = 2


@dataclass(slots=True)
class Held:
    """The tensors of a cache. Another append into the same room changes seq_len, nothing else."""

    keys: Tensor  # (batch, capacity, dim); from seq_len on there is room
    values: Tensor
    seq_len: int
    is_own: bool = False  # allocated here: an append may write behind seq_len
    has_dropped: bool = False  # views that were handed out may show what lies behind seq_len
    step: Callable[..., bool] | None = None  # see bound.append; None: torch copies each token
    is_shared: bool = False  # with a copy of the cache: nobody writes here any more


class PackedKVCache:
    """The keys and values of one layer: two tensors (batch, seq, dim) that grow along seq.

    capacity: tokens that the first allocation has room for, at least
    One thread at a time may change it; others may read it meanwhile, see the top of this file.
    Raises InvalidArgumentError.
    """

    __slots__ = ("__weakref__", "_capacity", "_held")

    def __init__(self, capacity: int = 0) -> None:
        self._capacity = integer("capacity", capacity)
        self._held: Held | None = None

    def __repr__(self) -> str:
        held = self._held
        if held is None:
            return "PackedKVCache(nothing)"
        keys = held.keys
        return format_repr(
            "PackedKVCache",
            product((keys.shape[0], held.seq_len, keys.shape[2])),
            str(keys.dtype).removeprefix("torch."),
            None if keys.device.type == "cpu" else str(keys.device),
            f"room for {keys.shape[1]} tokens" if held.is_own else "tensors of the caller",
        )

    def __copy__(self) -> PackedKVCache:
        """A cache of the same tokens in the same memory, which neither of the two writes any more:
        the next append of each copies it."""
        other = PackedKVCache(self._capacity)
        if self._held is not None:
            held = replace(self._held, is_own=False, step=None, is_shared=True)
            self._held = other._held = held
        return other

    def __getstate__(self) -> tuple[Any, ...]:
        held = self._held
        if held is None:
            return (self._capacity,)
        return self._capacity, held.keys, held.values, held.seq_len, held.is_own, held.has_dropped

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._capacity, *fields = state
        self._held = Held(*fields) if fields else None
        held = self._held
        if held is not None and held.is_own and not held.has_dropped:
            held.step = bound.append(held.keys, held.values)

    @property
    def seq_len(self) -> int:
        """Tokens of each sequence."""
        held = self._held
        return 0 if held is None else held.seq_len

    @property
    def capacity(self) -> int:
        """Tokens of each sequence that fit before an append has to allocate."""
        held = self._held
        if held is None:
            return 0
        return held.keys.shape[1] if held.is_own else held.seq_len

    @property
    def has_packed(self) -> bool:
        """Whether it holds keys and values, be they of no tokens."""
        return self._held is not None

    @property
    def is_empty(self) -> bool:
        """Whether it holds no tokens."""
        return self.seq_len == 0

    def packed_keys(self) -> Tensor | None:
        """The keys, (batch, seq, dim), as a view of the cache; None if it holds nothing.

        Appends do not change what a view shows. Tokens in it that truncate drops are overwritten by
        the next append.
        """
        held = self._held
        return None if held is None else held.keys[:, : held.seq_len]

    def packed_values(self) -> Tensor | None:
        """The values, (batch, seq, dim), as a view of the cache; None if it holds nothing.

        The same holds for them as for the keys of packed_keys.
        """
        held = self._held
        return None if held is None else held.values[:, : held.seq_len]

    def append_packed(self, new_keys: Tensor, new_values: Tensor) -> None:
        """Appends tokens to every sequence.

        new_keys, new_values: (batch, new, dim), any strides, of one dtype on one device; batch,
                              dim, dtype and device are those that the cache holds, if it does
        Copies the new tokens, on the current stream. Where there is no room for them it allocates
        more and copies the others too: amortised over appends, about each token once.
        Where autograd records new or held tokens, each call makes new tensors instead, with
        kvcache_append, so that gradients flow.
        Mutates the cache, and no tensor that it was given. Raises InvalidArgumentError, and leaves
        the cache as it was.
        """
        held = self._held
        if (
            held is not None
            and held.step is not None
            and held.step(new_keys, new_values, held.seq_len)
            and not (new_keys.requires_grad or new_values.requires_grad)
        ):
            held.seq_len += 1
            return
        if held is None:
            require_packed("new_keys", new_keys, "new_values", new_values)
            held = Held(new_keys[:, :0], new_values[:, :0], 0)
        else:
            _require_follows(held, new_keys, new_values)
        keys, values, seq_len = held.keys, held.values, held.seq_len
        has_dropped, step = held.has_dropped, held.step
        end = seq_len + new_keys.shape[1]
        if torch.is_grad_enabled() and (
            new_keys.requires_grad
            or new_values.requires_grad
            or keys.requires_grad
            or values.requires_grad
        ):
            keys = kvcache_append(keys[:, :seq_len], new_keys)
            values = kvcache_append(values[:, :seq_len], new_values)
            # The graph may have saved them: they are not to be written.
            self._held = Held(keys, values, end)
            return
        if not held.is_own or end > keys.shape[1]:
            room = self._room_for(end, held)
            keys, values = (_with_room(half, seq_len, room) for half in (keys, values))
            has_dropped = False
            step = bound.append(keys, values)
        elif has_dropped:  # the new tokens may lie where they are written to
            new_keys, new_values = (_apart(new, (keys, values)) for new in (new_keys, new_values))
        # What a graph has saved of views that were handed out stays as it was, unless truncate has
        # dropped some: torch is told only then that this memory changes.
        at_keys, at_values = (keys, values) if has_dropped else (keys.data, values.data)
        at_keys[:, seq_len:end] = new_keys
        at_values[:, seq_len:end] = new_values
        self._held = Held(keys, values, end, True, has_dropped, step)

    def set_packed(self, keys: Tensor, values: Tensor) -> None:
        """Holds these tokens instead of what it holds, without a copy.

        keys, values: (batch, seq, dim), any strides, of one dtype on one device
        They stay the caller's: the cache never writes into them, and the next append copies them.
        Mutates the cache. Raises InvalidArgumentError, and leaves the cache as it was.
        """
        require_packed("keys", keys, "values", values)
        self._held = Held(keys, values, keys.shape[1])

    def truncate(self, num_tokens: int) -> None:
        """Drops the last `num_tokens` tokens of every sequence: as many as that, not down to that.

        Mutates the cache, which keeps its room. Raises InvalidArgumentError, and leaves it as it
        was, if it holds fewer.
        """
        held = self._held
        held_tokens = 0 if held is None else held.seq_len
        number = integer("num_tokens", num_tokens)
        if number > held_tokens:
            raise InvalidArgumentError(
                f"num_tokens is {number}, expected at most seq_len {held_tokens}: truncate drops "
                "that many from the end"
            )
        if held is not None and number:
            seq_len = held_tokens - number
            self._held = replace(held, seq_len=seq_len, has_dropped=True, step=None)

    def clear(self) -> None:
        """Drops everything: the next append may have another batch, dim, dtype and device.

        Views that were handed out keep their memory and what it holds.
        """
        self._held = None

    def _room_for(self, seq_len: int, held: Held) -> int:
        growth = _GROWTH.get(held.keys.device.type, _GROWTH_OF_DEVICES)
        grown = growth * held.keys.shape[1] if held.is_own else 0
        return max(seq_len + _SPARE, self._capacity, grown)


def require_packed(keys_name: str, keys: Tensor, values_name: str, values: Tensor) -> None:
    """Refuses what are not keys and values of the same tokens, (batch, seq, dim) each.

    Raises InvalidArgumentError, which calls them by these names.
    """
    for name, tensor in ((keys_name, keys), (values_name, values)):
        instance(name, tensor, Tensor, "a torch.Tensor (batch, seq, dim)")
        if tensor.layout is not torch.strided:
            raise InvalidArgumentError(
                f"{name}.layout is {tensor.layout}, expected torch.strided. Pass {name}.to_dense()"
            )
        if tensor.ndim != 3:
            raise InvalidArgumentError(
                f"{name} has {tensor.ndim} axes, shape {tuple(tensor.shape)}, expected 3: (batch, "
                "seq, dim), where dim is num_kv_heads * head_dim"
            )
        require_whole(name, tensor)
    if values.shape != keys.shape:
        raise InvalidArgumentError(
            f"{values_name}.shape is {tuple(values.shape)}, expected {tuple(keys.shape)} as "
            f"{keys_name} has"
        )
    for field in ("dtype", "device"):
        of_keys, of_values = getattr(keys, field), getattr(values, field)
        if of_keys != of_values:
            raise InvalidArgumentError(
                f"{values_name}.{field} is {of_values}, expected {of_keys} as {keys_name} has"
            )


def _require_follows(held: Held, new_keys: Tensor, new_values: Tensor) -> None:
    """Refuses tokens that cannot follow those held. Raises InvalidArgumentError."""
    keys = held.keys
    require_whole("the cache's keys", keys)
    require_whole("the cache's values", held.values)
    if isinstance(new_keys, Tensor) and isinstance(new_values, Tensor):
        shape, of_cache = new_keys.shape, keys.shape
        if (
            len(shape) == 3
            and shape == new_values.shape
            and (shape[0], shape[2]) == (of_cache[0], of_cache[2])
            and new_keys.dtype == new_values.dtype == keys.dtype
            and new_keys.device == new_values.device == keys.device
            and new_keys.layout is new_values.layout is torch.strided
        ):
            require_whole("new_keys", new_keys)
            require_whole("new_values", new_values)
            return
    require_packed("new_keys", new_keys, "new_values", new_values)
    for axis, name in ((0, "batch"), (2, "dim")):
        if new_keys.shape[axis] != keys.shape[axis]:
            raise InvalidArgumentError(
                f"new_keys.shape[{axis}] is {new_keys.shape[axis]}, expected {name} "
                f"{keys.shape[axis]} of the cache. Call clear() before tokens of another {name}"
            )
    for field in ("dtype", "device"):
        new, of_held = getattr(new_keys, field), getattr(keys, field)
        if new != of_held:
            raise InvalidArgumentError(
                f"new_keys.{field} is {new}, expected {of_held} as the cache holds. Pass "
                f"new_keys.to(cache.packed_keys().{field}), and new_values alike"
            )


def _with_room(half: Tensor, seq_len: int, capacity: int) -> Tensor:
    """A new tensor with the first `seq_len` tokens of `half` and room for `capacity`."""
    batch, _, dim = half.shape
    # Not of inference mode: those could not be written outside of it.
    with torch.inference_mode(False):
        grown = torch.empty((batch, capacity, dim), dtype=half.dtype, device=half.device)
    with torch.no_grad():
        grown[:, :seq_len] = half[:, :seq_len]
    return grown


def _apart(new: Tensor, halves: tuple[Tensor, Tensor]) -> Tensor:
    """`new`, or a copy of it if it lies in the memory of one of `halves`."""
    own = {half.untyped_storage().data_ptr() for half in halves}
    return new.clone() if new.untyped_storage().data_ptr() in own else new
