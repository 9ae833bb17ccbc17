"""kvx_adapters.openvino against OpenVINO's paged attention on the CPU plugin."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from numpy.typing import NDArray

from kvx_adapters import openvino as adapter
from kvx_adapters.cli.engines.live_openvino import Live, run_inputs
from kvx_adapters.cli.engines.live_transformers import Live as HF
from kvx_adapters.cli.engines.openvino_model import _paged, compiled
from kvx_adapters.transformers import cache_desc as describe_layer
from kvx_core import (
    CacheView,
    DType,
    InvalidArgumentError,
    OutOfRangeError,
    UnsupportedError,
    migrate,
    verify,
)
from tests.documents import Document
from tests.engines import tiny_model
from tests.engines.live import check_alone_and_zeros, check_there_and_back
from tests.engines.tiny_model import tiny
from tests.ways_out import WayOut, leads_out

COUNT = 12


def prefilled(num_tokens: int) -> HF:
    """All but the last token of a prompt, in transformers."""
    found = HF(tiny())
    found.prefill(tiny_model.prompt(num_tokens)[:-1])
    return found


@pytest.mark.parametrize("num_tokens", [2, 65, 100])
def test_a_sequence_moves_there_and_back(num_tokens: int) -> None:
    check_there_and_back(Live(tiny()), num_tokens)


def test_the_engine_alone_and_a_cache_of_zeros() -> None:
    check_alone_and_zeros("openvino")


def test_a_float16_cache_continues() -> None:
    ids, want = tiny_model.prompt(100), list(tiny_model.greedy(100, COUNT))
    there, back = Live(tiny(), precision="f16"), HF(tiny())
    there.reserve(99)
    migrate(prefilled(100).view(), there.view(), [99])
    assert there.decode(4, after=ids[-1]) == want[:4]
    hop_back(there, back)
    assert back.decode(COUNT - 4, after=want[3]) == want[4:]


def hop_back(src: Live, dst: HF) -> None:
    """A hop whose ends have different dtypes."""
    dst.reserve(src.lengths[0])
    migrate(src.view(), dst.view(), src.lengths)


def test_bfloat16_pools() -> None:
    """The plugin compiles such a model on processors with bf16 alone: its inputs stand for it."""
    model = model_of(ov.Type.bf16, [-1, 2, 32, 64])
    pools = adapter.reserve(model, 2)
    assert {pool.dtype for pool in pools.values()} == {np.dtype(np.float16)}
    facts = replace(Live(tiny()).view().view.facts, num_layers=1)
    hf = prefilled(40).cache.layers[0]
    src = CacheView((describe_layer(hf),), facts, dense=True)
    migrate(src, adapter.cache_view(model, pools, facts, requests=()).at([[1, 0]]), [39])
    stored = torch.from_numpy(pools["value_cache.0"]).view(torch.bfloat16)
    assert torch.equal(torch.cat([stored[1], stored[0, :, :7]], 1), hf.values[0].bfloat16())


def test_bfloat16_in_the_engine() -> None:
    """Where the processor has bf16, OpenVINO's own pools are read; elsewhere it refuses them."""
    refused = ""
    try:
        engine = Live(tiny(), precision="bf16")
    except RuntimeError as error:
        refused = str(error)
    if refused:
        assert "expect kvcache type f32, current: bf16" in refused
        flags = set(Path("/proc/cpuinfo").read_text().split())
        assert not flags & {"avx512_bf16", "amx_bf16"}
        return
    engine.prefill(tiny_model.prompt(40)[:-1])
    back, exact = HF(tiny()), prefilled(40)
    hop_back(engine, back)
    got, want = back.cache.layers[0].values, exact.cache.layers[0].values
    assert float((got - want).abs().max()) < 0.1


# ---- u8: scales and zero points in the pools ----


