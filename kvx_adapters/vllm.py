"""vLLM 0.26 to 0.33: its paged caches as KVX views. Imports no vllm.

A layer's cache is one tensor, logically [num_blocks, num_kv_heads, block_size, 2 * head_size] in
one of six physical orders; K and V share its last axis. Which bytes are K is decided by version,
backend, spec, resolved layout, cache dtype and ISA, never by the shape: at two KV heads a packed
cache and the split caches of older versions can have the very same shape. So a descriptor is
derived from what vLLM says (LayerSpec), then checked against the tensor's sizes, strides and
storage; what does not agree, or is not known here, is refused.

`live_*` collect all of it from an engine that runs in this process.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    ScaleDesc,
    ScaleGranularity,
    SeqLens,
    SlotMapping,
    UnsupportedError,
    describe,
)

# Physical block that vLLM reserves: it stands for "nothing here" in every block table.
# Source: vllm 0.32 v1/core/block_pool.py, BlockPool.null_block
NULL_BLOCK_ID = 0

_FIRST_MINOR, _LAST_MINOR = 26, 33
_LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")  # outermost axis first
_LAYOUT_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}  # their names before 0.29
# The layouts that a backend's kernels can read; None: all six.
# Source: vllm 0.32 v1/attention/backends/*.py, supported_kv_cache_layouts
_BACKENDS: dict[str, tuple[str, ...] | None] = {
    "FLASH_ATTN": None,
    "FLASHINFER": None,
    "TRITON_ATTN": None,
    "FLEX_ATTENTION": ("LBNHC",),
    "CPU_ATTN": ("LBHNC",),
}
_FP8 = {"fp8": DType.F8_E4M3, "fp8_e4m3": DType.F8_E4M3, "fp8_e5m2": DType.F8_E5M2}
# Why the bytes of these cache dtypes are not tensors of numbers. Keys are prefixes.
_OPAQUE_DTYPES = {
    "nvfp4": "its pages hold packed FP4 data followed by FP8 block scales",
    "int4_per_token_head": "its rows hold packed 4-bit values and inline scales",
    "int8_per_token_head": "its rows hold INT8 values and inline scales",
    "fp8_per_token_head": "its rows hold FP8 values and inline scales",
    "fp8_ds_mla": "its rows hold FP8 data, scales and a BF16 tail",
    "turboquant": "its rows are rotated and quantised by a codebook",
    "ultraquant": "its rows hold packed FP4 values and group scales",
}
# CPU_ATTN chooses what a page looks like by ISA; these two were read back from its own op.
_CPU_PLANES = ("vec", "vec16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What vLLM says about the cache of one attention layer, in vLLM's own words."""

    version: str  # vllm.__version__
    backend: str  # AttentionBackend.get_name(), e.g. "FLASH_ATTN"
    layout: str  # resolved: KVCacheConfig.kv_cache_layout; "NHD" or "HND" before 0.29
    kv_cache_dtype: str  # of the layer: "auto", "bfloat16", "fp8_e5m2", ...
    dtype: torch.dtype  # AttentionSpec.dtype, as stored: uint8 for FP8
    num_blocks: int  # KVCacheConfig.num_blocks
    block_size: int  # tokens of one of those blocks
    num_kv_heads: int  # on this rank
    head_size: int
    page_size_bytes: int  # AttentionSpec.page_size_bytes: a block of one layer, with padding
    num_layers: int = 1  # of the KVCacheTensor that holds this layer: L of the layout
    block_stride_bytes: int | None = None  # KVCacheTensor.block_stride; None: no extra alignment
    head_size_v: int | None = None  # None: as head_size
    num_head_slots: int | None = None  # None: one per KV head
    state_content_bytes: int | None = None  # None: K and V and nothing else
    tokens_per_state: float = 1
    isa: str | None = None  # CPU_ATTN only: the layer's isa, e.g. "vec"


