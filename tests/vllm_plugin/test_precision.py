"""The precision of an engine's configuration, in both of its processes."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvx_core import Precision

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "name"),
    [
        (torch.float32, "auto", "f32"),
        (torch.bfloat16, "auto", "bf16"),
        (torch.float16, "float16", "f16"),
        (torch.float32, "bfloat16", "bf16"),
        (torch.bfloat16, "float16", "bf16+f16"),
        (torch.float32, "fp8", "f8_e4m3"),
        (torch.float16, "fp8_e4m3", "f8_e4m3"),
        (torch.bfloat16, "fp8_e5m2", "f8_e5m2"),
        (torch.bfloat16, "fp8_per_token_head", "f8_e4m3_row"),
        (torch.bfloat16, "int8_per_token_head", "s8_row"),
    ],
)
def test_the_coarsest_of_computation_and_cache(
    dtype: torch.dtype, cache_dtype: str, name: str
) -> None:
    assert {one.name for one in of(dtype, cache_dtype)} == {name}


def of(
    dtype: torch.dtype, cache_dtype: str, *skipped: str, window: int | None = None, **text: object
) -> list[Precision]:
    """The precision of each of four layers."""
    from kvx_adapters.vllm_plugin.settings import precisions

    model = SimpleNamespace(
        dtype=dtype,
        get_total_num_hidden_layers=lambda: 4,
        hf_text_config=SimpleNamespace(**text),
    )
    cache = SimpleNamespace(
        cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=list(skipped), sliding_window=window
    )
    return precisions(model, cache)


def test_opaque_bytes_are_those_of_this_version() -> None:
    from vllm.version import __version__ as version

    opaque = f"vllm 0.{version.split('.')[1]} int4_per_token_head"
    assert of(torch.bfloat16, "int4_per_token_head") == [Precision.of(opaque=opaque)] * 4


@pytest.mark.parametrize("cache_dtype", ["fp8", "bfloat16", "int4_per_token_head"])
def test_skipped_layers_are_more_precise_than_the_others(cache_dtype: str) -> None:
    f32, (other, *_) = Precision.of("float32"), of(torch.float32, cache_dtype)
    assert of(torch.float32, cache_dtype, "0", "2") == [f32, other, f32, other]
    assert other != f32


def test_skipped_layers_with_a_window() -> None:
    """Of a model in which some layers have one, and of a model in which all have."""
    f32, fp8 = Precision.of("float32"), Precision.of("float32", "float8_e4m3fn")
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

    def skipped(*also: str, **options: Any) -> list[Precision]:
        return of(torch.float32, "fp8", "sliding_window", *also, **options)

    assert skipped(layer_types=kinds) == [f32, fp8, f32, fp8]
    assert skipped("3", layer_types=kinds, window=16) == [f32, fp8, f32, f32]
    assert skipped(layer_types=["full_attention"] * 4) == [fp8] * 4
    assert skipped(window=16) == [f32] * 4
    assert skipped() == [fp8] * 4


def test_layers_that_are_skipped_of_nothing() -> None:
    assert of(torch.bfloat16, "auto", "0") == [Precision.of("bfloat16")] * 4
