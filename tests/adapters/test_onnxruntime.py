"""kvx_adapters.onnxruntime against ONNX Runtime itself, with past and present in one buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from kvx_adapters import onnxruntime as adapter
from kvx_adapters.cli.engines.live_onnxruntime import Live, facts, session
from kvx_adapters.cli.engines.live_transformers import Live as HF
from kvx_core import (
    CacheSpan,
    InvalidArgumentError,
    UnsupportedError,
    verify,
)
from tests.documents import Document
from tests.engines import tiny_model
from tests.engines.live import check_alone_and_zeros, check_there_and_back
from tests.engines.tiny_model import tiny
from tests.ways_out import WayOut, leads_out

COUNT = 12
K0 = "past_key_values.0.key"


@pytest.mark.parametrize("num_tokens", [2, 37, 100])
def test_a_sequence_moves_there_and_back(num_tokens: int) -> None:
    there = Live(tiny())
    before = {name: buffer.ctypes.data for name, buffer in there.buffers.items()}
    check_there_and_back(there, num_tokens)
    assert before == {name: buffer.ctypes.data for name, buffer in there.buffers.items()}


def test_the_engine_alone_and_a_cache_of_zeros() -> None:
    check_alone_and_zeros("onnxruntime")


def test_one_layer() -> None:
    given = buffers()
    key, value = given["past_key_values.1.key"], given["past_key_values.1.value"]
    desc = adapter.cache_desc(key, value)
    assert desc.k.shape == (1, 2, 8, 64)
    assert (desc.k.data, desc.v.data) == (key.ctypes.data, value.ctypes.data)


def buffers(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(adapter.reserve(session(tiny()), batch_size=1, num_tokens=8))
    return found | changes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            np.zeros((1, 2, 8, 64), np.float16),
            "is F16 of shape .* expected F32 of .'any', 2, 'any'",
        ),
        (np.zeros((1, 3, 8, 64), np.float32), r"of shape \(1, 3, 8, 64\), expected F32"),
        (np.zeros((2, 8, 64), np.float32), r"of shape \(2, 8, 64\), expected F32"),
        (np.zeros((1, 2, 8), np.float32), r"of shape \(1, 2, 8\), expected F32"),
    ],
)
def test_buffers_are_compared_with_the_session(given: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        adapter.cache_view(session(tiny()), buffers(**{K0: given}), facts(tiny()), holds=None)


@pytest.mark.parametrize("name", ["past_key_values.0.value", "past_key_values.2.key"])
@pytest.mark.parametrize(("batch", "room"), [(1, 9), (2, 8), (1, 7), (3, 8)])
def test_buffers_are_compared_with_each_other(name: str, batch: int, room: int) -> None:
    """K and V of one layer, and of others: of other batches, or with other room."""
    other = buffers(**{name: np.zeros((batch, 2, room, 64), np.float32)})
    error = rf"{name}'\] has {batch} rows of {room} tokens, expected 1 of 8 as the first buffer"
    with pytest.raises(InvalidArgumentError, match=error):
        adapter.cache_view(session(tiny()), other, facts(tiny()), holds=None)
    with pytest.raises(InvalidArgumentError, match=error):
        adapter.bind(session(tiny()).io_binding(), session(tiny()), other)


def test_a_first_buffer_of_another_batch() -> None:
    other = buffers(**{K0: np.zeros((2, 2, 8, 64), np.float32)})
    with pytest.raises(
        InvalidArgumentError, match=r"0\.value'\] has 1 rows of 8 .* expected 2 of 8"
    ):
        adapter.cache_view(session(tiny()), other, facts(tiny()), holds=None)


def test_missing_buffers() -> None:
    few = {name: buffer for name, buffer in buffers().items() if name != K0}
    with pytest.raises(
        InvalidArgumentError, match=r"lacks \['past_key_values.0.key'\] and has \[\]"
    ):
        adapter.cache_view(session(tiny()), few, facts(tiny()), holds=None)


def test_only_contiguous_buffers_are_bound() -> None:
    strided = buffers(**{K0: torch.zeros(1, 8, 2, 64).transpose(1, 2)})
    adapter.cache_view(session(tiny()), strided, facts(tiny()), holds=None)
    with pytest.raises(InvalidArgumentError, match="expected contiguous"):
        adapter.bind(session(tiny()).io_binding(), session(tiny()), strided)


def test_buffers_of_bfloat16_are_bound_as_such() -> None:
    """A decoder that leaves its cache as it is: onnxruntime takes no other type of elements."""
    shape = [1, 2, 3, 8]
    names = [f"past_key_values.0.{half}" for half in ("key", "value")]
    there = [name.replace("past_key_values", "present") for name in names]
    given, made = (
        [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.BFLOAT16, shape) for n in found]
        for found in (names, there)
    )
    nodes = [onnx.helper.make_node("Identity", [a], [b]) for a, b in zip(names, there, strict=True)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "cache", given, made),
        opset_imports=[onnx.helper.make_opsetid("", 21)],
        ir_version=10,
    )
    running = onnxruntime.InferenceSession(model.SerializeToString())
    held = {name: torch.randn(shape).bfloat16() for name in names}
    before = {name: tensor.clone() for name, tensor in held.items()}
    binding = running.io_binding()
    adapter.bind(binding, running, held)
    running.run_with_iobinding(binding)
    assert all(torch.equal(held[name], before[name]) for name in names)
    seen: list[tuple[Any, ...]] = []
    binding = SimpleNamespace(
        bind_input=lambda *given: seen.append(given), bind_output=lambda *given: seen.append(given)
    )
    adapter.bind(binding, running, held)
    assert [given[:3] for given in seen] == [
        (name, "cpu", 0) for pair in zip(names, there, strict=True) for name in pair
    ]


def of(*inputs: tuple[str, str, list[Any]]) -> Any:
    """A session with such inputs."""
    made = [SimpleNamespace(name=name, type=kind, shape=shape) for name, kind, shape in inputs]
    return SimpleNamespace(get_inputs=lambda: made)


def test_sessions_with_other_caches_are_refused() -> None:
    shape = ["batch", 2, "room", 64]
    value = ("past_key_values.0.value", "tensor(float)", shape)
    with pytest.raises(UnsupportedError, match=r"is a tensor\(int8\), expected one of"):
        adapter.past_inputs(of((K0, "tensor(int8)", shape), value))
    with pytest.raises(UnsupportedError, match="has 3 axes, expected 4"):
        adapter.past_inputs(of((K0, "tensor(float)", shape[:3]), value))
    for inputs in ((), (value,)):
        with pytest.raises(UnsupportedError, match=r"expected past_key_values\.I\.key and"):
            adapter.past_inputs(of(*inputs))
    bf16 = of((K0, "tensor(bfloat16)", shape), (value[0], "tensor(bfloat16)", shape))
    with pytest.raises(UnsupportedError, match="is BF16, expected F32 or F16"):
        adapter.reserve(bf16, batch_size=1, num_tokens=8)
    unknown = of((K0, "tensor(float)", ["batch", 2, "room", "dim"]), value)
    with pytest.raises(UnsupportedError, match="leaves its heads or head_dim to the run"):
        adapter.reserve(unknown, batch_size=1, num_tokens=8)
    for name in ("batch_size", "num_tokens"):
        with pytest.raises(InvalidArgumentError, match=f"{name} is 0, expected 1 to"):
            adapter.reserve(session(tiny()), **{"batch_size": 1, "num_tokens": 8, name: 0})


def test_layers_are_in_the_models_order_and_keys_first() -> None:
    """Whatever the order of the session's inputs."""
    shape = ["batch", 2, "room", 64]
    names = [f"past_key_values.{i}.{half}" for i in (10, *range(10)) for half in ("value", "key")]
    given = of(*((name, "tensor(float)", shape) for name in names))
    made = {name: np.zeros((1, 2, 8, 64), np.float32) for name in names}
    found = adapter.cache_view(given, made, facts(tiny()), holds=None)
    for i, layer in enumerate(found.layers):
        assert layer.k.data == made[f"past_key_values.{i}.key"].ctypes.data
        assert layer.v is not None
        assert layer.v.data == made[f"past_key_values.{i}.value"].ctypes.data


