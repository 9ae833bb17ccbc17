"""FP8 and INT8 pools of TensorRT-LLM: one scale per layer, for K and for V."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvx_adapters import tensorrt_llm as trt
from kvx_adapters.tensorrt_llm import PoolSpec
from kvx_core import (
    CacheDesc,
    CacheView,
    InvalidArgumentError,
    Layout,
    ScaleDesc,
    describe,
    migrate,
)
from tests.adapters.tensorrt_llm_ends import (
    FACTS,
    Dense,
    assert_same,
    config,
    load,
    rows_of,
    specs_of,
    store,
    views_of,
)
from tests.fakes.tensorrt_llm import KvCacheManager

FP8, INT8 = torch.float8_e4m3fn, torch.int8
FACTORS = [0.5, 4.0, 0.125]  # powers of two: 1 / factor is exact, as is the engine's product
LENGTH = 21


def values(spec: PoolSpec, seed: int) -> list[list[Tensor]]:
    """BF16 tokens of every magnitude, some beyond what FP8 and INT8 hold."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, LENGTH, spec.num_kv_heads, spec.head_dim)
    return [
        [
            torch.ldexp(
                torch.randn(shape, generator=generator),
                torch.randint(-12, 12, shape, generator=generator),
            ).to(torch.bfloat16)
            for _ in range(spec.kv_factor)
        ]
        for _ in spec.layers
    ]


def view_of(layers: list[list[Tensor]], **scales: tuple[ScaleDesc, ...]) -> CacheView:
    return CacheView(
        layers=tuple(
            CacheDesc.from_kv(*(describe(tensor, Layout.BLOCK_NHD) for tensor in layer))
            for layer in layers
        ),
        facts=FACTS,
        dense=True,
        **scales,
    )


