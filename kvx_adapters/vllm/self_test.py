"""Proof of a description: vLLM's own op writes a token, and KVX reads it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvx_adapters.vllm.describe import Layer, layer_of, scale_desc
from kvx_adapters.vllm.encodings import VALUES
from kvx_adapters.vllm.groups import LayerGroup
from kvx_adapters.vllm.pages import page_of
from kvx_adapters.vllm.spec import LayerSpec
from kvx_core import CacheDesc, DType, InvalidArgumentError, UnsupportedError, gather_kv

# key (1, num_kv_heads, head_dim), value or None, slots (1,) int64: writes the token into the cache
Write = Callable[[Tensor, Tensor | None, Tensor], None]


def self_test(
    kv_cache: Tensor,
    spec: LayerSpec,
    write: Write,
    *,
    dtype: torch.dtype | None = None,
    k_scale: Tensor | float = 1.0,
    v_scale: Tensor | float = 1.0,
    desc: CacheDesc | None = None,
) -> None:
    """Lets vLLM write a token into the last slot of a layer, and reads it back through KVX.

    kv_cache, spec: as in `cache_desc`
    desc:    the descriptor to read through; None: `cache_desc(kv_cache, spec)`
    write:   vLLM's own op, see `engine_write`
    dtype:   of the token that vLLM writes; None: the cache's, or bfloat16 if it is quantised
    k_scale, v_scale: of an FP8 cache, one or one per KV head
    Restores the block that holds the slot, also if it raises; nobody else may use it meanwhile.
    Opaque bytes cannot be read as numbers: then only this token must have changed, in every head.
    Raises InvalidArgumentError naming what differs, or as `cache_desc`.
    """
    layer = layer_of(kv_cache, spec)
    reader = _Reader(desc or layer.desc, layer, k_scale, v_scale)
    if dtype is None:
        dtype = kv_cache.dtype if kv_cache.dtype.itemsize > 1 else torch.bfloat16
    key, value = _token(spec, has_v=layer.desc.v is not None, device=kv_cache.device)
    tokens = (
        (key * reader.factors[0] * reader.nudge).to(dtype),
        None if value is None else (value * reader.factors[1] * reader.nudge).to(dtype),
    )
    last_block = layer.desc.num_blocks - 1
    slot = (last_block + 1) * layer.desc.block_size - 1
    # Write a padding token first: Triton's op sets inline scales at its first call.
    write(*tokens, torch.tensor([-1], device=kv_cache.device))
    block = kv_cache.select(page_of(spec).axes.index("B"), last_block)
    saved = block.clone()
    try:
        before = reader.vectors()
        write(*tokens, torch.tensor([slot], device=kv_cache.device))
        after, found = reader.vectors(), reader.token()
    finally:
        block.copy_(saved)
    for i, token in enumerate((key, value)):
        if token is None:
            continue
        name = f"{'KV'[i]} of {spec.backend}"
        _check_vectors(name, before[i], after[i], slot)
        if layer.encoding.name == VALUES:
            # vLLM rounds values if it finds their scale; neighbours differ by more than that, but
            # for those below a step of INT8.
            tolerance = 1 / 14 if layer.encoding.inline_scales else 0.0
            step = 1 / 100 if layer.encoding.dtype is DType.S8 else 0.0
            _check_token(name, token[0] * reader.factors[i], found[i], tolerance, step, slot)


def self_test_group(
    group: LayerGroup, kv_caches: Mapping[str, Tensor], attention_layers: Mapping[str, Any]
) -> None:
    """Runs `self_test` on every layer of a group, with vLLM's own op and with its replacement, if
    there is one.

    kv_caches, attention_layers: as in `group_view`; the cache must not be in use
    Raises as `self_test` and `engine_write`.
    """
    for name, spec in zip(group.layer_names, group.specs, strict=True):
        layer = attention_layers[name]
        for stock in (True, False):
            self_test(
                kv_caches[name],
                spec,
                engine_write(layer, stock=stock),
                dtype=getattr(layer, "dtype", None),
                k_scale=layer._k_scale,
                v_scale=layer._v_scale,
            )


def engine_write(layer: Any, *, stock: bool = False) -> Write:
    """The op by which an attention layer writes new tokens into its cache.

    layer: an Attention or MLAAttention that is bound to its cache, with an impl that writes apart
           from attention: FLASH_ATTN, FLASHINFER, TRITON_ATTN, CPU_ATTN, ROCM_ATTN, MLA and others
    stock: vLLM's own op even if a class of KVX has replaced it
    Raises UnsupportedError.
    Source: vllm 0.32 model_executor/layers/attention/attention.py, unified_kv_cache_update;
    mla_attention.py, unified_mla_kv_cache_update
    """
    impl = layer.impl
    updates = [
        vars(cls)["do_kv_cache_update"]
        for cls in type(impl).__mro__
        if "do_kv_cache_update" in vars(cls)
        and not (stock and cls.__module__.startswith("kvx_adapters."))
    ]
    if not updates:
        raise UnsupportedError(
            f"{type(impl).__name__} has no do_kv_cache_update, expected a backend that writes the "
            "cache apart from attention. Call self_test with a write of your own"
        )
    update = updates[0]
    if hasattr(layer, "kv_lora_rank"):
        rank = layer.kv_lora_rank

        def write_latent(key: Tensor, value: Tensor | None, slots: Tensor) -> None:
            kv_c, k_pe = key[:, 0, :rank], key[:, :, rank:]
            update(impl, kv_c, k_pe, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)

        return write_latent

    def write(key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        update(impl, layer, key, value, layer.kv_cache, slots)

    return write


def _token(spec: LayerSpec, *, has_v: bool, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """K and V of one token, (1, num_kv_heads, size): exact in every dtype of a cache, K > 0 > V.

    52 values of 3 bits in an order in which neighbours, and the next head, are far apart.
    """
    codes = torch.tensor([m * 2.0**e for e in range(-6, 7) for m in (1, 1.25, 1.5, 1.75)])
    v_size = spec.head_size_v or spec.head_size
    order = torch.arange(max(spec.head_size, v_size)) * 17
    order = order + torch.arange(spec.num_kv_heads)[:, None] * 29
    token = codes[order % len(codes)].to(device)[None]
    return token[..., : spec.head_size], -token[..., :v_size] if has_v else None


class _Reader:
    """Reads the last block of a layer through `desc`."""

    def __init__(
        self, desc: CacheDesc, layer: Layer, k_scale: Tensor | float, v_scale: Tensor | float
    ) -> None:
        self.desc = desc
        self.is_values = layer.encoding.name == VALUES
        self.k_scale, self.v_scale = layer.k_scale, layer.v_scale
        self.factors: tuple[Tensor | float, Tensor | float] = (1.0, 1.0)
        # Slightly above each code of FP8: an op that truncates stores the same as one that rounds.
        self.nudge = 1 + 1 / 32 if desc.k.dtype.itemsize == 1 else 1.0
        if self.nudge > 1 and self.k_scale is None:
            self.k_scale = scale_desc(k_scale)
            self.v_scale = None if desc.v is None else scale_desc(v_scale)
            self.factors = (_per_head(k_scale), _per_head(v_scale))

    def vectors(self) -> tuple[Tensor, Tensor | None]:
        """The bytes of the last block, (block_size, num_kv_heads, vector)."""
        key, value = gather_kv(self.desc, *self._last_block())
        return key[0].view(torch.uint8), None if value is None else value[0].view(torch.uint8)

    def token(self) -> tuple[Tensor, Tensor | None]:
        """The values of the last token, (num_kv_heads, head_dim); nothing to compare if bytes."""
        if not self.is_values:
            return torch.empty(0), None
        key, value = gather_kv(
            self.desc,
            *self._last_block(),
            dtype="float32",
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
        return key[0, -1], None if value is None else value[0, -1]

    def _last_block(self) -> tuple[list[list[int]], list[int]]:
        return [[self.desc.num_blocks - 1]], [self.desc.block_size]


def _per_head(scale: Tensor | float) -> Tensor | float:
    """A scale in a shape that multiplies (num_kv_heads, head_dim)."""
    return scale.flatten()[:, None] if isinstance(scale, Tensor) else scale


def _check_vectors(name: str, before: Any, after: Any, slot: int) -> None:
    """Raises unless exactly the last token changed, in every head.

    before, after: (block_size, num_kv_heads, vector), bytes
    """
    changed = (before != after).any(-1)
    others = changed[:-1].nonzero().tolist()
    if others:
        token, head = others[0]
        raise InvalidArgumentError(
            f"{name}: vLLM wrote a token to slot {slot}, and KVX reads {len(others)} other vectors "
            f"changed, the first of token {token} and head {head} of the block. The description is "
            "wrong"
        )
    same = (~changed[-1]).nonzero().flatten().tolist()
    if same:
        raise InvalidArgumentError(
            f"{name}: vLLM wrote a token to slot {slot}, and KVX reads no change there in head "
            f"{same[0]}. The description is wrong"
        )


def _check_token(
    name: str, wanted: Tensor, found: Any, tolerance: float, step: float, slot: int
) -> None:
    """Raises at the first difference; both are (num_kv_heads, head_dim).

    tolerance, step: of each number, and of the largest of its vector
    """
    size = wanted.abs()
    near = tolerance * size + step * size.amax(-1, keepdim=True)
    right = (found - wanted).abs() <= near  # not so if NaN was found
    wrong = (~right).nonzero().tolist()
    if wrong:
        head, dim = wrong[0]
        raise InvalidArgumentError(
            f"{name}: vLLM wrote {float(wanted[head, dim]):g} to slot {slot}, head {head}, dim "
            f"{dim}, and KVX reads {float(found[head, dim]):g}; {len(wrong)} of {found.numel()} "
            "differ. The description is wrong"
        )
