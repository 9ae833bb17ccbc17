"""kvx_adapters.llama_cpp against llama.cpp v0.5.0 itself, whose cache is read and written in place.

The tiny model runs in float32 beside transformers: the keys and values that one computes go on in
the other.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from kvx_adapters import llama_cpp
from kvx_adapters import transformers as hf
from kvx_adapters.cli.engines import llama_cpp_library
from kvx_adapters.cli.engines.live_llama_cpp import Context
from kvx_adapters.cli.engines.live_transformers import Live as HF
from kvx_core import (
    CacheFacts,
    CacheSpan,
    DType,
    FactsMismatchError,
    InvalidArgumentError,
    UnsupportedError,
    migrate,
    verify,
)
from tests import ggml
from tests.engines import tiny_model, windows_model
from tests.engines.engine import FINGERPRINT
from tests.engines.live import hop, live
from tests.engines.tiny_model import tiny
from tests.engines.windows_model import windowed
from tests.ways_out import WayOut, leads_out

COUNT = 12
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "Q5_0", "Q5_1")
# Largest error of a value of layer 0 that was stored and taken out, of values up to 6.
ERROR = {"Q8_0": 0.05, "Q5_0": 0.4, "Q5_1": 0.4, "Q4_0": 0.8, "Q4_1": 0.8, "IQ4_NL": 0.8}


def prefilled(num_tokens: int) -> HF:
    """All but the last token of a prompt, in transformers."""
    found = HF(tiny())
    found.prefill(tiny_model.prompt(num_tokens)[:-1])
    return found


def interleaved(keys: Tensor) -> Tensor:
    """Half order to interleaved order, along the last axis."""
    return keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def rows(context: Context, kv: str, layer: int = 0) -> np.ndarray:
    """The bytes of the cells of sequence 0, [token, bytes], V not transposed."""
    owner = getattr(context.cache().layers[layer], kv).owner
    stored = np.ascontiguousarray(owner[0]).view(np.uint8)
    return stored[context.cells[0]].reshape(len(context.cells[0]), -1)


def are_at(home: HF, context: Context, cells: list[int]) -> bool:
    """Whether token t of transformers' cache is in cell cells[t], bit by bit.

    The order does not show in an answer: attention over rotated keys is the same in any order.
    """
    for layer, there in zip(home.cache.layers, context.cache().layers, strict=True):
        for tokens, stored in ((interleaved(layer.keys), there.k), (layer.values, there.v)):
            assert stored is not None
            lying = np.asarray(stored.owner).reshape(-1, *stored.shape[2:])[cells]
            if not np.array_equal(tokens[0].transpose(0, 1).numpy(), lying):
                return False
    return True


def test_libraries_are_those_that_are_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(work: Path) -> None:
        (work / "other.tgz").write_bytes(b"other")

    monkeypatch.setattr(llama_cpp_library, "_pack", pack)
    with pytest.raises(RuntimeError, match=r"has the sha512 .*, expected 5uCC"):
        llama_cpp_library.install(tmp_path / "llama.cpp")
    assert not list(tmp_path.iterdir())


# ---- prefill here, continue there ----


@pytest.mark.parametrize("num_tokens", [7, 40, 150])
def test_a_prompt_goes_on_in_the_other_engine(num_tokens: int) -> None:
    """Both ways, with llama.cpp alone and zero keys and values beside."""
    prompt = tiny_model.prompt(num_tokens)
    wanted = list(tiny_model.greedy(num_tokens, COUNT))
    alone, control = live("llama_cpp"), live("llama_cpp")
    alone.prefill(prompt[:-1])
    there = live("llama_cpp")
    hop(prefilled(num_tokens), there)
    back = live("transformers")
    hop(alone, back)
    control.reserve(num_tokens - 1)
    after = prompt[-1]
    assert alone.decode(COUNT, after=after) == wanted
    assert there.decode(COUNT, after=after) == wanted
    assert back.decode(COUNT, after=after) == wanted
    assert control.decode(COUNT, after=after) != wanted
    assert there.lengths == back.lengths == [num_tokens - 1 + COUNT]


def test_there_and_back_changes_no_bit() -> None:
    """Into interleaved dims and a transposed V, and home."""
    home = prefilled(30)
    there, back = live("llama_cpp"), live("transformers")
    hop(home, there)
    hop(there, back)
    assert verify(home.view(), back.view(), home.lengths).ok
    assert isinstance(back, HF)
    for held, wanted in zip(back.cache.layers, home.cache.layers, strict=True):
        assert torch.equal(held.keys, wanted.keys)
        assert torch.equal(held.values, wanted.values)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("flash_attention", [False, True])
def test_each_layout(architecture: Any, dtype: str, flash_attention: bool) -> None:
    """Every number that arrives is what its type rounds it to, in llama.cpp's own memory."""
    home = prefilled(20)
    there = Context(
        tiny(),
        architecture=architecture,
        k_dtype=dtype,
        v_dtype=dtype,
        flash_attention=flash_attention,
    )
    there.run([0] * 19)
    assert there.v_transposed is not flash_attention
    assert there.facts().rotary == ("interleaved" if architecture == "llama" else "half")
    migrate(home.view(), there.span(), [19])
    kind = getattr(torch, DType[dtype].array_name)
    for i, layer in enumerate(home.cache.layers):
        keys = interleaved(layer.keys) if architecture == "llama" else layer.keys
        for kv, wanted in (("k", keys), ("v", layer.values)):
            tokens = wanted[0].transpose(0, 1).to(kind).contiguous()
            assert rows(there, kv, i).tobytes() == tokens.view(torch.uint8).numpy().tobytes()
    wanted = there.decode(4, after=tiny_model.prompt(20)[-1])
    if dtype != "BF16":  # whose rounding of a random model's keys changes tokens
        assert wanted == list(tiny_model.greedy(20, 4))