def numbers(engine: Live, name: str) -> NDArray[np.float32]:
    """What the engine's tokens stand for, (heads, tokens, dim), by hand."""
    pool = engine.pools[name][engine.blocks]
    if name.startswith("key"):
        beside = (
            np.ascontiguousarray(pool[:, :, :8]).view(np.float32).reshape(len(pool), 2, 2, 1, 64)
        )
        found = (pool[:, :, 8:].astype(np.float32) - beside[:, :, 1]) * beside[:, :, 0]
    else:
        beside = np.ascontiguousarray(pool[..., :8]).view(np.float32)
        found = (pool[..., 8:].astype(np.float32) - beside[..., 1:]) * beside[..., :1]
    return np.concatenate(list(found), 1)[:, : engine.lengths[0]]


def test_the_default_cache_is_u8_and_reads_as_the_engine_wrote_it() -> None:
    engine, dst = Live(tiny(), precision="default"), HF(tiny())
    assert {found.dtype for found in adapter.cache_inputs(engine.compiled).values()} == {
        DType.U8_ZERO
    }
    engine.prefill(tiny_model.prompt(100)[:-1])
    hop_back(engine, dst)
    for i, layer in enumerate(dst.cache.layers):
        for name, tensor in (("key", layer.keys), ("value", layer.values)):
            assert np.array_equal(numbers(engine, f"{name}_cache.{i}"), tensor[0].numpy())
    exact = prefilled(100).cache.layers[0]
    assert float((dst.cache.layers[0].keys - exact.keys).abs().max()) < 0.05
    assert float((dst.cache.layers[0].values - exact.values).abs().max()) < 0.05


def test_u8_written_from_outside_continues() -> None:
    """Equal tokens are not sure with eight bits: these are."""
    ids = tiny_model.prompt(100)
    alone, there, zeros = (Live(tiny(), precision="u8") for _ in range(3))
    alone.prefill(ids[:-1])
    there.reserve(99)
    zeros.reserve(99)
    migrate(prefilled(100).view(), there.view(), [99])
    for i in range(tiny_model.NUM_LAYERS):
        for kv in ("key", "value"):
            name = f"{kv}_cache.{i}"
            # A layer's numbers hold the error of the u8 layers below it.
            assert np.abs(numbers(there, name) - numbers(alone, name)).max() < 0.6
    want = alone.decode(COUNT, after=ids[-1])
    assert there.decode(COUNT, after=ids[-1])[:4] == want[:4]
    assert zeros.decode(COUNT, after=ids[-1])[:4] != want[:4]


def test_a_part_filled_block_is_requantized_if_asked() -> None:
    """Tokens 40 to 47 go behind 40 that are there: in the second block, whose scales change."""
    hf = prefilled(100)
    whole, there = Live(tiny(), precision="u8"), Live(tiny(), precision="u8")
    whole.reserve(48)
    there.reserve(48)
    migrate(hf.view(), whole.view(), [48])
    migrate(hf.view(), there.view(), [40])
    src = hf.view().view.at(starts=[40])
    dst = there.view().view.at([there.blocks], starts=[40])
    before = {name: pool.copy() for name, pool in there.pools.items()}
    with pytest.raises(OutOfRangeError, match="block"):
        migrate(src, dst, [8])
    assert all(np.array_equal(before[name], pool) for name, pool in there.pools.items())
    migrate(src, dst, [8], requantize=True)
    for kv in ("key", "value"):
        got, want = numbers(there, f"{kv}_cache.0"), numbers(whole, f"{kv}_cache.0")
        assert np.abs(got - want).max() < 0.05
    assert not np.array_equal(before["key_cache.0"], there.pools["key_cache.0"])


# ---- tables, facts and refusals ----


def test_tables_and_lengths() -> None:
    table = adapter.block_table(np.array([5, 2, 9], np.int32), np.array([0, 2, 3], np.int32))
    assert (table.seq_count, table.max_blocks_per_seq) == (2, 2)
    lengths = adapter.seq_lens(np.array([40, 0], np.int32), np.array([0, 1, 4], np.int32))
    assert lengths.to_numpy().tolist() == [41, 3]
    assert adapter.seq_lens([40, 0], [0, 0, 0]).to_numpy().tolist() == [40, 0]
    assert np.asarray(table.owner).tolist() == [[5, 2], [9, -1]]
    for begins in ([0, 2], [0, 2, 4], [1, 3], [0, 2, 1, 3], [0, 3, 2, 3], []):
        error = rf"block_indices_begins is {re.escape(str(begins))}, expected to rise from 0 to 3"
        with pytest.raises(InvalidArgumentError, match=error):
            adapter.block_table([5, 2, 9], begins)
    with pytest.raises(InvalidArgumentError, match=r"shape \(2,\), expected \(3,\)"):
        adapter.seq_lens([40, 0], [0, 1])
    for past, begins in (([1], [0, -2]), ([1], [3, 5]), ([-4], [0, 9]), ([1, 1], [0, 5, 2])):
        with pytest.raises(InvalidArgumentError, match="expected to rise from 0, and counts of"):
            adapter.seq_lens(past, begins)


