"""The self-test: vLLM's own ops write, KVX reads; wrong descriptions are caught."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import vllm
from kvx_core import CacheDesc, InvalidArgumentError, Layout, UnsupportedError, describe
from tests.fakes.vllm import (
    SENTINEL,
    B,
    D,
    H,
    N,
    by_permutation,
    dense,
    is_vllm_for_cpu,
    make_spec,
    needs_cpu_op,
)
from tests.native import ROOT, run


def cpu_spec(**fields: Any) -> vllm.LayerSpec:
    defaults = {"backend": "CPU_ATTN", "layout": "LBHNC", "isa": "vec", "num_layers": 1}
    return make_spec(**(defaults | {"block_size": 32, "head_size": 64} | fields))


def cpu_layer(
    kv_cache: Tensor, spec: vllm.LayerSpec, k_scale: float = 1, v_scale: float = 1
) -> Any:
    """Its impl, with what do_kv_cache_update asks of impl and layer."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    impl = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)  # __init__ wants an engine
    impl.attn_type = "decoder"
    impl.kv_cache_dtype = spec.kv_cache_dtype
    return SimpleNamespace(
        impl=impl,
        isa=spec.isa,
        kv_cache=kv_cache,
        dtype=torch.float32 if spec.dtype is torch.uint8 else spec.dtype,
        _k_scale=torch.tensor(k_scale),
        _v_scale=torch.tensor(v_scale),
        _k_scale_float=k_scale,
        _v_scale_float=v_scale,
    )


def halves_write(kv_cache: Tensor) -> Callable[..., None]:
    """reshape_and_cache_flash on a packed cache, by indexing."""

    def write(key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert value is not None
        keep = slots >= 0
        size = kv_cache.shape[2]
        k, v = kv_cache.transpose(1, 2).split(key.shape[-1], dim=-1)
        k[slots[keep] // size, slots[keep] % size] = key[: len(slots)][keep]
        v[slots[keep] // size, slots[keep] % size] = value[: len(slots)][keep]

    return write


# ---- vLLM's own ops ----


@needs_cpu_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("isa", "head_size"), [("vec", 64), ("vec", 128), ("vec16", 80)])
def test_cpu_attn_passes(isa: str, head_size: int, dtype: torch.dtype) -> None:
    spec = cpu_spec(isa=isa, head_size=head_size, dtype=dtype)
    raw, (kv_cache,) = by_permutation(spec)
    vllm.self_test(kv_cache, spec, vllm.engine_write(cpu_layer(kv_cache, spec)))
    assert (raw == SENTINEL).all()


@needs_cpu_op
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 2.9)])
def test_cpu_attn_fp8_passes(name: str, scales: tuple[float, float]) -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's FP8 cache on CPU needs AVX-512")
    spec = cpu_spec(dtype=torch.uint8, kv_cache_dtype=name)
    raw, (kv_cache,) = by_permutation(spec)
    layer = cpu_layer(kv_cache, spec, *scales)
    group = vllm.LayerGroup(layer_names=("a",), layers=(0,), specs=(spec,), window=0)
    vllm.self_test_group(group, {"a": kv_cache}, {"a": layer})
    assert (raw == SENTINEL).all()
    layer._k_scale_float = 2 * scales[0]
    with pytest.raises(InvalidArgumentError, match="K of CPU_ATTN: vLLM wrote "):
        vllm.self_test_group(group, {"a": kv_cache}, {"a": layer})
    assert (raw == SENTINEL).all()


@needs_cpu_op
def test_the_token_has_52_values_that_fp8_can_hold_and_heads_differ() -> None:
    """Dims that are exchanged, or taken from another head, are seen."""
    spec = cpu_spec(head_size=64, dtype=torch.float32)
    _, (kv_cache,) = by_permutation(spec)
    write, tokens = vllm.engine_write(cpu_layer(kv_cache, spec)), []

    def seen(key: Tensor, value: Tensor, slots: Tensor) -> None:
        tokens.extend((key.clone(), value.clone()))
        write(key, value, slots)

    vllm.self_test(kv_cache, spec, seen)
    for token, sign in zip(tokens[:2], (1, -1), strict=True):
        for head in sign * token[0]:
            assert len(set(head[:52].tolist())) == 52
            assert (head.min(), head.max()) == (2.0**-6, 1.75 * 2.0**6)
        assert (token[0, 0] != token[0, 1]).all()
    assert len(tokens) >= 2


