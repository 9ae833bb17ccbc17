"""write_layers and WriteLayersPlan: the new tokens of several layers in one call.

The call is bound once; C then reads its torch tensors. Other tensors are described here, and the
same call takes the descriptions. Spec: E.23
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from kvx_core._c import abi, bound
from kvx_core.argument_checks import bad_argument, instance
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.in_place import may_move
from kvx_core.desc.placing import where_read
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.tables import DESCRIPTORS, SlotMapping
from kvx_core.desc.tensor_desc import TensorDesc
from kvx_core.desc.tensors import TensorLike, owning_device
from kvx_core.errors import InternalError, InvalidArgumentError
from kvx_core.ops.calls import A_CACHE, require_cache, token_desc, write_like
from kvx_core.ops.options import Scale, WriteOptions
from kvx_core.ops.streams import call_stream, stream_number
from kvx_core.types import Memory, Transfer

_Tokens = Sequence[TensorLike | TensorDesc] | TensorLike  # the layers are its first axis
_Values = Sequence[TensorLike | TensorDesc | None] | TensorLike
_Scales = Sequence[Scale | None]


class WriteLayersPlan:
    """write_layers, bound to all but its tensors: for engines that write the same caches each step.

    Threads may share a plan. It refuses a cache or scale whose storage was resized or replaced
    since.
    """

    __slots__ = ("_caches", "_call", "_options", "_stream")

    def __init__(
        self,
        caches: Sequence[CacheDesc],
        *,
        k_scales: _Scales | None = None,
        v_scales: _Scales | None = None,
        find_scales: bool = False,
        transfer: Transfer | str = Transfer.KERNEL,
        stream: abi.Stream = None,
    ) -> None:
        """Binds the caches; writes nothing. The plan keeps them and the scales alive.

        caches and the options: as for write_layers; `stream` may be a function, which each call
        asks
        Raises InvalidArgumentError, UnsupportedError.
        """
        self._caches = tuple(
            instance(f"caches[{i}]", cache, CacheDesc, A_CACHE)
            for i, cache in enumerate(_sequence("caches", caches, "CacheDesc, one of each layer"))
        )
        if not self._caches:
            raise InvalidArgumentError("caches is empty, expected at least one")
        count = len(self._caches)
        of_k, of_v = _scales("k_scales", k_scales, count), _scales("v_scales", v_scales, count)
        options = {"find_scales": find_scales, "transfer": transfer}
        self._options = tuple(
            WriteOptions.of({"k_scale": k, "v_scale": v, **options})
            for k, v in zip(of_k, of_v, strict=True)
        )
        self._stream = call_stream(stream, *(cache.k.owner for cache in self._caches))
        self._call = self._bind()

    def _bind(self) -> bound.Call:
        owners: list[Any] = []
        for i, (cache, options) in enumerate(zip(self._caches, self._options, strict=True)):
            require_cache(cache, options)
            for name, tensor in cache.tensors.items():
                tensor.require_writable(f"caches[{i}].{name}")
            scales = {"k_scales": options.k_scale, "v_scales": options.v_scale}
            for name, scale in scales.items():
                if scale is not None and options.find_scales:
                    scale.require_writable(f"{name}[{i}]")
            owners += (tensor.owner for tensor in cache.tensors.values())
            owners += (scale.owner for scale in scales.values() if scale is not None)
        pools = [cache.pool for cache in self._caches if cache.pool]
        of_pools = [owner for pool in pools for owner in pool.owners]
        memory = self._caches[0].k.memory
        on_host = self._options[0].transfer is Transfer.COPY_ENGINE
        binding = bound.Binding(
            held=(bound.Held(list(filter(may_move, [*owners, *of_pools]))),),
            memory=memory,
            index_memory=Memory.HOST if on_host else memory,
            stream=self._stream,
            reads_tensors=self._stream is not None or memory is Memory.HOST,
            owner=-1 if pools else owning_device(owners),
            descriptors=DESCRIPTORS,
        )
        return bound.write_layers(
            binding,
            [cache.to_c() for cache in self._caches],
            list(map(write_like, self._caches, self._options)),
            self._options[0].to_c(),
        )

    def __call__(self, keys: _Tokens, values: _Values | None, slots: Any) -> None:
        """write_layers(caches, keys, values, slots). Raises as write_layers."""
        count = len(self._caches)
        all_keys = _of_layers("keys", keys, count)
        all_values = (None,) * count if values is None else _of_layers("values", values, count)
        status = self._call(slots, *all_keys, *all_values)
        if status:
            self._rest(status, all_keys, all_values, slots)

    run = __call__

    def __repr__(self) -> str:
        return f"<WriteLayersPlan of {len(self._caches)} layers>"

    def _rest(self, status: int, keys: Sequence[Any], values: Sequence[Any], slots: Any) -> None:
        """Finishes a call whose bound call returned `status`: describes its tensors."""
        if status < 0:
            found_keys = [token_desc(f"keys[{i}]", key) for i, key in enumerate(keys)]
            found_values = [
                None if value is None else token_desc(f"values[{i}]", value)
                for i, value in enumerate(values)
            ]
            found_slots = SlotMapping.of(slots)
            for cache, options in zip(self._caches, self._options, strict=True):
                require_cache(cache, options)
            owners = (tensor.owner for tensor in (self._caches[0].k, *found_keys))
            now = abi.stream_now(call_stream(self._stream, *owners))
            if found_slots.token_count:
                tensors = {f"caches[{i}].k": cache.k for i, cache in enumerate(self._caches)} | {
                    f"keys[{i}]": key for i, key in enumerate(found_keys)
                }
                transfer = self._options[0].transfer
                found_slots = where_read({"slots": found_slots}, tensors, transfer, now)["slots"]
            given = found_slots, *found_keys, *found_values
            structs = [None if desc is None else desc.to_c() for desc in given]
            status = self._call(slots, *keys, *values, now, *map(abi.address_of, structs))
            if status < 0:
                raise InternalError(f"a bound call has left {-status:#b} of described tensors")
        abi.check(status)


def write_layers(
    caches: Sequence[CacheDesc],
    keys: _Tokens,
    values: _Values | None,
    slots: SlotMapping | TensorLike | Sequence[int],
    *,
    k_scales: _Scales | None = None,
    v_scales: _Scales | None = None,
    find_scales: bool = False,
    transfer: Transfer | str = Transfer.KERNEL,
    stream: int | None = None,
) -> None:
    """Writes the new tokens of several layers: write_kv of each layer, in one call.

    caches:       one of each layer, each another; as many blocks of as many tokens
    keys, values: one of each layer, each (>= num_tokens, num_kv_heads, head_dim) as write_kv takes
                  it; or one tensor with the layers first. values or an entry is None where a cache
                  has no V
    slots:        (num_tokens,), int32 or int64, or a list of int, for all layers; negative slots
                  are skipped
    k_scales, v_scales: one of each layer, of FP8 and S8 caches; entries may be None
    find_scales:  find the scales on the way and store them there, per token and head
    transfer:     how a device moves the bytes: a Transfer or its name
    stream:       CUDA stream; None: torch's current one if a tensor is torch's, else the default
                  stream. Ignored for HOST memory
    Mutates these slots in every layer, with find_scales their scales too, nothing else. All layers
    are checked before the first is written. On a device it allocates nothing and waits for nothing:
    a CUDA graph can capture it; layers that differ only in their addresses are one launch. Who
    writes the same caches again and again keeps a WriteLayersPlan.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError; then nothing was written.
    Spec: E.23
    """
    plan = WriteLayersPlan(
        caches,
        k_scales=k_scales,
        v_scales=v_scales,
        find_scales=find_scales,
        transfer=transfer,
        stream=stream_number(stream),
    )
    plan(keys, values, slots)


def _sequence(name: str, given: Any, of: str) -> tuple[Any, ...]:
    """`given` as a tuple. Raises InvalidArgumentError for what is no sequence."""
    try:
        found = None if isinstance(given, str | bytes | Mapping | Set) else tuple(given)
    except (TypeError, ValueError):
        found = None
    if found is None:
        raise bad_argument(name, given, f"a sequence of {of}")
    return found


def _of_layers(name: str, given: Any, count: int) -> tuple[Any, ...]:
    """One tensor of each layer: a sequence of them, or a tensor whose first axis is the layer."""
    found = given if type(given) is tuple else _sequence(name, given, "tensors, one of each layer")
    if len(found) != count:
        raise InvalidArgumentError(
            f"{name} has {len(found)} entries, expected {count}, one of each layer"
        )
    return found


def _scales(name: str, given: _Scales | None, count: int) -> tuple[ScaleDesc | None, ...]:
    if given is None:
        return (None,) * count
    return tuple(
        None if scale is None else ScaleDesc.of(scale, name=f"{name}[{i}]")
        for i, scale in enumerate(_of_layers(name, given, count))
    )