def test_dims_that_do_not_rotate_stay_where_they_are() -> None:
    """As in a model whose rope.dimension_count is less than head_dim."""
    home, there = prefilled(7), Context(tiny())
    there.run([0] * 6)
    src, dst = home.view(), there.span()
    ends = [
        replace(end, view=replace(end.view, facts=replace(end.view.facts, rotary_dim=32)))
        for end in (src, dst)
    ]
    migrate(*ends, [6])
    keys = home.cache.layers[0].keys[0].transpose(0, 1)
    wanted = torch.cat([interleaved(keys[..., :32]), keys[..., 32:]], dim=-1).contiguous()
    assert rows(there, "k").tobytes() == wanted.numpy().tobytes()


# ---- several sequences ----


@pytest.mark.parametrize("unified", [True, False])
def test_scattered_cells_and_streams(unified: bool) -> None:
    """The cells of a sequence are neither in order nor adjacent, or in another stream."""
    context = Context(tiny(), num_sequences=3, unified=unified)
    for sequence, tokens in ((0, [1] * 5), (1, [2] * 4), (0, [3]), (1, [4]), (0, [5])):
        context.run(tokens, sequence)
    context.remove(0)
    prompt = tiny_model.prompt(13)
    context.run(prompt[:-1], 2)
    cells = context.cells[2]
    assert cells != list(range(cells[0], cells[0] + 12)) if unified else cells[0] >= 2 * 256
    assert context.cache().layers[0].num_blocks == (1 if unified else 3)
    home = HF(tiny())
    home.reserve(12)
    migrate(context.span(2), home.view(), [12])
    assert are_at(home, context, cells)
    assert home.decode(COUNT, after=prompt[-1]) == list(tiny_model.greedy(13, COUNT))
    # And into scattered cells, beside a sequence that must stay as it is.
    before = context.state(1)
    source = prefilled(13)
    migrate(source.view(), context.span(2), [12])
    assert are_at(source, context, cells)
    assert context.decode(COUNT, after=prompt[-1], sequence=2) == list(tiny_model.greedy(13, COUNT))
    assert context.state(1) == before


