"""The cache of one layer: where its K and V lie, and the pool behind them. Spec: 6.1, 6.7"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from kvx_core._c import abi, bound
from kvx_core.argument_checks import (
    address,
    bad_argument,
    coerce_fields,
    flag,
    format_repr,
    instance,
    integer,
    plural,
    product,
)
from kvx_core.desc import layouts
from kvx_core.desc.in_place import is_in_place, may_move, moved
from kvx_core.desc.overlap import share_an_element
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.tensors import TensorLike, borrow, dtype_name
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import Memory


@dataclass(frozen=True, slots=True, repr=False)
class PoolDesc:
    """The pool behind a KV_OFFSETS table, seen from one layer, as addresses; secondary 0: none.

    Spec: 6.7
    """

    memory: Memory
    bytes_per_block: int  # one K or V sub-block of one layer
    primary: int
    secondary: int = 0
    owner: object = field(default=None, compare=False)

    def __post_init__(self) -> None:
        coerce_fields(
            self,
            memory=Memory.called,
            bytes_per_block=integer,
            primary=address,
            secondary=address,
        )
        if self.secondary and self.secondary == self.primary:
            raise InvalidArgumentError(
                "secondary is the memory of primary, expected a pool of its own: blocks of the two "
                "pools would be the same bytes. Leave secondary out where there is one pool"
            )

    def __repr__(self) -> str:
        second = "with a secondary pool" if self.secondary else None
        memory = None if self.memory is Memory.HOST else self.memory.name
        return format_repr("PoolDesc", f"{self.bytes_per_block} bytes per block", second, memory)

    @classmethod
    def of(
        cls,
        primary: TensorLike,
        bytes_per_block: int,
        secondary: TensorLike | None = None,
    ) -> Self:
        """A pool whose first K sub-block of this layer is element 0 of `primary`.

        primary, secondary: tensors, any shape; their first elements are the addresses, and not the
                            same one
        Raises InvalidArgumentError, UnsupportedError.
        """
        first = borrow(primary, name="primary")
        second = None if secondary is None else borrow(secondary, name="secondary")
        return cls(
            memory=first.memory,
            bytes_per_block=bytes_per_block,
            primary=first.data,
            secondary=0 if second is None else second.data,
            owner=(first.owner, second and second.owner),
        )

    @property
    def owners(self) -> tuple[object, ...]:
        """The tensors that keep the pools alive."""
        return self.owner if isinstance(self.owner, tuple) else (self.owner,)

    def require_in_place(self, name: str) -> None:
        """Raises InvalidArgumentError if a pool's memory has moved."""
        for owner in filter(may_move, self.owners):
            if not any(is_in_place(owner, at, at + 1) for at in (self.primary, self.secondary)):
                raise moved(name)

    def to_c(self) -> abi.kvx_pool_desc_t:
        """A new C struct with these fields."""
        return abi.kvx_pool_desc_t(
            memory=self.memory,
            bytes_per_block=self.bytes_per_block,
            primary=self.primary,
            secondary=self.secondary,
        )


class BoundCalls(NamedTuple):
    """Calls bound to the tensors of a cache, by the key of their options. See ops/calls.py"""

    held: bound.Held
    calls: dict[str, bound.Call]  # a call keeps `held`, which therefore has no calls of its own