def cache_desc(kv_cache: Tensor, spec: LayerSpec) -> CacheDesc:
    """One layer of a vLLM cache, zero-copy.

    kv_cache: (num_blocks, num_kv_heads, block_size, 2 * head_size), strides as spec.layout says;
              or, where vLLM splits its blocks for the kernel, (num_blocks * n, num_kv_heads,
              block_size / n, 2 * head_size), described with those smaller blocks
    An FP8 cache is stored as uint8; its dtype is taken from spec.kv_cache_dtype.
    Raises UnsupportedError for what is not known here, InvalidArgumentError where `kv_cache` is
    not what `spec` says.
    Source: vllm 0.32 v1/kv_cache_interface.py, compute_layout_strides; the split of K and V:
    v1/attention/backends/{flash_attn,flashinfer,triton_attn,flex_attention,cpu_attn}.py,
    do_kv_cache_update
    """
    _check_version(spec.version)
    layout = _checked_layout(spec)
    dtype = _checked_dtype(spec)
    _check_interior(spec, dtype)
    _check_tensor(kv_cache, spec, layout, dtype)
    if spec.backend == "CPU_ATTN":
        k, v = _cpu_planes(kv_cache)
    else:
        k, v = kv_cache[..., : spec.head_size], kv_cache[..., spec.head_size :]
    return CacheDesc.from_kv(
        describe(k, Layout.BLOCK_HND, dtype=dtype), describe(v, Layout.BLOCK_HND, dtype=dtype)
    )


def slot_mapping(slots: Tensor) -> SlotMapping:
    """Where each new token goes; negative slots (padding, tokens of another rank) are skipped.

    slots: (num_tokens,), int64, as in CommonAttentionMetadata.slot_mapping
    Source: vllm 0.32 v1/worker/block_table.py, PAD_SLOT_ID
    """
    return SlotMapping.of(slots, invalid_slot=-1)


def block_table(
    table: Tensor | Sequence[Sequence[int]],
    *,
    kernel_blocks_per_block: int = 1,
    kernel_ids: bool = False,
) -> BlockTable:
    """The blocks of each request, as ids into the cache that `cache_desc` described.

    table: (num_reqs, max_num_blocks), int32: the model runner's, or the scheduler's ids, one list
           per request; or the table of attention metadata
    kernel_blocks_per_block: kv_cache.shape[0] / num_blocks, kernel blocks that vLLM cuts a block
           into. Only if it is 1 is a tensor not copied
    kernel_ids: the ids count kernel blocks already, as in attention metadata; others count blocks
    All kernel blocks of the null block become the null block.
    Raises InvalidArgumentError.
    Source: vllm 0.32 v1/worker/utils.py, AttentionGroup.map_to_kernel_block_table
    """
    n = kernel_blocks_per_block
    if n < 1:
        raise InvalidArgumentError(f"kernel_blocks_per_block is {n}, expected at least 1")
    if n == 1:
        return BlockTable.packed(table)
    if not isinstance(table, Tensor):
        rows = [torch.tensor(row, dtype=torch.int32) for row in table]
        table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    if not kernel_ids:
        within = torch.arange(n, dtype=table.dtype, device=table.device)
        table = (table[..., None] * n + within).flatten(1)
    null = (table >= NULL_BLOCK_ID) & (table < NULL_BLOCK_ID + n)
    return BlockTable.packed(table.masked_fill(null, NULL_BLOCK_ID))


def seq_lens(lengths: Tensor | Sequence[int]) -> SeqLens:
    """Cached tokens of each request: (num_reqs,), int32 or int64, or a list."""
    return SeqLens.of(lengths)