# ---- sliding windows ----


def groups(cache: Any, context: Context, num_tokens: int) -> list[tuple[CacheSpan, CacheSpan, int]]:
    """The layers with windows, then the others: their last tokens in transformers and in llama.cpp,
    and how many."""
    facts = CacheFacts(
        fingerprint=FINGERPRINT, rotary="half", rotary_dim=64, rope_applied=True, hadamard=False
    )
    facts = replace(facts, scale_convention="multiply", total_kv_heads=2, first_kv_head=0)
    found = []
    for group in hf.layer_groups(cache, facts):
        first, last = group.layers[0], group.layers[-1]
        window = {"num_layers": len(group.layers), "first_layer": first, "window": group.window}
        view = context.cache(slice(first, last + 1), **window)
        cells = (context.cells if group.window else context.full_cells)[0]
        there = view.at(slots=cells[group.first_token :])
        found.append((group.span(), there, group.num_tokens))
        assert group.end == num_tokens == len(cells)
    return found


@pytest.mark.parametrize("num_tokens", [9, 40])
def test_sliding_windows(num_tokens: int) -> None:
    """A context has a cache for windows and one for full attention: each is a view of its own."""
    like = windows_model.model()
    prompt = tiny_model.prompt(num_tokens + 1)
    home, back = (transformers.DynamicCache(config=like.config) for _ in range(2))
    with torch.inference_mode():
        like(input_ids=torch.tensor([prompt[:-1]]), past_key_values=home)
        ids = torch.tensor([prompt])
        wanted = like.generate(ids, max_new_tokens=COUNT, do_sample=False)[0, num_tokens + 1 :]
    there, zeros, alone = (Context(windowed(), architecture="olmo2") for _ in range(3))
    for context in (there, zeros):
        context.run([0] * num_tokens)
    alone.run(prompt[:-1])
    for src, dst, count in groups(home, there, num_tokens):
        migrate(src, dst, [count])
        assert verify(src, dst, [count]).ok
    for i, layer in enumerate(home.layers):  # each token, in its place
        cells = (there.full_cells if i == 3 else there.cells)[0][-layer.keys.shape[2] :]
        for tokens, name in ((layer.keys, "k"), (layer.values, "v")):
            stored = np.asarray(getattr(there.cache().layers[i], name).owner)[0, cells]
            assert np.array_equal(tokens[0].transpose(0, 1).numpy(), stored)
    hf.reserve(back, like, batch_size=1, num_tokens=num_tokens)
    for dst, src, count in groups(back, alone, num_tokens):
        migrate(src, dst, [count])
    after = prompt[-1]
    assert there.decode(COUNT, after=after) == wanted.tolist()
    assert alone.decode(COUNT, after=after) == wanted.tolist()
    assert zeros.decode(COUNT, after=after) != wanted.tolist()
    with torch.inference_mode():
        got = like.generate(ids, past_key_values=back, max_new_tokens=COUNT, do_sample=False)
    assert torch.equal(got[0, num_tokens + 1 :], wanted)


def test_the_state_of_two_caches() -> None:
    """Full attention first, with all tokens; of the windows only what they still see."""
    context = Context(windowed(), architecture="olmo2")
    context.run(tiny_model.prompt(40))
    assert context.facts().window == windows_model.WINDOW
    assert Context(tiny()).facts().window == 0
    state = llama_cpp.State.read(context.state(), num_kv_heads=2, num_caches=2)
    full, windows = state.caches
    assert (len(full.layers), len(windows.layers)) == (1, 3)
    assert full.positions.tolist() == list(range(40))
    assert windows.positions.tolist() == list(range(40 - windows_model.WINDOW, 40))
    own = {"num_layers": 3, "first_layer": 0}
    span = context.cache(slice(0, 3), **own).at(slots=context.cells[0][-windows_model.WINDOW :])
    assert verify(span, windows.span(context.facts(**own)), [windows_model.WINDOW]).ok
    with pytest.raises(InvalidArgumentError, match=r"behind the state's end .*num_caches=2"):
        llama_cpp.State.read(context.state(), num_kv_heads=2)