@dataclass(frozen=True, slots=True, repr=False)
class CacheDesc:
    """The cache of one layer.

    shared_kv: K and V are the same memory on purpose, so that V is what was written last. Spec: E.8
    Raises InvalidArgumentError for K and V that share an element without it.
    Spec: 6.1
    """

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int  # of K
    k: TensorDesc
    v: TensorDesc | None = None  # None: no V (MLA)
    pool: PoolDesc | None = None  # KV_OFFSETS only
    shared_kv: bool = False
    _c: abi.kvx_cache_desc_t = field(init=False, compare=False)
    # Its tensors as they were when `held` last looked, and the writes and gathers bound to them.
    bound_calls: BoundCalls | None = field(init=False, compare=False, default=None)

    def __post_init__(self) -> None:
        counts = ("num_blocks", "block_size", "num_kv_heads", "head_dim")
        coerce_fields(self, shared_kv=flag, **dict.fromkeys(counts, integer))
        _tensor("k", self.k)
        if self.v is not None:
            _tensor("v", self.v, ", or None where there is no V")
            if not self.shared_kv and share_an_element(self.k, self.v):
                raise InvalidArgumentError(
                    "v is in the memory of k, expected elements of its own: a write would store V "
                    "over K. Pass v=None where there is no V (MLA), or shared_kv=True if both are "
                    "meant to be the same memory"
                )
        if self.pool is not None:
            instance("pool", self.pool, PoolDesc, "a PoolDesc, such as PoolDesc.of(...), or None")
        struct = abi.kvx_cache_desc_t(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            k=self.k.to_c(),
            v=abi.kvx_tensor_desc_t() if self.v is None else self.v.to_c(),
        )
        if self.pool is not None:
            struct.pool = self.pool.to_c()
        object.__setattr__(self, "_c", struct)

    def __repr__(self) -> str:
        return format_repr("CacheDesc", *self.words())

    def words(self) -> tuple[str | None, ...]:
        """The parts of the repr: '8 blocks x 16 tokens x 2 heads x 64', 'float16', ..."""
        counts = (
            plural(self.num_blocks, "block"),
            plural(self.block_size, "token"),
            plural(self.num_kv_heads, "head"),
            self.head_dim,
        )
        memory = {tensor.memory for tensor in self.tensors.values()} - {Memory.HOST}
        return (
            product(counts),
            *_kind(self.k),
            self._v_words(),
            " and ".join(sorted(found.name for found in memory)),
            "with a pool" if self.pool else None,
        )

    def _v_words(self) -> str | None:
        """The parts of the repr that say how V differs from K."""
        if self.v is None:
            return "no V"
        kinds = zip(_kind(self.k), _kind(self.v), strict=True)
        parts = [of_v for of_k, of_v in kinds if of_v != of_k]
        dim = self.v_head_dim if self.v.ndim in (4, 5) else None
        if dim is not None and dim != self.head_dim:
            parts.insert(0, str(dim))
        return f"V: {' '.join(parts)}" if parts else None

    @classmethod
    def from_kv(
        cls,
        k: TensorDesc,
        v: TensorDesc | None = None,
        *,
        pool: PoolDesc | None = None,
        shared_kv: bool = False,
    ) -> Self:
        """The cache whose K is `k`, V is `v`; its sizes are those of `k`.

        V may differ in layout, strides, dtype and head_dim, or be None.
        shared_kv: K and V are the same memory on purpose; without it they may not share an element
        Raises InvalidArgumentError if `k` does not have the axes of its layout or V lies in K;
        `validate` and every call check the rest.
        """
        _tensor("k", k)
        sizes = layouts.axes(k.layout, k.shape)
        return cls(
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim * k.dtype.numbers,
            k=k,
            v=v,
            pool=pool,
            shared_kv=shared_kv,
        )

    @property
    def v_head_dim(self) -> int:
        """head_dim of V; 0 without V."""
        if self.v is None:
            return 0
        return layouts.axes(self.v.layout, self.v.shape).head_dim * self.v.dtype.numbers

    @property
    def head_bytes(self) -> int:
        """Bytes of K and V of one token and head, as stored."""
        dims = self.head_dim, self.v_head_dim
        return sum(
            dim // tensor.dtype.numbers * tensor.dtype.itemsize
            for dim, tensor in zip(dims, self.tensors.values(), strict=False)
        )

    @property
    def tensors(self) -> dict[str, TensorDesc]:
        """K and, if there is one, V, by their names "k" and "v"."""
        return {"k": self.k} if self.v is None else {"k": self.k, "v": self.v}

    def validate(self) -> None:
        """Checks everything that can be checked without reading the cache.

        Raises InvalidArgumentError, UnsupportedError.
        Spec: 7.1
        """
        abi.check(abi.library().kvx_validate_cache_desc(self._c))

    def require_in_place(self, name: str) -> None:
        """Raises InvalidArgumentError if the cache's memory has moved: its storage was resized or
        replaced.

        name: what errors call it
        """
        self.held(name)

    def held(self, name: str) -> bound.Held:
        """The torch tensors that it describes, after a check that their memory has not moved.

        name: what errors call the cache
        Raises InvalidArgumentError.
        """
        if self.bound_calls is not None and self.bound_calls.held.is_current():
            return self.bound_calls.held
        for half, tensor in self.tensors.items():
            tensor.require_in_place(f"{name}.{half}")
        if self.pool is not None:
            self.pool.require_in_place(f"{name}.pool")
        held = bound.Held(self.moving_owners)
        object.__setattr__(self, "bound_calls", BoundCalls(held, {}))
        return held

    @property
    def moving_owners(self) -> list[Any]:
        """The tensors that it describes whose memory may be other memory later."""
        owners = [tensor.owner for tensor in self.tensors.values()]
        return list(filter(may_move, [*owners, *(self.pool.owners if self.pool else ())]))

    def to_c(self) -> abi.kvx_cache_desc_t:
        """The C struct with these fields: built once, shared, never changed."""
        return self._c


def _tensor(name: str, desc: Any, otherwise: str = "") -> None:
    if not isinstance(desc, TensorDesc):
        raise bad_argument(name, desc, f"a TensorDesc: describe(tensor, layout){otherwise}")


def _kind(tensor: TensorDesc) -> tuple[str, str]:
    return dtype_name(tensor.dtype), tensor.layout.name.removeprefix("BLOCK_")