def test_facts() -> None:
    assert (facts(tiny()).rotary, facts(tiny()).rotary_dim, facts(tiny()).window) == ("half", 64, 0)
    sizes = {"num_layers": 1, "num_kv_heads": 1}
    found = adapter.cache_facts(
        **sizes, do_rotary=True, rotary_interleaved=True, rotary_dim=8, local_window_size=16
    )
    assert (found.rotary, found.window) == ("interleaved", 16)
    none = adapter.cache_facts(**sizes, do_rotary=False, rotary_interleaved=False, rotary_dim=0)
    assert none.rotary == "none"
    assert (none.engine, found.engine) == ("onnxruntime",) * 2
    with pytest.raises(InvalidArgumentError, match="do_rotary is 2, expected"):
        adapter.cache_facts(**sizes, do_rotary=2, rotary_interleaved=False, rotary_dim=8)
    with pytest.raises(InvalidArgumentError, match="rotary_dim is 0 and do_rotary is True"):
        adapter.cache_facts(**sizes, do_rotary=True, rotary_interleaved=False, rotary_dim=0)


def test_the_page() -> None:
    source = prefilled()
    names = Document("onnxruntime.md").run({"source": source, "session": session(tiny())})
    assert verify(source, names["view"], [99]).ok
    held = adapter.cache_view(session(tiny()), names["buffers"], names["facts"], holds=None)
    assert verify(source, held, [99]).ok