# ---- quantized caches ----


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_caches(dtype: str) -> None:
    """From a float32 context into a quantized one: the bytes that llama.cpp itself stores there."""
    prompt = tiny_model.prompt(25)[:-1]
    plain = Context(tiny(), flash_attention=True)
    own, there = (
        Context(tiny(), k_dtype=dtype, v_dtype=dtype, flash_attention=True) for _ in range(2)
    )
    plain.run(prompt)
    own.run(prompt)
    there.run([0] * 24)
    facts = there.facts()
    assert (facts.hadamard, facts.lossy) == (True, dtype.lower())
    assert there.rotation == llama_cpp.Rotation(64, 64)
    moved = llama_cpp.migrate_rotated(plain.span(), there.span(), [24], there.rotation)
    unit = DType[dtype]
    assert moved == 24 * 4 * 2 * 128 // unit.numbers * unit.itemsize
    for kv in "kv":  # layer 0 depends on nothing that was quantized before
        # ggml multiplies by the matrix, KVX adds and subtracts: a tie may fall on either side.
        assert (rows(own, kv) != rows(there, kv)).mean() < 0.002
    found = llama_cpp.unrotated(there.span(), [24], there.rotation)
    assert (found.facts.hadamard, found.facts.lossy) == (False, dtype.lower())
    wanted = plain.cache().layers[0].k.owner[0, plain.cells[0]].swapaxes(0, 1)
    error = np.abs(found.layers[0].k.owner[0] - wanted).max()
    assert error < ERROR[dtype]
    # Into transformers: dequantized, no rotation, K in half order.
    home = HF(tiny())
    home.reserve(24)
    migrate(found, home.view(), [24])
    keys = interleaved(home.cache.layers[0].keys[0]).numpy()
    assert np.array_equal(keys, found.layers[0].k.owner[0])


def test_a_rotation_is_never_copied_as_if_there_were_none() -> None:
    context = Context(tiny(), k_dtype="Q8_0", v_dtype="Q8_0", flash_attention=True)
    context.run([0] * 6)
    before = context.state()
    with pytest.raises(FactsMismatchError, match="hadamard is False at the source"):
        migrate(prefilled(7).view(), context.span(), [6])
    assert context.state() == before


def test_k_alone_may_be_rotated() -> None:
    """Both caches are rotated, and not alike: each would read the other's numbers as its own."""
    own = {"flash_attention": True}
    k_only = Context(tiny(), k_dtype="Q8_0", **own)
    others = [Context(tiny(), k_dtype=k, v_dtype="Q8_0", **own) for k in ("F32", "Q8_0")]
    prompt = tiny_model.prompt(9)
    for context in (k_only, *others):
        context.run(prompt)
    facts = k_only.facts()
    assert (facts.hadamard, facts.hadamard_k, facts.hadamard_v) == (True, 64, 0)
    for context in others:
        before = context.state()
        with pytest.raises(FactsMismatchError, match="hadamard_v is 0 at the source"):
            migrate(k_only.span(), context.span(), [9])
        assert context.state() == before
    # On its way V is rotated: then both ends mean the same.
    migrate(k_only.span(), others[1].span(), [9], hadamard_v=64)
    assert np.array_equal(rows(others[1], "k"), rows(k_only, "k"))
    v, want = (
        llama_cpp.unrotated(c.span(), [9], c.rotation).layers[0] for c in (others[1], k_only)
    )
    assert np.abs(v.v.owner - want.v.owner).max() < ERROR["Q8_0"]


def test_a_copy_without_the_rotation_needs_no_fingerprint() -> None:
    """Both ends are of one context."""
    context = Context(tiny(), k_dtype="Q8_0", v_dtype="Q8_0", flash_attention=True)
    context.run(tiny_model.prompt(6))
    span = context.span()
    nameless = replace(
        span, view=replace(span.view, facts=replace(span.view.facts, fingerprint=None))
    )
    copies = [llama_cpp.unrotated(each, [6], context.rotation) for each in (span, nameless)]
    assert np.array_equal(*(copy.layers[0].k.owner for copy in copies))


