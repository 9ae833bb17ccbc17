"""TGI's caches as descriptors and views, from its settings.

Tensors that disagree with them, and settings that are not in the table _FLAVOURS, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    ScaleDesc,
    TensorDesc,
    UnsupportedError,
    describe,
)

# TGI reserves this block: health checks and the padding of CUDA graphs (slot 0) write to it.
# Source: TGI 3.3.7 backends/v3/src/block_allocator.rs, SimpleAllocator::new; radix.rs,
# RadixAllocator::new; server models/flash_causal_lm.py, FlashCausalLM.forward
RESERVED_BLOCK_ID = 0

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_NOT_FP8 = (torch.float16, torch.bfloat16, torch.float32)


class _Order(Enum):
    """Axes of K and V as they lie in memory; both tensors are contiguous."""

    NHD = "both [block, token, head, dim]"
    HND = "both [block, head, token, dim]"
    PAGED = "K [block, head, dim / x, token, x], V [block, head, dim, token]"
    FLAT = "both [block * token, head, dim]"


class _Flavour(NamedTuple):
    block_size: int  # BLOCK_SIZE
    order: _Order
    negative_slots: Literal["skip", "wrap", "undefined"]  # in KVCache.store
    fp8: tuple[torch.dtype, ...] = ()
    no_fp8: str = ""  # why other FP8 types are refused
    no_scales: str = ""  # why scales other than 1 are refused


_NEVER_FP8 = "TGI allocates no such cache"
_BY_IPEX = "how IPEX applies them on XPU is not known here"

# Every cache that TGI allocates, by (ATTENTION, SYSTEM), or SYSTEM:device.type if that matters.
# Source: TGI 3.3.7, files below server/text_generation_server; later versions only
# have maintenance. What holds for every entry:
#   block_size  models/globals.py, BLOCK_SIZE
#   order       layers/attention/kv_cache.py, KVCache.__init__: x = BLOCK_SIZE // itemsize
#   fp8         the same; scales: KVCache.can_scale, KVCache.store, layers/fp8.py, fp8_quantize
_FLAVOURS = {
    # KVCache.store: index_put, in which -1 is the last slot
    ("flashinfer", "cuda"): _Flavour(1, _Order.NHD, "wrap", (_E4M3, _E5M2), _NEVER_FP8),
    ("flashdecoding", "cuda"): _Flavour(256, _Order.NHD, "wrap", (), _NEVER_FP8),
    ("flashdecoding", "rocm"): _Flavour(256, _Order.NHD, "wrap", (), _NEVER_FP8),
    # kv_cache.py, paged_reshape_and_cache: kernels-community/paged-attention, cache_kernels.cu,
    # reshape_and_cache, whose DISPATCH_BY_KV_CACHE_DTYPE goes by the dtype of `key`
    ("paged", "cuda"): _Flavour(
        16,
        _Order.PAGED,
        "skip",
        (_E4M3,),
        no_fp8="KVCache.store lets the kernel write 16-bit elements into it",
        no_scales="KVCache.store gives FP8 keys to a kernel that takes none",
    ),
    # the same, vllm._custom_ops.reshape_and_cache; its FP8 is that of the GPU
    ("paged", "rocm"): _Flavour(
        16,
        _Order.PAGED,
        "skip",
        no_fp8="the kernel writes the FP8 of the GPU, float8_e4m3fnuz or not, and the cache does "
        "not say which",
    ),
    # the same, ipex.llm.modules.PagedAttention.reshape_and_cache; IPEX 2.8, csrc/cpu/aten/kernels/
    # PagedAttentionKrnl.cpp, reshape_and_cache_kernel: slot -1 is written outside the cache;
    # scaled_convert: it scales nothing
    ("paged", "ipex:cpu"): _Flavour(16, _Order.HND, "undefined", (_E5M2,), _NEVER_FP8),
    ("flashdecoding-ipex", "ipex:cpu"): _Flavour(64, _Order.HND, "undefined", (_E5M2,), _NEVER_FP8),
    # x = 1
    ("paged", "ipex:xpu"): _Flavour(
        16, _Order.PAGED, "undefined", (_E4M3, _E5M2), no_scales=_BY_IPEX
    ),
    # KVCache.store: ipex.llm.modules.PagedAttention.reshape_and_cache_flash
    ("flashdecoding-ipex", "ipex:xpu"): _Flavour(
        64, _Order.NHD, "undefined", (_E4M3, _E5M2), no_scales=_BY_IPEX
    ),
    # backends/gaudi/server/text_generation_server: models/globals.py, layers/attention/kv_cache.py,
    # KVCache; FP8: paged_reshape_and_cache, hpu.py, FetchFromCache
    ("paged", "hpu"): _Flavour(
        128,
        _Order.FLAT,
        "undefined",
        no_fp8="the gaudi server stores value * scale, and Gaudi 2's E4M3 ends at 240",
    ),
}


class KVScales(Protocol):
    """TGI's scales of K and V: each a tensor of one float32, and the same number as a float.

    Source: TGI 3.3.7 layers/attention/kv_cache.py, KVScales
    """

    key_scale: Tensor
    value_scale: Tensor
    key_scale_cpu: float
    value_scale_cpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """TGI's settings of its caches, under TGI's names.

    Raises UnsupportedError for unknown caches, InvalidArgumentError for a head_dim that x does not
    divide.
    """

    attention: str  # ATTENTION: "flashinfer", "flashdecoding", "flashdecoding-ipex" or "paged"
    system: str  # SYSTEM: "cuda", "rocm", "ipex"; "hpu" for the gaudi backend
    device: str = ""  # device.type of the cache with SYSTEM "ipex": "cpu" or "xpu"
    num_blocks: int
    num_kv_heads: int  # on this rank
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        dtypes = (*_NOT_FP8, *self._flavour.fp8)
        if self.dtype not in dtypes:
            expected = f"expected one of {', '.join(map(str, dtypes))} for {self.name}"
            why = f": {self._flavour.no_fp8}" if self.dtype in (_E4M3, _E5M2) else ""
            raise UnsupportedError(f"dtype is {self.dtype}, {expected}{why}")
        if self.head_dim % self.pack:
            raise InvalidArgumentError(
                f"head_dim is {self.head_dim}, expected a multiple of {self.pack}, TGI's x for "
                f"{self.dtype} and {self.name}: KVCache has no room for the rest"
            )

    @property
    def name(self) -> str:
        """ATTENTION and where it runs, such as "paged on ipex:cpu"."""
        return f"{self.attention} on {self._place}"

    @property
    def block_size(self) -> int:
        """Tokens per block: TGI's BLOCK_SIZE."""
        return self._flavour.block_size

    @property
    def pack(self) -> int:
        """TGI's x: elements of a head that K stores side by side; 1 if K is not packed."""
        if self._flavour.order is not _Order.PAGED or self._place == "ipex:xpu":
            return 1
        return self.block_size // self.dtype.itemsize

    @property
    def k_shape(self) -> tuple[int, ...]:
        """Shape of the K tensor that KVCache allocates."""
        if self._flavour.order is not _Order.PAGED:
            return self.v_shape
        blocks, heads, dim, tokens = self.v_shape
        return blocks, heads, dim // self.pack, tokens, self.pack

    @property
    def v_shape(self) -> tuple[int, ...]:
        """Shape of the V tensor that KVCache allocates."""
        blocks, tokens = self.num_blocks, self.block_size
        heads, dim = self.num_kv_heads, self.head_dim
        return {
            _Order.NHD: (blocks, tokens, heads, dim),
            _Order.HND: (blocks, heads, tokens, dim),
            _Order.PAGED: (blocks, heads, dim, tokens),
            _Order.FLAT: (blocks * tokens, heads, dim),
        }[self._flavour.order]

    def can_scale(self, kv_scales: KVScales) -> bool:
        """Whether TGI applies these scales. If not, it stores and reads as if both were 1.

        Source: TGI 3.3.7 layers/attention/kv_cache.py, KVCache.can_scale
        """
        scales = (kv_scales.key_scale_cpu, kv_scales.value_scale_cpu)
        return self.dtype == _E4M3 and scales != (1, 1)

    @property
    def _place(self) -> str:
        return f"{self.system}:{self.device}" if self.system == "ipex" else self.system

    @property
    def _flavour(self) -> _Flavour:
        found = _FLAVOURS.get((self.attention, self._place))
        if found is None:
            known = ", ".join(f"{attention} on {place}" for attention, place in _FLAVOURS)
            raise UnsupportedError(f"attention and system are {self.name}, expected one of {known}")
        return found