def test_pools_are_compared_with_the_model() -> None:
    engine = Live(tiny(), precision="f32")
    view = engine.view().view
    assert view.layers[2].v is not None
    assert view.layers[2].v.data == engine.pools["value_cache.2"].ctypes.data
    for given in (
        np.zeros((4, 2, 16, 64), np.float32),
        np.zeros((4, 2, 32, 64), np.float16),
        np.zeros((8, 2, 32, 64), np.float32)[::2],
    ):
        with pytest.raises(
            InvalidArgumentError, match=r"expected F32 of \(num_blocks, 2, 32, 64\), co"
        ):
            adapter.cache_view(
                engine.compiled, engine.pools | {"key_cache.0": given}, view.facts, requests=()
            )
    few = {name: pool for name, pool in engine.pools.items() if name != "key_cache.0"}
    with pytest.raises(InvalidArgumentError, match=r"pools lacks \['key_cache.0'\]"):
        adapter.cache_view(engine.compiled, few, view.facts, requests=())


# ---- a request that runs, and its own count ----


def run_of(engine: Live, tokens: list[int], past: int = 0) -> dict[str, Any]:
    """The inputs of a run that computes tokens behind `past`."""
    return run_inputs(tokens, past, engine.blocks[: -(-(past + len(tokens)) // 32)])


def test_a_view_is_refused_while_a_request_runs() -> None:
    engine, dst = Live(tiny(), num_tokens=1024), HF(tiny())
    dst.reserve(4)
    engine.prefill(tiny_model.prompt(4))
    span, view = adapter.span(engine.view().view, engine._request), engine.view()
    migrate(view, dst.view(), [4])
    engine._request.start_async(run_of(engine, [1] * 1000))  # a quarter of a second
    try:
        for src, to in ((view, dst.view()), (dst.view(), view), (span, dst.view())):
            with pytest.raises(
                InvalidArgumentError,
                match=r"out of date: requests\[0\] runs or .*call its wait\(\)",
            ):
                migrate(src, to, [4])
        with pytest.raises(
            InvalidArgumentError, match=r"request runs or lacks .* call its wait\(\)"
        ):
            adapter.span(view.view, engine._request)
    finally:
        engine._request.wait()
    engine._held = 1000
    migrate(engine.view(), dst.view(), [4])


def test_a_request_with_other_tensors_is_refused() -> None:
    engine, dst = Live(tiny()), HF(tiny())
    dst.reserve(4)
    engine.prefill(tiny_model.prompt(4))
    other = np.zeros_like(engine.pools["value_cache.3"])
    engine._request.set_tensor("value_cache.3", ov.Tensor(other, shared_memory=True))
    with pytest.raises(
        InvalidArgumentError, match=r"requests\[0\] has another tensor as value_cac"
    ):
        migrate(engine.view(), dst.view(), [4])


def test_a_span_holds_what_the_last_run_has_left() -> None:
    """A block of 32 has room behind the last token."""
    engine, dst = Live(tiny()), HF(tiny())
    engine.prefill(tiny_model.prompt(40)[:-1])
    span = adapter.span(engine.view().view, engine._request)
    dst.reserve(40)
    with pytest.raises(OutOfRangeError, match="src holds 39 tokens of sequence 0 by its engine's"):
        migrate(span, dst.view(), [40])
    migrate(span, dst.view(), [39])
    exact = np.concatenate(list(engine.pools["value_cache.1"][engine.blocks[:2]]), 1)[:, :39]
    assert np.array_equal(dst.cache.layers[1].values[0, :, :39].numpy(), exact)
    engine.decode(1, after=tiny_model.prompt(40)[-1])
    with pytest.raises(
        InvalidArgumentError, match=r"request has past_lens \[39\], expected \[0\] as"
    ):
        migrate(span, dst.view(), [39])
    migrate(adapter.span(engine.view().view, engine._request), dst.view(), [40])


def model_of(kind: ov.Type, shape: list[int]) -> Any:
    """A model with caches of this kind."""

    def given(name: str) -> Any:
        return SimpleNamespace(
            get_names=lambda: {name},
            get_element_type=lambda: kind,
            get_partial_shape=lambda: ov.PartialShape(shape),
        )

    return SimpleNamespace(inputs=[given("key_cache.0"), given("value_cache.0")])


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        (
            ov.Type.u4,
            [-1, 2, 32, 64],
            "input key_cache.0 is u4, expected one of f32, f16, bf16, u8",
        ),
        (ov.Type.f32, [-1, 2, -1, 64], "only the first, the blocks, is open"),
        (ov.Type.f32, [-1, -1, 32, 64], "only the first, the blocks, is open"),
        (ov.Type.f32, [-1, 2, 32, 0], r"with 32 x 0 elements .* expected 32 x \(head_dim \+ 0\)"),
        (ov.Type.f32, [-1, 2, 16, 64], r"with 16 x 64 elements .* expected 32 x \(head_dim \+ 0\)"),
        (ov.Type.u8, [-1, 2, 32, 72], r"with 32 x 72 elements .* expected 40 x \(head_dim \+ 0\)"),
    ],
)
def test_other_caches_are_refused(kind: ov.Type, shape: list[int], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        adapter.cache_inputs(model_of(kind, shape))


def test_the_least_head_dim() -> None:
    found = adapter.cache_inputs(model_of(ov.Type.f32, [-1, 2, 32, 1]))
    assert [one.head_dim for one in found.values()] == [1, 1]


@pytest.mark.parametrize("size", [0, 32, 64])
def test_groups_of_a_vector_are_refused(size: int) -> None:
    """A pool with two groups of 32 has the shape of one with vectors of 72."""
    options = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "u8",
        "VALUE_CACHE_GROUP_SIZE": size,
    }
    model = ov.Core().compile_model(_paged(tiny()).clone(), "CPU", options)
    if size != 32:
        assert adapter.cache_inputs(model)["value_cache.0"].head_dim == 64
        return
    with pytest.raises(UnsupportedError, match="VALUE_CACHE_GROUP_SIZE is 32, expected 0: scales"):
        adapter.cache_inputs(model)


def of_layers(*layers: tuple[ov.Type, list[int], list[int]], group_size: int = 0) -> Any:
    """A model whose layers differ: kind, shape of K and of V of each."""
    inputs = []
    for i, (kind, *shapes) in enumerate(layers):
        for name, shape in zip(("key", "value"), shapes, strict=True):
            (given, _) = model_of(kind, shape).inputs
            given.get_names = lambda name=f"{name}_cache.{i}": {name}
            inputs.append(given)
    return SimpleNamespace(inputs=inputs, get_property=lambda name: group_size)


def test_groups_of_any_layer_are_refused() -> None:
    """Layer 1 has vectors of 128 in two groups of 64, layer 0 one of 64: its own size."""
    first = ov.Type.u8, [-1, 2, 40, 64], [-1, 2, 32, 72]
    second = ov.Type.u8, [-1, 2, 40, 128], [-1, 2, 32, 128 + 16]
    for layers in ((first, second), (second, first)):
        with pytest.raises(UnsupportedError, match="VALUE_CACHE_GROUP_SIZE is 64, expected 0: sca"):
            adapter.cache_inputs(of_layers(*layers, group_size=64))
    exact = ov.Type.f32, [-1, 2, 32, 64], [-1, 2, 32, 64]
    with pytest.raises(UnsupportedError, match="VALUE_CACHE_GROUP_SIZE is 64, expected 0: scales"):
        adapter.cache_inputs(of_layers(exact, second, group_size=64))
    assert len(adapter.cache_inputs(of_layers(first, exact, group_size=64))) == 4


def test_facts_of_layers_with_other_heads_do_not_say_how_many() -> None:
    first = ov.Type.f32, [-1, 2, 32, 64], [-1, 2, 32, 64]
    second = ov.Type.f32, [-1, 4, 32, 64], [-1, 4, 32, 64]
    for layers, heads in (((first, first), 2), ((first, second), None)):
        facts = adapter.cache_facts(of_layers(*layers), rotary="half", rotary_dim=64)
        assert facts.total_kv_heads == heads


def test_models_without_paged_attention_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="Apply paged_attention_transformation"):
        adapter.cache_inputs(SimpleNamespace(inputs=[]))