def cache_view(
    kv_caches: Sequence[Tensor],
    specs: LayerSpec | Sequence[LayerSpec],
    facts: CacheFacts,
    *,
    k_scales: Sequence[Tensor | float] | None = None,
    v_scales: Sequence[Tensor | float] | None = None,
) -> CacheView:
    """All layers that share one block table, in the order of the model's layers.

    kv_caches:          per layer, as in `cache_desc`
    specs:              one for all layers, or one per layer
    k_scales, v_scales: per layer, needed for FP8: layer._k_scale, one float32 or one per KV head
    Raises UnsupportedError, InvalidArgumentError.
    """
    if isinstance(specs, LayerSpec):
        specs = [specs] * len(kv_caches)
    if len(specs) != len(kv_caches):
        raise InvalidArgumentError(f"specs has {len(specs)} layers, kv_caches {len(kv_caches)}")
    if any(spec.kv_cache_dtype in _FP8 for spec in specs) and None in (k_scales, v_scales):
        raise InvalidArgumentError(
            "k_scales or v_scales is None, expected one scale per layer of an FP8 cache. They are "
            "layer._k_scale and layer._v_scale, or 1.0"
        )
    return CacheView(
        layers=tuple(map(cache_desc, kv_caches, specs)),
        facts=facts,
        k_scales=_scales(k_scales),
        v_scales=_scales(v_scales),
        null_block_id=NULL_BLOCK_ID,
    )


def live_view(llm: Any, *, fingerprint: str | None = None) -> CacheView:
    """The whole cache of a vllm.LLM that runs in this process, zero-copy.

    llm:         with VLLM_ENABLE_V1_MULTIPROCESSING=0, one rank, one group of layers
    fingerprint: of model, weights and tokenizer, see kvx_core.fingerprint
    The view is valid as long as the engine lives; its blocks change with every engine step.
    Raises UnsupportedError, InvalidArgumentError.
    Source: vllm 0.32 v1/worker/gpu_model_runner.py, initialize_kv_cache; v1/kv_cache_interface.py
    """
    runner = _model_runner(llm)
    config = runner.kv_cache_config
    if len(config.kv_cache_groups) != 1:
        raise UnsupportedError(
            f"the engine has {len(config.kv_cache_groups)} KV cache groups, expected 1. Describe "
            "each group with cache_view: every group has its own block table"
        )
    layers = runner.compilation_config.static_forward_context
    names = sorted(config.kv_cache_groups[0].layer_names, key=_layer_index)
    attention = [layers[name] for name in names]
    specs = [_live_spec(config, name, layers[name]) for name in names]
    quantised = specs[0].kv_cache_dtype in _FP8
    return cache_view(
        [layer.kv_cache for layer in attention],
        specs,
        _live_facts(llm, runner, names, fingerprint),
        k_scales=[layer._k_scale for layer in attention] if quantised else None,
        v_scales=[layer._v_scale for layer in attention] if quantised else None,
    )


def live_block_table(llm: Any, request_ids: Sequence[str]) -> BlockTable:
    """Where the tokens of unfinished requests lie in `live_view(llm)`, now.

    request_ids: as llm.llm_engine.add_request returned them
    Blocks are freed when a request finishes, so use them before the step that finishes it.
    Raises UnsupportedError, InvalidArgumentError.
    Source: vllm 0.32 v1/core/kv_cache_manager.py, KVCacheManager.get_block_ids
    """
    scheduler = _engine_core(llm).scheduler
    gone = [request_id for request_id in request_ids if request_id not in scheduler.requests]
    if gone:
        raise InvalidArgumentError(
            f"request_ids has {gone[0]!r}, which is not an unfinished request. Pass the ids that "
            "add_request returned, before the request finishes: its blocks are then freed"
        )
    runner = _model_runner(llm)
    name = runner.kv_cache_config.kv_cache_groups[0].layer_names[0]
    kernel_blocks = runner.compilation_config.static_forward_context[name].kv_cache.shape[0]
    return block_table(
        [scheduler.kv_cache_manager.get_block_ids(request_id)[0] for request_id in request_ids],
        kernel_blocks_per_block=kernel_blocks // runner.kv_cache_config.num_blocks,
    )