def test_a_rotation_that_is_not_that_of_the_cache_is_refused() -> None:
    context = Context(tiny())
    context.run([0] * 6)
    span, rotated = context.span(), llama_cpp.Rotation(64, 64)
    error = r"\.view\.facts\.hadamard is False and rotation is Rotation\(k=64"
    with pytest.raises(InvalidArgumentError, match="src" + error):
        llama_cpp.unrotated(span, [6], rotated)
    with pytest.raises(InvalidArgumentError, match="dst" + error):
        llama_cpp.migrate_rotated(span, span, [6], rotated)
    view = replace(context.cache(), facts=context.facts(hadamard=None))
    with pytest.raises(InvalidArgumentError, match=r"facts\.hadamard is None and rotation is"):
        llama_cpp.unrotated(view.at(slots=[0]), [1], context.rotation)
    quantized = Context(tiny(), k_dtype="Q8_0", flash_attention=True)
    quantized.run([0] * 6)
    with pytest.raises(InvalidArgumentError, match=r"facts\.hadamard_v is 0 and rotation is"):
        llama_cpp.unrotated(quantized.span(), [6], rotated)
    with pytest.raises(InvalidArgumentError, match=r"facts\.hadamard_k is 64 and rotation is"):
        llama_cpp.unrotated(quantized.span(), [6], llama_cpp.Rotation(32, 0))


def test_which_caches_are_rotated() -> None:
    def of(k: str, v: str, k_dim: int, v_dim: int, **disabled: bool) -> tuple[int, int]:
        return llama_cpp.rotation(k, v, k_head_dim=k_dim, v_head_dim=v_dim, **disabled)

    assert of("Q8_0", "Q8_0", 128, 128) == (128, 64)
    assert of("Q8_0", "Q8_0", 192, 128) == (64, 64)
    assert of("Q8_0", "F16", 64, 64) == (64, 0)
    assert of("F16", "Q4_0", 64, 64) == (0, 64)
    assert of("Q8_0", "Q8_0", 96, 80) == (0, 0)
    assert of("Q8_0", "Q8_0", 64, 64, disabled=True) == (0, 0)


# ---- facts ----


def facts(**changes: Any) -> Any:
    given = {
        "rope_type": 2,
        "rotary_dim": 64,
        "num_layers": 4,
        "num_kv_heads": 2,
        "k_dtype": "F16",
        "v_dtype": "F16",
        "rotation": llama_cpp.Rotation(0, 0),
    }
    return llama_cpp.cache_facts(**given | changes)


def test_facts() -> None:
    found = facts()
    assert found.engine == "llama.cpp 0.5.0"
    assert (found.rotary, found.rotary_dim, found.rope_applied) == ("half", 64, True)
    assert (found.hadamard, found.lossy, found.window) == (False, None, 0)
    assert (facts(rope_type=-1).rotary, facts(rope_type=-1).rotary_dim) == ("none", 0)
    assert (facts(window=16).window, facts(first_layer=None).first_layer) == (16, None)
    assert facts(first_layer=2).first_layer == 2
    several = facts(rope_type=8)
    assert (several.rotary, several.rotary_dim, several.rope_applied) == (None, None, None)
    mixed = facts(k_dtype="Q8_0", v_dtype="Q4_0", rotation=llama_cpp.Rotation(64, 64))
    assert (mixed.hadamard, mixed.lossy) == (True, "q4_0 and q8_0")