def cache_desc(key_cache: Tensor, value_cache: Tensor, spec: CacheSpec) -> CacheDesc:
    """One layer of a TGI cache, zero-copy.

    key_cache, value_cache: KVCache.key (spec.k_shape) and KVCache.value (spec.v_shape), contiguous
    Raises InvalidArgumentError where a tensor is not what `spec` says, UnsupportedError for memory
    that KVX cannot reach.
    Source: the table _FLAVOURS
    """
    _check("key_cache", key_cache, spec.k_shape, spec)
    _check("value_cache", value_cache, spec.v_shape, spec)
    if key_cache.data_ptr() == value_cache.data_ptr():
        raise InvalidArgumentError(
            "value_cache is in the memory of key_cache, expected a tensor of its own: KVCache.value"
        )
    return CacheDesc.from_kv(_described(key_cache, spec), _described(value_cache, spec))


def cache_view(
    kv_cache: Sequence[tuple[Tensor, Tensor]],
    spec: CacheSpec,
    facts: CacheFacts,
    *,
    kv_scales: Sequence[KVScales] | None = None,
) -> CacheView:
    """All layers of one rank, in the order of the model's layers.

    kv_cache:  per layer (KVCache.key, KVCache.value), as in `cache_desc`
    facts:     see `cache_facts`
    kv_scales: per layer, those of its attention; needed for an FP8 cache
    Raises InvalidArgumentError, UnsupportedError.
    """
    layers = tuple(cache_desc(key, value, spec) for key, value in kv_cache)
    if spec.dtype in _NOT_FP8:
        return CacheView(layers=layers, facts=facts, null_block_id=RESERVED_BLOCK_ID)
    if kv_scales is None or len(kv_scales) != len(layers):
        raise InvalidArgumentError(
            f"kv_scales has {'no' if kv_scales is None else len(kv_scales)} entries, expected "
            f"{len(layers)}, one per layer of a {spec.dtype} cache: its attention's kv_scales"
        )
    pairs = [_scales(i, kv_scales[i], spec, key) for i, (key, _) in enumerate(kv_cache)]
    return CacheView(
        layers=layers,
        facts=facts,
        k_scales=tuple(k for k, _ in pairs),
        v_scales=tuple(v for _, v in pairs),
        null_block_id=RESERVED_BLOCK_ID,
    )


