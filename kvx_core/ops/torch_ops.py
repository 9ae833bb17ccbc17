"""torch.ops.kvx: KVX as torch.compile and CUDA graphs see it, on torch's current stream.

Importing this module registers the ops. They do what the functions of ops.py and migrate.py do, on
plain tensors and without CacheFacts, and raise what those raise.

    write_kv       mutates the named slots of k_cache and v_cache
    write_kv_find_scales  the same into FP8 or S8; mutates their scales, per token and head, too
    write_layers   mutates the named slots of k_caches and v_caches, one tensor per layer, in one
                   call; values and v_caches are empty if there is no V
    gather_kv      returns new (key, value), zero for tokens without a source; without v_cache the
                   head_dim of value is 0
    gather_kv_out  mutates key and value; tokens without a source keep what they held
    migrate_kv     mutates the named tokens of dst_k and dst_v, one tensor per layer
    kvcache_append  returns a new tensor, with gradients: kvx_core.ops.append_op

    k_cache, v_cache     one layer's cache, any strides; they may be views of one tensor
    layout, v_layout     names of Layout, such as "BLOCK_NHD"; v_layout: that of K if not given
    cache_dtype          of the cache's elements if its tensor has another, such as FP8 in uint8
    scale_granularity    of the call's scales: a name of ScaleGranularity
    block_table          (seq_count, max_blocks_per_seq) block ids
    src_dtype, dst_dtype as cache_dtype
    src_v, dst_v         empty if there is no V
    src_block_table, src_slots  neither: sequence s is block s; the same for dst
    num_heads            0: all
    max_seq_len          the most tokens of a sequence that move; 0: all. A smaller number means
                         less work on a device

torch 2.13 with dynamic=True miscompiles every mutation, in-place ops included, of two graph inputs
that share storage. There, give the graph the whole tensor and make the views of K and V inside.

Spec: 6.9, 6.10, E.2, E.3
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

import kvx_core.ops.append_op  # noqa: F401  registers its op
from kvx_core._c import bound
from kvx_core.desc import layouts
from kvx_core.desc.cache import CacheDesc
from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.tables import SeqLens
from kvx_core.desc.tensor_desc import TensorDesc, describe
from kvx_core.desc.view import CacheView
from kvx_core.errors import InvalidArgumentError
from kvx_core.ops.calls import token_desc
from kvx_core.ops.layer_writes import WriteLayersPlan
from kvx_core.ops.migrate import copy_tokens
from kvx_core.ops.streams import current_stream
from kvx_core.ops.token_plans import GatherPlan, WritePlan
from kvx_core.types import Layout, ScaleGranularity

_CACHE = """str layout, str? v_layout=None, *, ScalarType? cache_dtype=None,
    Tensor? k_scale=None, Tensor? v_scale=None, str scale_granularity="PER_TENSOR" """

_SCHEMAS = {
    "write_kv": f"""(Tensor key, Tensor? value, Tensor(a!) k_cache, Tensor(b!)? v_cache,
        Tensor slots, {_CACHE}) -> ()""",
    "write_kv_find_scales": """(Tensor key, Tensor? value, Tensor(a!) k_cache, Tensor(b!)? v_cache,
        Tensor slots, Tensor(c!) k_scale, Tensor(d!)? v_scale, str layout, str? v_layout=None, *,
        ScalarType? cache_dtype=None) -> ()""",
    "write_layers": """(Tensor[] keys, Tensor[] values, Tensor(a!)[] k_caches,
        Tensor(b!)[] v_caches, Tensor slots, str layout, str? v_layout=None, *,
        ScalarType? cache_dtype=None, Tensor[]? k_scales=None, Tensor[]? v_scales=None,
        str scale_granularity="PER_TENSOR") -> ()""",
    "gather_kv": f"""(Tensor k_cache, Tensor? v_cache, Tensor block_table, Tensor seq_lens,
        SymInt max_seq_len, {_CACHE}, ScalarType? dtype=None, int null_block_id=-1,
        bool zero_fill=False) -> (Tensor, Tensor)""",
    "gather_kv_out": f"""(Tensor k_cache, Tensor? v_cache, Tensor block_table, Tensor seq_lens,
        Tensor(a!) key, Tensor(b!)? value, {_CACHE}, int null_block_id=-1, bool zero_fill=False)
        -> ()""",
    "migrate_kv": """(Tensor[] src_k, Tensor[] src_v, Tensor(a!)[] dst_k, Tensor(b!)[] dst_v,
        Tensor seq_lens, str src_layout, str dst_layout, str? src_v_layout=None,
        str? dst_v_layout=None, *, Tensor? src_block_table=None, Tensor? dst_block_table=None,
        Tensor? src_slots=None, Tensor? dst_slots=None, Tensor? src_starts=None,
        Tensor? dst_starts=None, ScalarType? src_dtype=None, ScalarType? dst_dtype=None,
        int src_head_start=0, int dst_head_start=0, int num_heads=0, int src_null_block_id=-1,
        int dst_null_block_id=-1, bool zero_fill=False, SymInt max_seq_len=0) -> ()""",
}

# Plans by address, dtype, shape and strides of caches and scales, and by the call's strings. Plans
# hold no reference to a tensor: only tensors with the same key use a plan again.
_plans: dict[tuple[Any, ...], Any] = {}
_MAX_PLANS = 4096


def write_kv(
    key: Tensor,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    layout: str,
    v_layout: str | None = None,
    *,
    cache_dtype: torch.dtype | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale_granularity: str = "PER_TENSOR",
) -> None:
    words = layout, v_layout, cache_dtype, scale_granularity
    plan = _plan(WritePlan, key, value, (k_cache, v_cache, k_scale, v_scale), words)
    plan(key, value, slots)


def write_kv_find_scales(
    key: Tensor,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    k_scale: Tensor,
    v_scale: Tensor | None,
    layout: str,
    v_layout: str | None = None,
    *,
    cache_dtype: torch.dtype | None = None,
) -> None:
    words = layout, v_layout, cache_dtype, "PER_TOKEN_HEAD"
    tensors = k_cache, v_cache, k_scale, v_scale
    plan = _plan(WritePlan, key, value, tensors, words, find_scales=True)
    plan(key, value, slots)


def write_layers(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    slots: Tensor,
    layout: str,
    v_layout: str | None = None,
    *,
    cache_dtype: torch.dtype | None = None,
    k_scales: Sequence[Tensor] | None = None,
    v_scales: Sequence[Tensor] | None = None,
    scale_granularity: str = "PER_TENSOR",
) -> None:
    lists = k_caches, v_caches, k_scales or (), v_scales or ()
    tensors = [tensor for tensors in lists for tensor in tensors]
    identity = tuple(_identity(*tensors[i : i + 4]) for i in range(0, len(tensors), 4))
    words = layout, v_layout, cache_dtype, scale_granularity
    call = WriteLayersPlan, identity, *map(len, lists), words
    plan: WriteLayersPlan | None = _plans.get(call)
    if plan is None:
        layers = _layers(k_caches, v_caches, layout, v_layout, cache_dtype)
        plan = WriteLayersPlan(
            [
                CacheDesc.from_kv(replace(layer.k, owner=None), _unowned(layer.v))
                for layer in layers
            ],
            k_scales=_scales(k_scales, scale_granularity),
            v_scales=_scales(v_scales, scale_granularity),
            stream=current_stream(*k_caches, *keys),
        )
        _keep(call, plan)
    plan(tuple(keys), tuple(values) or None, slots)


def _keep(call: tuple[Any, ...], plan: Any) -> None:
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[call] = plan


_Plan = TypeVar("_Plan", WritePlan, GatherPlan)


def _plan(
    kind: Callable[..., _Plan],
    key: Tensor,
    value: Tensor | None,
    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    words: tuple[str, str | None, torch.dtype | None, str],
    **options: Any,
) -> _Plan:
    """The plan for these caches and scales, made at the first call."""
    call = kind, _identity(*tensors), words, *options.values()
    plan: _Plan | None = _plans.get(call)
    if plan is None:
        k_cache, v_cache, k_scale, v_scale = tensors
        layout, v_layout, cache_dtype, granularity = words
        cache = _cache(k_cache, v_cache, layout, v_layout, cache_dtype)
        plan = kind(
            CacheDesc.from_kv(replace(cache.k, owner=None), _unowned(cache.v)),
            token_desc("key", key),
            token_desc("value", value),
            k_scale=_unowned(_scale(k_scale, granularity)),
            v_scale=_unowned(_scale(v_scale, granularity)),
            stream=current_stream(k_cache, key),
            **options,
        )
        _keep(call, plan)
    return plan


_read_identity = bound.identity()


def _identity(*tensors: Tensor | None) -> Hashable:
    """Address, device, dtype, shape and strides of tensors."""
    found = _read_identity(*tensors)
    if isinstance(found, bytes):
        return found
    return tuple(t is not None and _signature(t) for t in tensors)


def _signature(tensor: Tensor) -> tuple[Any, ...]:
    num_bytes = tensor.untyped_storage().nbytes()
    place = tensor.data_ptr(), num_bytes, tensor.is_neg()
    return *place, tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def gather_kv(
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    layout: str,
    v_layout: str | None = None,
    *,
    cache_dtype: torch.dtype | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale_granularity: str = "PER_TENSOR",
    dtype: torch.dtype | None = None,
    null_block_id: int = -1,
    zero_fill: bool = False,
) -> tuple[Tensor, Tensor]:
    key, value = _new_outputs(
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        max_seq_len,
        layout,
        v_layout,
        cache_dtype=cache_dtype,
        dtype=dtype,
    )
    if not zero_fill:  # tokens past a length are zero; null blocks, where tokens are, are refused
        key.zero_()
        value.zero_()
    gather_kv_out(
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        key,
        value if v_cache is not None else None,
        layout,
        v_layout,
        cache_dtype=cache_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        scale_granularity=scale_granularity,
        null_block_id=null_block_id,
        zero_fill=zero_fill,
    )
    return key, value


def gather_kv_out(
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor | None,
    layout: str,
    v_layout: str | None = None,
    *,
    cache_dtype: torch.dtype | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale_granularity: str = "PER_TENSOR",
    null_block_id: int = -1,
    zero_fill: bool = False,
) -> None:
    words = layout, v_layout, cache_dtype, scale_granularity
    tensors = k_cache, v_cache, k_scale, v_scale
    options = {"null_block_id": null_block_id, "zero_fill": zero_fill}
    plan = _plan(GatherPlan, key, value, tensors, words, **options)
    plan(key, value, block_table, seq_lens)


def migrate_kv(
    src_k: Sequence[Tensor],
    src_v: Sequence[Tensor],
    dst_k: Sequence[Tensor],
    dst_v: Sequence[Tensor],
    seq_lens: Tensor,
    src_layout: str,
    dst_layout: str,
    src_v_layout: str | None = None,
    dst_v_layout: str | None = None,
    *,
    src_block_table: Tensor | None = None,
    dst_block_table: Tensor | None = None,
    src_slots: Tensor | None = None,
    dst_slots: Tensor | None = None,
    src_starts: Tensor | None = None,
    dst_starts: Tensor | None = None,
    src_dtype: torch.dtype | None = None,
    dst_dtype: torch.dtype | None = None,
    src_head_start: int = 0,
    dst_head_start: int = 0,
    num_heads: int = 0,
    src_null_block_id: int = -1,
    dst_null_block_id: int = -1,
    zero_fill: bool = False,
    max_seq_len: int = 0,
) -> None:
    src = _view(src_k, src_v, src_layout, src_v_layout, src_dtype, src_null_block_id)
    dst = _view(dst_k, dst_v, dst_layout, dst_v_layout, dst_dtype, dst_null_block_id)
    copy_tokens(
        src.at(src_block_table, src_slots, src_starts, src_head_start),
        dst.at(dst_block_table, dst_slots, dst_starts, dst_head_start),
        SeqLens.of(seq_lens),
        num_heads=num_heads,
        zero_fill=zero_fill,
        max_seq_len=max_seq_len,
    )


def _new_outputs(
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    layout: str,
    v_layout: str | None = None,
    *,
    cache_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The tensors that gather_kv returns; on meta tensors it does nothing else."""
    sizes = layouts.axes(Layout.of(layout, "layout"), k_cache.shape)
    v_head_dim = 0
    if v_cache is not None:
        named = Layout.of(v_layout or layout, "v_layout")
        v_head_dim = layouts.axes(named, v_cache.shape).head_dim
    rows = (block_table.shape[0], max_seq_len, sizes.num_kv_heads)
    k_dtype = dtype or cache_dtype or k_cache.dtype
    v_dtype = k_dtype if v_cache is None else dtype or cache_dtype or v_cache.dtype
    return (
        k_cache.new_empty((*rows, sizes.head_dim), dtype=k_dtype),
        k_cache.new_empty((*rows, v_head_dim), dtype=v_dtype),
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing: an op that only mutates, on meta tensors."""


def _cache(
    k: Tensor, v: Tensor | None, layout: str, v_layout: str | None, dtype: torch.dtype | None
) -> CacheDesc:
    stored = None if dtype is None else str(dtype)
    return CacheDesc.from_kv(
        describe(k, Layout.of(layout, "layout"), dtype=stored, name="k_cache"),
        None
        if v is None
        else describe(v, Layout.of(v_layout or layout, "v_layout"), dtype=stored, name="v_cache"),
    )


def _view(
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    layout: str,
    v_layout: str | None,
    dtype: torch.dtype | None,
    null_block_id: int,
) -> CacheView:
    layers = _layers(k, v, layout, v_layout, dtype)
    return CacheView(tuple(layers), CacheFacts(), null_block_id=null_block_id, dense=True)


def _layers(
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    layout: str,
    v_layout: str | None,
    dtype: torch.dtype | None,
) -> list[CacheDesc]:
    if v and len(v) != len(k):
        raise InvalidArgumentError(f"V has {len(v)} layers, expected {len(k)} as K, or none")
    return [_cache(k[i], v[i] if v else None, layout, v_layout, dtype) for i in range(len(k))]


def _scales(scales: Sequence[Tensor] | None, granularity: str) -> list[ScaleDesc | None] | None:
    if not scales:
        return None
    return [_unowned(_scale(scale, granularity)) for scale in scales]


_OF_FP8 = (
    ScaleGranularity.PER_TENSOR,
    ScaleGranularity.PER_BLOCK,
    ScaleGranularity.PER_HEAD,
    ScaleGranularity.PER_BLOCK_HEAD,
    ScaleGranularity.PER_TOKEN_HEAD,
)


def _scale(scale: Tensor | None, granularity: str) -> ScaleDesc | None:
    if scale is None:
        return None
    chosen = ScaleGranularity.of(granularity, "scale_granularity", takes=_OF_FP8)
    return ScaleDesc.of(scale, chosen)


_Desc = TypeVar("_Desc", TensorDesc, ScaleDesc)


def _unowned(desc: _Desc | None) -> _Desc | None:
    return None if desc is None else replace(desc, owner=None)


_library: Any = torch.library.Library("kvx", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + " ".join(_schema.split()), tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, globals()[_name], "CompositeExplicitAutograd")
    _library.impl(_name, _new_outputs if _name == "gather_kv" else _nothing, "Meta")
    # torch would resolve the bit in a copy, and fails if a cache is None; KVX raises instead.
    _library.impl(_name, torch.library.fallthrough_kernel, "Negative")