def test_types() -> None:
    for number, name in ((0, "F32"), (30, "BF16"), (8, "Q8_0"), (20, "IQ4_NL")):
        assert llama_cpp.dtype_of(number) is DType[name]
        assert llama_cpp.ggml_type(name) == number
    for number in range(40):
        name = ggml.type_name(number)
        if name in ("f32", "f16", "bf16", "iq4_nl", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"):
            assert llama_cpp.dtype_of(number).name.lower() == name
            continue
        known = f" ({name})" if name.isidentifier() and name != "DEPRECATED" else ""
        told = re.escape(f"type is ggml_type {number}{known}, expected one of f32")
        with pytest.raises(UnsupportedError, match=told):
            llama_cpp.dtype_of(number)
    with pytest.raises(UnsupportedError, match="type is ggml_type 99, expected one of f32"):
        llama_cpp.dtype_of(99)
    with pytest.raises(UnsupportedError, match="dtype is q4_k, expected one of f32"):
        llama_cpp.ggml_type("Q4_K")


def test_v_transposed() -> None:
    assert llama_cpp.v_transposed(5, 5 * 128)
    assert not llama_cpp.v_transposed(5, 5)
    assert llama_cpp.v_transposed(1, 2)
    assert not llama_cpp.v_transposed(1, 1)
    with pytest.raises(InvalidArgumentError, match="num_v_indices is 0, expected"):
        llama_cpp.v_transposed(1, 0)
    with pytest.raises(InvalidArgumentError, match="num_v_indices is 7, expected a multiple of"):
        llama_cpp.v_transposed(5, 7)


# ---- what cannot be described ----


def tensor(dtype: int, numbers: int, cells: int = 4, **changes: Any) -> Any:
    """A ggml_tensor with memory of its own."""
    unit = llama_cpp.dtype_of(dtype) if dtype in (0, 8) else DType.F32
    row = numbers // unit.numbers * unit.itemsize
    memory = np.zeros(row * cells, np.uint8)
    fields = {"type": dtype, "ne": [numbers, cells, 1, 1], "data": memory.ctypes.data}
    nb = [unit.itemsize, row, row * cells, row * cells]
    return SimpleNamespace(**fields | {"nb": nb, "memory": memory} | changes)


@pytest.mark.parametrize(
    ("k", "v", "options", "error"),
    [
        (tensor(12, 128), tensor(0, 128), {}, r"k\.type is ggml_type 12 \(q4_K\)"),
        (tensor(0, 130), tensor(0, 128), {}, r"k\.ne\[0\] is 130, expected num_kv_heads, 4, times"),
        (tensor(8, 96), tensor(8, 96), {}, r"k\.ne\[0\] is 96, .* of whole units of 32 numbers"),
        (tensor(0, 128), tensor(0, 128, data=None), {}, r"v\.data is null, expected the address"),
        (tensor(0, 128, nb=[4, 516, 0, 0]), tensor(0, 128), {}, r"k\.nb\[1\] is 516 bytes, expec"),
        (tensor(0, 128, nb=[4, 512, 4096, 0]), tensor(0, 128), {}, r"k\.nb\[2\] is 4096 bytes"),
        (tensor(0, 128, ne=[128, 0, 1]), tensor(0, 128), {}, r"k\.ne\[1\] is 0"),
        (tensor(8, 128), tensor(8, 128), {"v_transposed": True}, "with flash attention, which a q"),
        (tensor(0, 128), tensor(0, 128), {"num_kv_heads": 0}, "num_kv_heads is 0, expected 1"),
        (tensor(0, 128), tensor(0, 128), {"v_transposed": 1}, "v_transposed is 1, expected True"),
    ],
)
def test_refusals(k: Any, v: Any, options: dict[str, Any], error: str) -> None:
    given = {"num_kv_heads": 4, "v_transposed": False} | options
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=error):
        llama_cpp.cache_desc(k, v, **given)


def test_layers_with_other_numbers_of_heads() -> None:
    """One number of heads, that of layer 0, would cut the vectors of layer 1 into halves."""
    tensors = [(tensor(0, n), tensor(0, n)) for n in (128, 64)]
    options: dict[str, Any] = {"v_transposed": False, "memory": None}
    turning = facts(rotary_dim=32)
    with pytest.raises(InvalidArgumentError, match="gives layers a head_dim of 16 and 32, exp"):
        llama_cpp.cache_view(tensors, turning, num_kv_heads=4, **options)
    view = llama_cpp.cache_view(tensors, turning, num_kv_heads=[4, 2], **options)
    assert [(layer.num_kv_heads, layer.head_dim) for layer in view.layers] == [(4, 32), (2, 32)]
    with pytest.raises(InvalidArgumentError, match="num_kv_heads has 1 numbers, expected 2, on"):
        llama_cpp.cache_view(tensors, turning, num_kv_heads=[4], **options)


