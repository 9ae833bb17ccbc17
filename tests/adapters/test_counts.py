"""Counts that adapters are told: the least one is taken, and one less is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlx_lm.models.cache import KVCache

from kvx_adapters import flashinfer, llama_cpp, mlx, onnxruntime, sglang
from kvx_core import InvalidArgumentError

PAGES = torch.arange(64, dtype=torch.int32).view(2, 32)  # row 0 is that of padded requests
ENDS = torch.tensor([0, 2], dtype=torch.int32)


def llama_facts(**given: Any) -> Any:
    own = {"rope_type": 2, "rotary_dim": 64, "num_layers": 4, "num_kv_heads": 2}
    kinds = {"k_dtype": "F16", "v_dtype": "F16", "rotation": llama_cpp.Rotation(0, 0)}
    return llama_cpp.cache_facts(**(own | kinds | given))


def llama_rotation(**given: Any) -> Any:
    return llama_cpp.rotation("F16", "F16", **({"k_head_dim": 64, "v_head_dim": 64} | given))


def onnx_facts(**given: Any) -> Any:
    own = {"num_layers": 4, "num_kv_heads": 2, "rotary_dim": 64}
    return onnxruntime.cache_facts(do_rotary=False, rotary_interleaved=False, **(own | given))


def mlx_facts(**given: Any) -> Any:
    own = {"rotary_dim": 64, "num_layers": 4, "num_kv_heads": 2}
    return mlx.cache_facts(rotary="half", **(own | given))


def room_of_mlx(num_tokens: int) -> None:
    sizes = {"batch_size": 1, "num_kv_heads": 2, "head_dim": 64}
    mlx.reserve([KVCache()], num_tokens=num_tokens, **sizes)


def lengths_of_flashinfer(page_size: int) -> Any:
    return flashinfer.seq_lens(ENDS, torch.tensor([1], dtype=torch.int32), page_size)


def pages_of_flashinfer(page_size: int) -> Any:
    return flashinfer.page_table([[3, 1]], [2], page_size)


def pages_of_sglang(page_size: int) -> Any:
    return sglang.block_table(PAGES, [1], [5], page_size=page_size)


def pages_of_tokens(page_size: int) -> Any:
    return sglang.ragged(PAGES, [1], [5], page_size=page_size)


@pytest.mark.parametrize(
    ("call", "name", "least"),
    [
        (llama_facts, "rope_type", -1),
        (llama_facts, "rotary_dim", 0),
        (llama_facts, "num_layers", 1),
        (llama_facts, "num_kv_heads", 1),
        (llama_facts, "window", 0),
        (llama_rotation, "k_head_dim", 1),
        (llama_rotation, "v_head_dim", 1),
        (onnx_facts, "num_layers", 1),
        (onnx_facts, "num_kv_heads", 1),
        (onnx_facts, "rotary_dim", 0),
        (mlx_facts, "rotary_dim", 0),
        (mlx_facts, "num_layers", 1),
        (mlx_facts, "num_kv_heads", 1),
        (mlx_facts, "window", 0),
        (room_of_mlx, "num_tokens", 1),
        (lengths_of_flashinfer, "page_size", 1),
        (pages_of_flashinfer, "page_size", 1),
        (pages_of_sglang, "page_size", 1),
        (pages_of_tokens, "page_size", 1),
    ],
)
def test_the_least_that_is_taken(call: Callable[..., Any], name: str, least: int) -> None:
    call(**{name: least})
    with pytest.raises(InvalidArgumentError, match=f"^{name} is {least - 1}, expected"):
        call(**{name: least - 1})


def test_windows_are_none_unless_said() -> None:
    assert [facts().window for facts in (llama_facts, onnx_facts, mlx_facts)] == [0, 0, 0]
    assert llama_facts().first_layer == 0


def test_engines_have_a_version_only_if_it_is_given() -> None:
    names = {"mlx-lm": mlx_facts, "onnxruntime": onnx_facts}
    for name, facts in names.items():
        assert (facts().engine, facts(version="1.2").engine) == (name, f"{name} 1.2")


def test_keys_that_do_not_turn_have_no_rotary_dims() -> None:
    """Whatever the metadata says beside."""
    found = llama_facts(rope_type=-1)
    assert (found.rotary, found.rotary_dim) == ("none", 0)
    assert (found.hadamard, found.hadamard_k, found.hadamard_v) == (False, None, None)
    turned = llama_facts(rotation=llama_cpp.Rotation(64, 0))
    assert (turned.hadamard, turned.hadamard_k, turned.hadamard_v) == (True, 64, 0)
    assert llama_facts(rope_type=2).rotary_dim == 64