def cache_facts(
    spec: CacheSpec,
    *,
    version: str = "3.3.7",
    fingerprint: str | None = None,
    rotary: Literal["half", "interleaved", "none"] | None = None,
    rotary_dim: int | None = None,
    num_layers: int | None = None,
    window: int | None = None,
    total_kv_heads: int | None = None,
    first_kv_head: int | None = None,
) -> CacheFacts:
    """The facts of one rank's cache. The caller gives those that depend on the model.

    fingerprint:   of the model as it is computed, see kvx_core.ModelRecord
    rotary:        "half" for PositionRotaryEmbedding; "interleaved" for CohereRotary and GPTJRotary
    rotary_dim:    0 for "none"
    window:        sliding window of the model, 0 for full attention
    first_kv_head: rank * spec.num_kv_heads; 0 if the model has one head, which every rank holds
    Source: TGI 3.3.7 layers/rotary.py; models/flash_causal_lm.py, FlashCausalLM.__init__
    """
    return CacheFacts(
        engine=f"tgi {version}",
        fingerprint=fingerprint,
        rotary=rotary,
        rotary_dim=rotary_dim,
        rope_applied=None if rotary is None else True,
        hadamard=False,
        scale_convention="multiply",
        num_layers=num_layers,
        first_layer=None if num_layers is None else 0,  # TGI has no pipeline parallelism
        window=window,
        total_kv_heads=total_kv_heads,
        first_kv_head=first_kv_head,
        compute_dtype=None if spec.dtype.itemsize == 1 else DType.of(spec.dtype),
        negative_slots=spec._flavour.negative_slots,
    )


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], spec: CacheSpec) -> None:
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"{name}.device is {tensor.device}, expected cpu or cuda: KVX reaches no other memory. "
            "Pass a copy on the host"
        )
    if tensor.dtype != spec.dtype:
        raise InvalidArgumentError(f"{name}.dtype is {tensor.dtype}, expected {spec.dtype}")
    if tuple(tensor.shape) != shape:
        raise InvalidArgumentError(
            f"{name}.shape is {tuple(tensor.shape)}, expected {shape} for {spec.name}"
        )
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"{name}.stride is {tensor.stride()}, expected contiguous, as KVCache allocates it"
        )


def _described(tensor: Tensor, spec: CacheSpec) -> TensorDesc:
    match spec._flavour.order:
        case _Order.NHD:
            return describe(tensor, Layout.BLOCK_NHD)
        case _Order.HND:
            return describe(tensor, Layout.BLOCK_HND)
        case _Order.FLAT:
            return describe(tensor.view(-1, spec.block_size, *tensor.shape[1:]), Layout.BLOCK_NHD)
        case _Order.PAGED if tensor.ndim == 5:
            return describe(tensor, Layout.BLOCK_HND_PACKED)
        case _Order.PAGED:
            return describe(tensor.transpose(2, 3), Layout.BLOCK_HND)


def _scales(
    i: int, kv_scales: KVScales, spec: CacheSpec, key_cache: Tensor
) -> tuple[ScaleDesc, ScaleDesc]:
    """The scales of layer `i` as TGI applies them: value = stored * scale."""
    values = (kv_scales.key_scale_cpu, kv_scales.value_scale_cpu)
    if spec._flavour.no_scales and values != (1, 1):
        raise UnsupportedError(
            f"kv_scales[{i}] are {values[0]} and {values[1]}, expected 1.0 for {spec.name}: "
            f"{spec._flavour.no_scales}"
        )
    if not spec.can_scale(kv_scales):
        one = ScaleDesc.of(torch.ones(1, dtype=torch.float32, device=key_cache.device))
        return one, one
    return ScaleDesc.of(kv_scales.key_scale), ScaleDesc.of(kv_scales.value_scale)