def test_facts() -> None:
    facts = adapter.cache_facts(compiled(tiny(), "u8"), rotary="half", rotary_dim=64)
    assert (facts.num_layers, facts.total_kv_heads, facts.lossy) == (4, 2, "u8_zero")
    exact = adapter.cache_facts(
        compiled(tiny(), "f32"), rotary="half", rotary_dim=64, version="2026.4.1"
    )
    assert (exact.engine, exact.lossy, exact.window) == ("openvino 2026.4.1", None, 0)
    sizes = {"rotary": "interleaved", "rotary_dim": 32}
    windows = adapter.cache_facts(compiled(tiny(), "f32"), **sizes, window=16, fingerprint="f")
    assert (windows.window, windows.fingerprint) == (16, "f")
    assert (windows.rotary, windows.rotary_dim, windows.lossy) == ("interleaved", 32, None)


def test_the_page() -> None:
    source = prefilled(100).view()
    names = Document("openvino.md").run({"source": source, "compiled": compiled(tiny(), "f32")})
    assert verify(source, names["view"].at([[5, 2, 7, 0]]), [99]).ok


# ---- ways out ----


def viewed(engine: Live, pools: Any) -> None:
    adapter.cache_view(engine.compiled, pools, engine.view().view.facts, requests=())


def with_another_tensor(*, described: bool) -> None:
    """A request is given other memory than the pool that was described."""
    engine, dst = Live(tiny()), HF(tiny())
    dst.reserve(4)
    engine.prefill(tiny_model.prompt(4))
    other = np.zeros_like(engine.pools["value_cache.3"])
    engine._request.set_tensor("value_cache.3", ov.Tensor(other, shared_memory=True))
    src = engine.view()
    if described:
        pools = {name: engine._request.get_tensor(name).data for name in engine.pools}
        facts, requests = src.view.facts, [engine._request]
        view = adapter.cache_view(engine.compiled, pools, facts, requests=requests)
        src = view.at([engine.blocks])
    migrate(src, dst.view(), [4])