def test_a_context_that_is_gone_is_refused() -> None:
    context = Context(tiny())
    context.run([0] * 6)
    span = context.span()
    home = HF(tiny())
    home.reserve(6)
    context.close()
    with pytest.raises(InvalidArgumentError, match="src is out of date: llama_free has freed the"):
        migrate(span, home.view(), [6])


# ---- ways out ----


def described(k: Any, v: Any, *, transposed: bool = False) -> None:
    llama_cpp.cache_desc(k, v, num_kv_heads=4, v_transposed=transposed)


@functools.cache
def held(dtype: str = "F32") -> Context:
    """A context with 6 tokens."""
    context = Context(tiny(), k_dtype=dtype, flash_attention=dtype != "F32")
    context.run([0] * 6)
    return context


@functools.cache
def state(num_tokens: int, *, windows: bool = False) -> bytes:
    """The state of a sequence of so many tokens."""
    context = Context(windowed(), architecture="olmo2") if windows else Context(tiny())
    if num_tokens:
        context.run(tiny_model.prompt(num_tokens))
    return context.state()


def span_of(num_tokens: int) -> None:
    (cells,) = llama_cpp.State.read(state(num_tokens), num_kv_heads=2).caches
    cells.span(held().facts())


F32, WHOLE = tensor(0, 128), llama_cpp.Rotation(64, 64)
WAYS_OUT = [
    WayOut(
        "as k.ne gives them: pass the cache's own tensor, not a view of it (view_src)",
        lambda: described(tensor(0, 128, nb=[4, 1024, 4096, 0]), F32),
        lambda: described(tensor(0, 128), F32),
    ),
    WayOut(
        "make the context with flash attention, which a quantized V needs",
        lambda: described(tensor(8, 128), tensor(8, 128), transposed=True),
        lambda: described(tensor(8, 128), tensor(8, 128)),
    ),
    WayOut(
        "Make the context with one of these as type_k and type_v",
        lambda: described(tensor(12, 128), F32),
        lambda: [described(tensor(number, 128), F32) for number in (0, 8)],
    ),
    WayOut(
        "Take both from the same graph",
        lambda: llama_cpp.v_transposed(5, 7),
        lambda: [llama_cpp.v_transposed(5, n) for n in (5, 5 * 128)],
    ),
    WayOut(
        "expected the same of both. Where nothing is rotated, call kvx_core.migrate",
        lambda: llama_cpp.migrate_rotated(held().span(), held().span(), [6], WHOLE),
        lambda: migrate(held().span(), prefilled(7).view(), [6]),
    ),
    WayOut(
        "expected the same of both. Pass the rotation of that cache",
        lambda: llama_cpp.unrotated(held("Q8_0").span(), [6], WHOLE),
        lambda: llama_cpp.unrotated(held("Q8_0").span(), [6], held("Q8_0").rotation),
    ),
    WayOut(
        "expected a Rotation: call llama_cpp.rotation",
        lambda: facts(rotation=64),
        lambda: facts(
            rotation=llama_cpp.rotation("F16", "Q4_0", k_head_dim=64, v_head_dim=64),
            v_dtype="Q4_0",
        ),
    ),
    WayOut(
        "expected at least one. Take it after llama_decode",
        lambda: span_of(0),
        lambda: span_of(3),
    ),
    WayOut(
        "A model with sliding windows has two caches: num_caches=2",
        lambda: llama_cpp.State.read(state(40, windows=True), num_kv_heads=2),
        lambda: llama_cpp.State.read(state(40, windows=True), num_kv_heads=2, num_caches=2),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)