def _cpu_planes(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """K and V as (num_blocks, num_kv_heads, block_size, head_size), from CPU_ATTN's pages.

    A head's page is a plane of K, stored [head_size, block_size], and then a plane of V,
    [block_size, head_size], whatever the shape of `kv_cache` says.
    """
    num_blocks, num_kv_heads, block_size, content = kv_cache.shape
    k = kv_cache.view(num_blocks, num_kv_heads, 2, content // 2, block_size)[:, :, 0]
    v = kv_cache.view(num_blocks, num_kv_heads, 2, block_size, content // 2)[:, :, 1]
    return k.transpose(2, 3), v


def _check_version(version: str) -> None:
    match = re.match(r"0\.(\d+)\.", version)
    if match is None or not _FIRST_MINOR <= int(match[1]) <= _LAST_MINOR:
        raise UnsupportedError(
            f"vllm is {version}, expected 0.{_FIRST_MINOR} to 0.{_LAST_MINOR}: other versions "
            "may place K and V differently in a tensor of the same shape"
        )


def _checked_layout(spec: LayerSpec) -> str:
    if spec.backend not in _BACKENDS:
        raise UnsupportedError(
            f"backend is {spec.backend!r}, expected one of {', '.join(_BACKENDS)}: where others "
            "put K and V inside a page is not described here"
        )
    layout = _LAYOUT_ALIASES.get(spec.layout, spec.layout)
    if layout not in _LAYOUTS:
        raise UnsupportedError(
            f"layout is {spec.layout!r}, expected one of {', '.join(_LAYOUTS)}, NHD or HND"
        )
    allowed = _BACKENDS[spec.backend]
    if allowed is not None and layout not in allowed:
        raise InvalidArgumentError(
            f"layout is {layout}, expected {' or '.join(allowed)}, all that {spec.backend} reads. "
            "Pass the resolved layout, KVCacheConfig.kv_cache_layout"
        )
    return layout


def _checked_dtype(spec: LayerSpec) -> DType:
    """The dtype of the numbers in the cache, from kv_cache_dtype and the stored dtype."""
    name = spec.kv_cache_dtype
    for prefix, reason in _OPAQUE_DTYPES.items():
        if name.startswith(prefix):
            raise UnsupportedError(f"kv_cache_dtype is {name!r}: {reason}, not described here")
    if name in _FP8:
        if torch.version.hip is not None:
            raise UnsupportedError(
                f"kv_cache_dtype is {name!r} on ROCm, whose FP8 may be the FNUZ variant, which "
                "KVX does not have"
            )
        if spec.dtype not in (torch.uint8, getattr(torch, _FP8[name].array_name)):
            raise InvalidArgumentError(
                f"dtype is {spec.dtype}, expected torch.uint8 for kv_cache_dtype {name!r}"
            )
        return _FP8[name]
    stored = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}
    if spec.dtype not in stored:
        raise UnsupportedError(
            f"dtype is {spec.dtype} for kv_cache_dtype {name!r}, expected "
            f"{', '.join(map(str, stored))}, or kv_cache_dtype one of {', '.join(_FP8)}"
        )
    if name not in ("auto", str(spec.dtype).removeprefix("torch.")):
        raise UnsupportedError(
            f"kv_cache_dtype is {name!r} for dtype {spec.dtype}, expected 'auto' or "
            f"{str(spec.dtype).removeprefix('torch.')!r}"
        )
    return stored[spec.dtype]


def _check_interior(spec: LayerSpec, dtype: DType) -> None:
    """A page must hold K and V of every head and token, and nothing else."""
    content = 2 * spec.head_size * dtype.itemsize
    page = spec.num_kv_heads * spec.block_size * content
    for field, found, expected in (
        ("head_size_v", spec.head_size_v, spec.head_size),
        ("num_head_slots", spec.num_head_slots, spec.num_kv_heads),
        ("state_content_bytes", spec.state_content_bytes, content),
        ("tokens_per_state", spec.tokens_per_state, 1),
    ):
        if found not in (None, expected):
            raise UnsupportedError(
                f"{field} is {found}, expected {expected} for num_kv_heads {spec.num_kv_heads} "
                f"and head_size {spec.head_size}: the page holds more or other than K and V"
            )
    if spec.page_size_bytes < page:
        raise InvalidArgumentError(
            f"page_size_bytes is {spec.page_size_bytes}, expected at least {page}: K and V of "
            f"{spec.num_kv_heads} heads x {spec.block_size} tokens x {spec.head_size} dims"
        )
    if spec.backend != "CPU_ATTN":
        return
    if spec.isa == "amx":
        raise UnsupportedError(
            "isa is 'amx', expected 'vec' or 'vec16': AMX pages are tiles of 16 x 2 elements, "
            "which strides cannot say. Run vLLM with dtype float32 or float16, where it uses 'vec'"
        )
    if spec.isa not in _CPU_PLANES:
        raise UnsupportedError(
            f"isa is {spec.isa!r}, expected 'vec' or 'vec16': a page of CPU_ATTN looks different "
            "for every isa of the attention layer, and this one is not described here"
        )


def _check_tensor(kv_cache: Tensor, spec: LayerSpec, layout: str, dtype: DType) -> None:
    """`kv_cache` must have the dtype, shape, strides and storage that `spec` implies."""
    itemsize = dtype.itemsize
    if kv_cache.dtype != spec.dtype:
        raise InvalidArgumentError(f"kv_cache.dtype is {kv_cache.dtype}, expected {spec.dtype}")
    kernel_block_size = kv_cache.shape[2] if kv_cache.ndim == 4 else 0
    n = spec.block_size // kernel_block_size if kernel_block_size else 1
    expected = (spec.num_blocks * n, spec.num_kv_heads, spec.block_size // n, 2 * spec.head_size)
    if tuple(kv_cache.shape) != expected:
        raise InvalidArgumentError(
            f"kv_cache.shape is {tuple(kv_cache.shape)}, expected {expected}: (num_blocks, "
            f"num_kv_heads, block_size, 2 * head_size) of {spec.backend} in vllm {spec.version}"
        )
    strides = _strides(spec, layout, n, itemsize)
    found = tuple(stride * itemsize for stride in kv_cache.stride())
    for axis, extent in enumerate(expected):
        if extent > 1 and found[axis] != strides[axis]:
            raise InvalidArgumentError(
                f"kv_cache.stride is {found} bytes, expected {strides} for layout {layout} with "
                f"num_layers {spec.num_layers}. Pass the resolved layout, "
                "KVCacheConfig.kv_cache_layout, and the layers of the KVCacheTensor"
            )
    last = kv_cache.storage_offset() + sum(
        stride * (extent - 1)
        for stride, extent in zip(kv_cache.stride(), kv_cache.shape, strict=True)
    )
    if kv_cache.numel() and (last + 1) * itemsize > kv_cache.untyped_storage().nbytes():
        raise InvalidArgumentError(
            f"kv_cache ends at byte {(last + 1) * itemsize}, past its storage of "
            f"{kv_cache.untyped_storage().nbytes()} bytes"
        )


def _strides(spec: LayerSpec, layout: str, n: int, itemsize: int) -> tuple[int, int, int, int]:
    """Bytes between neighbours along num_blocks, num_kv_heads, block_size and content.

    `n` kernel blocks make a block. Source: as `cache_desc`.
    """
    extent = {
        "L": spec.num_layers,
        "B": spec.num_blocks * n,
        "H": spec.num_kv_heads,
        "N": spec.block_size // n,
        "C": 2 * spec.head_size * itemsize,
    }
    page = spec.num_kv_heads * spec.block_size * extent["C"]
    padded = spec.page_size_bytes > page
    if n > 1 and (padded or spec.block_stride_bytes not in (None, page)):
        raise InvalidArgumentError(
            f"page_size_bytes is {spec.page_size_bytes} and block_stride_bytes "
            f"{spec.block_stride_bytes}, expected {page} for both: padded blocks are not split "
            f"into {n} kernel blocks"
        )
    innermost_of_grid = max("LB", key=layout.index)
    if padded and set(layout[: layout.index(innermost_of_grid) + 1]) != {"L", "B"}:
        raise UnsupportedError(
            f"page_size_bytes is {spec.page_size_bytes}, expected {page} in layout {layout}, "
            "whose pages are not contiguous and so cannot be padded"
        )
    strides = {}
    step = 1
    for axis in reversed(layout):
        if axis == innermost_of_grid and padded:
            step = max(step, spec.page_size_bytes)
        if axis == "B" and spec.block_stride_bytes is not None:
            step = spec.block_stride_bytes // n
        strides[axis] = step
        step *= extent[axis]
    return strides["B"], strides["H"], strides["N"], itemsize


def _scales(scales: Sequence[Tensor | float] | None) -> tuple[ScaleDesc, ...] | None:
    if scales is None:
        return None
    return tuple(
        ScaleDesc.of(
            scale,
            ScaleGranularity.PER_HEAD
            if isinstance(scale, Tensor) and scale.numel() > 1
            else ScaleGranularity.PER_TENSOR,
        )
        for scale in scales
    )


def _engine_core(llm: Any) -> Any:
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        raise UnsupportedError(
            "the engine runs in another process, where its cache cannot be seen. Set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is imported"
        )
    parallel = llm.llm_engine.vllm_config.parallel_config
    for field in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(parallel, field) != 1:
            raise UnsupportedError(
                f"{field} is {getattr(parallel, field)}, expected 1: the other ranks run in other "
                "processes. Describe each rank's tensors there, with cache_view"
            )
    return core


def _model_runner(llm: Any) -> Any:
    return _engine_core(llm).model_executor.driver_worker.worker.model_runner


def _vllm_version(llm: Any) -> str:
    return str(sys.modules[type(llm).__module__.partition(".")[0]].__version__)


def _layer_index(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise UnsupportedError(
            f"layer name is {name!r}, expected one number in it, the layer's index in the model"
        )
    return numbers[0]


def _live_spec(config: Any, name: str, layer: Any) -> LayerSpec:
    (group,) = config.kv_cache_groups
    spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
    (tensor,) = (tensor for tensor in config.kv_cache_tensors if name in tensor.layers)
    return LayerSpec(
        version=str(sys.modules[type(config).__module__.partition(".")[0]].__version__),
        backend=layer.attn_backend.get_name(),
        layout=config.kv_cache_layout,
        kv_cache_dtype=layer.kv_cache_dtype,
        dtype=spec.dtype,
        num_blocks=config.num_blocks,
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        page_size_bytes=spec.page_size_bytes,
        num_layers=len(tensor.layers),
        block_stride_bytes=tensor.block_stride,
        head_size_v=spec.head_size_v,
        num_head_slots=spec.num_head_slots,
        state_content_bytes=spec.state_content_bytes,
        tokens_per_state=float(spec.tokens_per_state),
        isa=getattr(layer, "isa", None),
    )


def _live_facts(llm: Any, runner: Any, names: list[str], fingerprint: str | None) -> CacheFacts:
    model = llm.llm_engine.model_config
    spec = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    rotary, rotary_dim = _live_rotary(runner.model)
    return CacheFacts(
        engine=f"vllm {_vllm_version(llm)}",
        fingerprint=fingerprint,
        rotary=rotary,
        rotary_dim=rotary_dim,
        rope_applied=None if rotary is None else True,
        hadamard=False,
        scale_convention="multiply",
        num_layers=len(names),
        first_layer=_layer_index(names[0]),
        window=None
        if getattr(spec, "attention_chunk_size", None)
        else getattr(spec, "sliding_window", None) or 0,
        total_kv_heads=model.get_total_num_kv_heads(),
        first_kv_head=0,
        negative_slots="skip",
    )


def _live_rotary(model: Any) -> tuple[Literal["half", "interleaved"] | None, int | None]:
    """The one rotary embedding of all layers; (None, None), unknown, if there is not just one.

    Source: vllm 0.32 model_executor/layers/rotary_embedding/base.py, RotaryEmbedding
    """
    found = {
        (bool(module.is_neox_style), int(module.rotary_dim))
        for module in model.modules()
        if hasattr(module, "is_neox_style") and hasattr(module, "rotary_dim")
    }
    if len(found) != 1:
        return None, None
    ((is_neox_style, rotary_dim),) = found
    return ("half" if is_neox_style else "interleaved"), rotary_dim