@needs_cpu_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpu_mla_passes(dtype: torch.dtype) -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    spec = make_spec(
        backend="CPU_MLA",
        dtype=dtype,
        num_kv_heads=1,
        head_size=576,
        head_size_v=0,
        page_size_bytes=N * 576 * dtype.itemsize,
        num_layers=1,
    )
    raw, cache = dense("BNC", "BNC", {"B": B, "N": N, "C": 576}, dtype)
    layer = SimpleNamespace(
        impl=CPUMLAImpl.__new__(CPUMLAImpl),
        kv_lora_rank=512,
        kv_cache=cache,
        kv_cache_dtype="auto",
        _k_scale=torch.tensor(1.0),
    )
    engine_write = vllm.engine_write(layer)

    def write(key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert value is None  # a cache of latents has no V
        engine_write(key, value, slots)

    vllm.self_test(cache, spec, write)
    vllm.self_test(cache.unsqueeze(1), spec, write)
    assert (raw == SENTINEL).all()
    elsewhere = describe(cache.clone().unsqueeze(1), Layout.BLOCK_HND)
    with pytest.raises(
        InvalidArgumentError, match=r"K of CPU_MLA: .* reads no change there in head"
    ):
        vllm.self_test(cache, spec, write, desc=CacheDesc.from_kv(elsewhere))


# ---- wrong descriptions are caught ----


@needs_cpu_op
def test_k_and_v_swapped_are_caught() -> None:
    spec = cpu_spec()
    raw, (kv_cache,) = by_permutation(spec)
    right = vllm.cache_desc(kv_cache, spec)
    assert right.v is not None
    write = vllm.engine_write(cpu_layer(kv_cache, spec))
    with pytest.raises(InvalidArgumentError) as error:
        vllm.self_test(kv_cache, spec, write, desc=CacheDesc.from_kv(right.v, right.k))
    assert str(error.value).startswith(
        "K of CPU_ATTN: vLLM wrote 0.015625 to slot 223, head 0, dim 0"
    )
    assert str(error.value).endswith("128 of 128 differ. The description is wrong")
    assert (raw == SENTINEL).all()


@needs_cpu_op
def test_pages_of_another_isa_are_caught() -> None:
    """The AMX kernel's pages, and the halves of GPU backends, read as the pages of "vec"."""
    spec = cpu_spec()
    raw, (kv_cache,) = by_permutation(spec)
    layer = cpu_layer(kv_cache, spec)
    halves = vllm.cache_desc(kv_cache, replace(spec, backend="FLASH_ATTN", isa=None))
    with pytest.raises(InvalidArgumentError, match="CPU_ATTN: vLLM wrote a token to slot 223, and"):
        vllm.self_test(kv_cache, spec, vllm.engine_write(layer), desc=halves)
    assert (raw == SENTINEL).all()

    def write_tiles(key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        """K as [N / 16][D / 2][16][2] and V as [D / 16][N / 2][16][2]."""
        assert value is not None
        slot = int(slots[0])
        if slot < 0:
            return
        block, token = divmod(slot, 32)
        k, v = kv_cache[block].view(H, 2, -1).unbind(1)
        k.view(H, 2, 32, 16, 2)[:, token // 16, :, token % 16] = key[0].view(H, 32, 2)
        v.view(H, 4, 16, 16, 2)[:, :, token // 2, :, token % 2] = value[0].view(H, 4, 16)

    with pytest.raises(InvalidArgumentError, match="K of CPU_ATTN: vLLM wrote a token to slot 223"):
        vllm.self_test(kv_cache, spec, write_tiles)
    assert (raw == SENTINEL).all()


def test_split_read_as_packed_at_two_heads_is_caught() -> None:
    """The two 4-tuples of LMCache's corruption, each written, each read as the other."""
    spec = make_spec("NHD", backend="FLEX_ATTENTION", version="0.26.0", num_layers=1)
    raw, cache = dense("BHNC", "BNHC", {"B": B, "H": 2, "N": N, "C": 2 * D}, torch.bfloat16)
    split_view = raw.view(torch.bfloat16).view(B, N, 2, 2, D).transpose(1, 2)
    split_spec = replace(spec, version="0.25.1")
    packed, split = vllm.cache_desc(cache, spec), vllm.cache_desc(split_view, split_spec)
    vllm.self_test(cache, spec, halves_write(cache))
    with pytest.raises(InvalidArgumentError, match="K of FLEX_ATTENTION: vLLM wrote "):
        vllm.self_test(cache, spec, halves_write(cache), desc=split)

    def write_split(key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert value is not None
        if int(slots[0]) >= 0:
            k, v = split_view.unbind(1)
            k[slots // N, slots % N], v[slots // N, slots % N] = key, value

    vllm.self_test(split_view, split_spec, write_split)
    with pytest.raises(InvalidArgumentError, match="K of FLEX_ATTENTION: vLLM wrote "):
        vllm.self_test(split_view, split_spec, write_split, desc=packed)
    assert (raw == SENTINEL).all()


def test_a_stride_that_is_wrong_is_caught() -> None:
    spec = make_spec(num_layers=1)
    raw, (cache,) = by_permutation(spec)
    right = vllm.cache_desc(cache, spec)
    assert right.v is not None
    heads_first = (right.k.stride[0], N * 2 * D, 2 * D, 1)  # those of LBHNC
    wrong = CacheDesc.from_kv(*(replace(t, stride=heads_first) for t in (right.k, right.v)))
    with pytest.raises(InvalidArgumentError, match="TRITON_ATTN: vLLM wrote a token to slot 111"):
        vllm.self_test(cache, spec, halves_write(cache), desc=wrong)
    assert (raw == SENTINEL).all()


@pytest.mark.parametrize(
    ("dtype", "name", "expected"),
    [
        (torch.float16, "auto", torch.float16),
        (torch.uint8, "fp8", torch.bfloat16),
        (torch.float8_e5m2, "fp8_e5m2", torch.bfloat16),
    ],
    ids=str,
)
def test_the_dtype_of_the_token_is_that_of_the_cache_or_bfloat16_if_it_is_quantised(
    dtype: torch.dtype, name: str, expected: torch.dtype
) -> None:
    spec = make_spec(num_layers=1, dtype=dtype, kv_cache_dtype=name)
    raw, (cache,) = by_permutation(spec)
    stored, seen = expected, []
    if dtype.itemsize == 1:
        stored = torch.float8_e5m2 if "e5m2" in name else torch.float8_e4m3fn

    def write(key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert value is not None
        seen.append((key.dtype, value.dtype))
        halves_write(cache)(key.to(stored).view(dtype), value.to(stored).view(dtype), slots)

    vllm.self_test(cache, spec, write)
    assert set(seen) == {(expected, expected)}
    assert (raw == SENTINEL).all()


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC", "BHLNC"])
def test_other_layouts_pass(layout: str) -> None:
    spec = make_spec(layout, backend="FLASH_ATTN", dtype=torch.float16)
    raw, caches = by_permutation(spec)
    for cache in caches:
        vllm.self_test(cache, spec, halves_write(cache))
    assert (raw == SENTINEL).all()


def test_a_write_that_does_nothing_is_caught() -> None:
    spec = make_spec(num_layers=1)
    _, (cache,) = by_permutation(spec)
    with pytest.raises(
        InvalidArgumentError,
        match=r"K of TRITON_ATTN: vLLM wrote a token to slot 111, and KVX reads no change there in",
    ):
        vllm.self_test(cache, spec, lambda key, value, slots: None)


def test_a_write_that_fails_in_the_middle_leaves_the_block_as_it_was() -> None:
    spec = make_spec("LBNHC")
    raw, kv_caches = by_permutation(spec)
    write = halves_write(kv_caches[1])

    def fails(key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        write(key, value, slots)
        if (slots >= 0).any():
            assert not (raw == SENTINEL).all()
            raise RuntimeError("as a test says")

    with pytest.raises(RuntimeError, match="as a test says"):
        vllm.self_test(kv_caches[1], spec, fails)
    assert (raw == SENTINEL).all()


def test_nan_is_not_what_was_written() -> None:
    spec = make_spec(num_layers=1)
    _, (cache,) = by_permutation(spec)

    def write(key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        halves_write(cache)(torch.full_like(key, torch.nan), value, slots)

    with pytest.raises(InvalidArgumentError, match="and KVX reads nan; 48 of 48 differ"):
        vllm.self_test(cache, spec, write)


def test_rows_of_bytes() -> None:
    row = D + 4
    spec = make_spec(
        kv_cache_dtype="int8_per_token_head",
        dtype=torch.int8,
        state_content_bytes=2 * row,
        page_size_bytes=H * N * 2 * row,
        num_layers=1,
    )
    raw, caches = dense(
        "LBHNC", "LBNHC", {"L": 1, "B": B, "H": H, "N": N, "C": 2 * row}, torch.int8
    )
    started, too_large = [], [1.0]

    def write(key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        """Like Triton's: the first call sets all scales to 1."""
        assert value is not None
        assert key.shape == (1, H, D)
        assert (key.dtype, value.dtype) == (torch.bfloat16, torch.bfloat16)
        if not started:
            for end in (D, 2 * D + 4):
                caches[0][..., end : end + 4] = torch.ones(1).view(torch.int8)
            started.append(True)
        slot = int(slots[0])
        if slot >= 0:
            for token, at in ((key, 0), (value, row)):
                scale = token[0].float().abs().amax(-1, keepdim=True) / 127
                cell = caches[0][slot // N, :, slot % N, at : at + row]
                cell[:, :D] = (token[0] / scale).round().to(torch.int8)
                cell[:, D:] = (scale * too_large[0]).view(torch.int8)

    vllm.self_test(caches[0], spec, write)
    too_large[0] = 1.5
    with pytest.raises(InvalidArgumentError, match=r"K of TRITON_ATTN: vLLM wrote .* differ"):
        vllm.self_test(caches[0], spec, write)
    with pytest.raises(InvalidArgumentError, match="reads no change there in head 0"):
        vllm.self_test(caches[0], spec, lambda key, value, slots: None)
    assert (raw.view(B, N, H, 2, row)[-1, :, :, :, :D] == SENTINEL).all()


def test_an_impl_that_writes_within_attention() -> None:
    layer = SimpleNamespace(impl=object())
    with pytest.raises(UnsupportedError, match="object has no do_kv_cache_update, expected a ba"):
        vllm.engine_write(layer)


def test_vllms_own_op_is_found_below_the_one_in_its_place() -> None:
    """A plugin's class overrides the write: proof needs vLLM's, and the override passes as well."""
    calls = []

    class Stock:
        def do_kv_cache_update(self, *args: Any) -> None:
            calls.append("vllm")

    def own(self: Any, *args: Any) -> None:
        calls.append("kvx")

    cls = type("Own", (Stock,), {"do_kv_cache_update": own, "__module__": "kvx_adapters.plugin"})
    layer = SimpleNamespace(impl=cls(), kv_cache=torch.empty(0))
    for stock in (True, False):
        vllm.engine_write(layer, stock=stock)(torch.empty(0), None, torch.empty(0))
    assert calls == ["vllm", "kvx"]


@needs_cpu_op
@pytest.mark.parametrize("broken", ["vllm", "kvx", "none"])
def test_both_writes_of_a_group_are_tried(broken: str) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    spec = cpu_spec()
    _, (kv_cache,) = by_permutation(spec)
    layer = cpu_layer(kv_cache, spec)
    update = CPUAttentionBackendImpl.do_kv_cache_update

    def of(name: str) -> Any:
        return (lambda *args: None) if name == broken else update

    stock = type("Stock", (CPUAttentionBackendImpl,), {"do_kv_cache_update": of("vllm")})
    own = {"do_kv_cache_update": of("kvx"), "__module__": "kvx_adapters.plugin"}
    layer.impl.__class__ = type("Own", (stock,), own)
    (name,) = ["model.layers.0.self_attn.attn"]
    group = vllm.LayerGroup((name,), (0,), (spec,), 0)
    if broken == "none":
        vllm.self_test_group(group, {name: kv_cache}, {name: layer})
        return
    with pytest.raises(InvalidArgumentError, match="KVX reads no change there"):
        vllm.self_test_group(group, {name: kv_cache}, {name: layer})


@pytest.mark.slow
@pytest.mark.skipif(
    not is_vllm_for_cpu() or find_spec("triton") is None, reason="vllm or triton is not installed"
)
def test_triton_kernels_pass() -> None:
    script = ROOT / "tests/adapters/triton_vllm.py"
    said = run([sys.executable, script], env={"PYTHONPATH": str(ROOT)}, timeout=300)
    for told in (
        "TRITON_ATTN auto torch.bfloat16 BHLNC: as vLLM wrote it",
        "TRITON_ATTN fp8_per_token_head torch.uint8 LHBNC: as vLLM wrote it",
        "TRITON_ATTN int8_per_token_head torch.int8 LBNHC: as vLLM wrote it",
        "TRITON_ATTN_DIFFKV auto torch.bfloat16 LBHNC: as vLLM wrote it",
        "ROCM_ATTN auto torch.bfloat16 LBHNC: as vLLM wrote it",
    ):
        assert told in said