def prefilled() -> CacheSpan:
    hf = HF(tiny())
    hf.prefill(tiny_model.prompt(99))
    return hf.view()


# ---- ways out ----


def bound(**changes: Any) -> None:
    adapter.bind(session(tiny()).io_binding(), session(tiny()), buffers(**changes))


def of_kind(kind: str, *shape: Any) -> Any:
    """A session of one layer whose keys and values are such inputs."""
    return of(*((f"past_key_values.0.{half}", kind, list(shape)) for half in ("key", "value")))


def own(like: Any, dtype: torch.dtype) -> None:
    """Buffers that the caller has allocated."""
    made = {name: torch.zeros(1, 2, 8, 64, dtype=dtype) for name in adapter.past_inputs(like)}
    adapter.cache_view(like, made, facts(tiny()), holds=None)


def reserved(like: Any) -> None:
    adapter.reserve(like, batch_size=1, num_tokens=8)


ROWS = "batch", 2, "room", 64
WAYS_OUT = [
    WayOut(
        "onnxruntime knows no strides. Allocate it anew, see reserve",
        lambda: bound(**{K0: torch.zeros(1, 8, 2, 64).transpose(1, 2)}),
        bound,
    ),
    WayOut(
        "leaves its heads or head_dim to the run, expected numbers. Allocate the buffers",
        lambda: reserved(of_kind("tensor(float)", "batch", "heads", "room", "dim")),
        lambda: own(of_kind("tensor(float)", "batch", "heads", "room", "dim"), torch.float32),
    ),
    WayOut(
        "Allocate tensors of torch, (batch, num_kv_heads, num_tokens, head_dim)",
        lambda: reserved(of_kind("tensor(bfloat16)", *ROWS)),
        lambda: own(of_kind("tensor(bfloat16)", *ROWS), torch.bfloat16),
    ),
    WayOut(
        "the scales of a quantized cache are not in it. Export the model with a float cache",
        lambda: adapter.past_inputs(of_kind("tensor(int8)", *ROWS)),
        lambda: [
            adapter.past_inputs(of_kind(f"tensor({kind})", *ROWS)) for kind in ("float", "float16")
        ],
    ),
    WayOut(
        "expected one for each past input of the session. See reserve",
        lambda: adapter.cache_view(session(tiny()), {}, facts(tiny()), holds=None),
        lambda: adapter.cache_view(session(tiny()), buffers(), facts(tiny()), holds=None),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)