def span_of_the_last_run(*, again: bool) -> None:
    engine, dst = Live(tiny()), HF(tiny())
    dst.reserve(5)
    engine.prefill(tiny_model.prompt(5))
    span = adapter.span(engine.view().view, engine._request)
    engine.decode(1, after=3)
    if again:
        span = adapter.span(engine.view().view, engine._request)
    migrate(span, dst.view(), [5])


WAYS_OUT = [
    WayOut(
        "Apply paged_attention_transformation before compile_model",
        lambda: adapter.cache_inputs(SimpleNamespace(inputs=[])),
        lambda: adapter.cache_inputs(compiled(tiny(), "f32")),
    ),
    WayOut(
        "expected one of f32, f16, bf16, u8. Compile the model with such a KV_CACHE_PRECISION",
        lambda: adapter.cache_inputs(model_of(ov.Type.u4, [-1, 2, 32, 64])),
        lambda: [adapter.cache_inputs(compiled(tiny(), name)) for name in ("f32", "f16", "u8")],
    ),
    WayOut(
        "expected one for each cache input of the model. See reserve",
        lambda: viewed(Live(tiny()), {}),
        lambda: viewed(Live(tiny()), adapter.reserve(Live(tiny()).compiled, 4)),
    ),
    WayOut(
        "Call cache_view with the memory of its tensors",
        lambda: with_another_tensor(described=False),
        lambda: with_another_tensor(described=True),
    ),
    WayOut(
        "it has run again, or will. Make a span after the run",
        lambda: span_of_the_last_run(again=False),
        lambda: span_of_the_last_run(again=True),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)
