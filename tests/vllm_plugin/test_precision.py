"""The precision of an engine's configuration, in both of its processes."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

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
    from kvx_adapters.vllm_plugin.settings import precision

    assert precision(dtype, SimpleNamespace(cache_dtype=cache_dtype)).name == name


def test_opaque_bytes_are_those_of_this_version() -> None:
    from vllm.version import __version__ as version

    from kvx_adapters.vllm_plugin.settings import precision

    opaque = f"vllm 0.{version.split('.')[1]} int4_per_token_head"
    config = SimpleNamespace(cache_dtype="int4_per_token_head", kv_cache_dtype_skip_layers=[])
    assert precision(torch.bfloat16, config) == Precision.of(opaque=opaque)


@pytest.mark.parametrize("cache_dtype", ["fp8", "bfloat16", "int4_per_token_head"])
def test_skipped_layers_are_more_precise_than_the_others(cache_dtype: str) -> None:
    """Which ones they are counts too."""
    from kvx_adapters.vllm_plugin.settings import precision

    def of(*skipped: str, dtype: torch.dtype = torch.float32) -> Precision:
        config = SimpleNamespace(cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=list(skipped))
        return precision(dtype, config)

    f32 = Precision.of("float32")
    mixed = of("0", "2")
    assert mixed.each == {f32, of()}
    assert Precision(mixed.formats) == f32.meet(of())
    assert mixed.includes(of("2", "0"))
    for other in (of(), of("0"), of("0", "2", dtype=torch.float16)):
        assert not other.includes(mixed)
        assert not mixed.includes(other) or other == of()


def test_layers_that_are_skipped_of_nothing() -> None:
    from kvx_adapters.vllm_plugin.settings import precision

    config = SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=["0"])
    assert precision(torch.bfloat16, config) == Precision.of("bfloat16")