def quantised(tensor: Tensor, factor: float, dtype: torch.dtype = FP8) -> Tensor:
    """As the kernels do: times kv_scale_orig_quant, saturating, to the nearest even.

    INT8 saturates at -128 there, and at -127 in KVX (spec E.6).
    """
    numbers = tensor.float() * (1 / factor)
    if dtype == INT8:
        return numbers.round().clamp(-127, 127).to(INT8)
    return numbers.clamp(-448, 448).to(FP8)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kv_factor", [1, 2])
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
def test_k_and_v_are_scaled_by_the_layers_one_factor(
    kv_factor: int, seed: int, dtype: torch.dtype
) -> None:
    heads = [3] * 3 if kv_factor == 2 else [1] * 3
    c = config(dtype=dtype, kv_factor=kv_factor, num_kv_heads_per_layer=heads)
    manager, expected = (KvCacheManager(c, seed) for _ in range(2))
    (spec,) = specs_of(manager)
    assert spec.sub_block_bytes == heads[0] * 8 * 20
    table, other = (rows_of(m, [m.add_sequence(LENGTH)]) for m in (manager, expected))
    dense = values(spec, seed)
    for layer, factor in enumerate(FACTORS):
        stored = [quantised(tensor, factor, dtype) for tensor in dense[layer]]
        store(expected.attention(layer, other, 0), 0, range(LENGTH), stored)

    (view,) = views_of(manager, factors=FACTORS)
    span = view.at(trt.block_table(table, 0, rows=slice(0, 1)))
    migrate(view_of(dense), span, [LENGTH])
    assert_same(manager.raw, expected.raw)

    found = [[torch.zeros_like(tensor) for tensor in layer] for layer in dense]
    migrate(span, view_of(found), [LENGTH])
    for layer, factor in enumerate(FACTORS):
        for a, b in zip(found[layer], dense[layer], strict=True):
            stored = quantised(b, factor, dtype)
            assert torch.equal(a, (stored.float() * factor).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
def test_the_same_factor_moves_codes(dtype: torch.dtype) -> None:
    """Any byte, NaN and -128 too."""
    manager = KvCacheManager(config(dtype=dtype), 5)
    (spec,) = specs_of(manager)
    table = rows_of(manager, [manager.add_sequence(LENGTH)])
    found, expected = (Dense(spec, 1, LENGTH, 5) for _ in range(2))
    for layer, tensors in enumerate(expected.layers):
        load(manager.attention(layer, table, 0), 0, range(LENGTH), tensors)
    (view,) = views_of(manager, factors=FACTORS)
    scales = tuple(map(ScaleDesc.of, FACTORS))
    dst = view_of(found.layers, k_scales=scales, v_scales=scales)
    migrate(view.at(trt.block_table(table, 0, rows=slice(0, 1))), dst, [LENGTH])
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert_same(a, b)


def test_two_scales_become_one() -> None:
    """Another engine's K is scaled by twice the factor, its V by the factor itself."""
    manager, expected = (KvCacheManager(config(dtype=FP8), 6) for _ in range(2))
    (spec,) = specs_of(manager)
    table, other = (rows_of(m, [m.add_sequence(LENGTH)]) for m in (manager, expected))
    codes = [[quantised(tensor, 1.0) for tensor in layer] for layer in values(spec, 6)]
    for layer, (k, v) in enumerate(codes):
        stored = [(k.float() * 2).clamp(-448, 448).to(FP8), v]
        store(expected.attention(layer, other, 0), 0, range(LENGTH), stored)
    src = view_of(
        codes,
        k_scales=tuple(ScaleDesc.of(2 * factor) for factor in FACTORS),
        v_scales=tuple(map(ScaleDesc.of, FACTORS)),
    )
    (view,) = views_of(manager, factors=FACTORS)
    migrate(src, view.at(trt.block_table(table, 0, rows=slice(0, 1))), [LENGTH])
    assert_same(manager.raw, expected.raw)


def test_factors_are_read_where_they_lie() -> None:
    manager = KvCacheManager(config(dtype=FP8))
    (spec,) = specs_of(manager)
    pool = manager.pools[0].primary.tensor
    # kv_scales has 3 elements, of which an FP8 cache uses the first.
    factors = [torch.tensor([0.5, 7.0, 9.0]), torch.tensor([4.0]), torch.tensor(0.125)]
    view = trt.cache_view(spec, pool, FACTS, scaling_factors=factors)
    assert view.k_scales is view.v_scales
    assert view.k_scales is not None
    assert [s and s.data for s in view.k_scales] == [factor.data_ptr() for factor in factors]
    assert [s and float(s.to_numpy()) for s in view.k_scales] == FACTORS


def test_layers_of_two_pools_take_their_own_factors() -> None:
    c = config(dtype=FP8, num_kv_heads_per_layer=[4, 1, 4])
    for factors in (FACTORS, torch.tensor(FACTORS)):
        views = views_of(KvCacheManager(c), factors=factors)
        found = [[float(s.to_numpy()) for s in view.k_scales or () if s] for view in views]
        assert found == [[4.0], [0.5, 0.125]]


def test_factors_that_do_not_agree() -> None:
    fp8, int8, half = (KvCacheManager(config(dtype=d)) for d in (FP8, INT8, torch.float16))
    with pytest.raises(InvalidArgumentError, match=r"None, expected one for each of 3 layers of I"):
        views_of(int8)
    wanted = (
        r"expected one for each of 3 layers of FP8: 1.0 with the PyTorch backend, whatever the "
        r"checkpoint says; its kv_cache_scaling_factor in a TensorRT engine$"
    )
    with pytest.raises(InvalidArgumentError, match=rf"^scaling_factors is None, {wanted}"):
        views_of(fp8)
    (spec,) = specs_of(fp8)
    with pytest.raises(InvalidArgumentError, match=rf"^scaling_factors is 2 long, {wanted}"):
        trt.cache_view(spec, fp8.pools[0].primary.tensor, FACTS, scaling_factors=FACTORS[:2])
    with pytest.raises(
        InvalidArgumentError,
        match=r"^scaling_factors has 2 entries, expected 3, one per local layer$",
    ):
        views_of(fp8, factors=FACTORS[:2])
    with pytest.raises(
        InvalidArgumentError, match=r"^scaling_factors is given, expected None for a pool of HALF$"
    ):
        views_of(half, factors=FACTORS)
