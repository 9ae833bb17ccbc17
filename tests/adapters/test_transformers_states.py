"""kvx_adapters.transformers on hybrid models: states and tokens of one cache in another."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from kvx_adapters import transformers as hf
from kvx_core import (
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    Plane,
    UnsupportedError,
    migrate,
    verify,
)
from kvx_core.model.recurrent import recurrent_state
from tests.documents import Document
from tests.hybrid_models import FAMILIES, hybrid_model, prompt

every_family = pytest.mark.parametrize("family", FAMILIES)
ROWS, LENGTH, CUT = 2, 30, 20


def made(family: str, kind: str = "dynamic") -> Any:
    config = hybrid_model(family).config
    if kind == "static":
        return transformers.StaticCache(config=config, max_cache_len=40)
    return transformers.DynamicCache(config=config)


def prefilled(family: str, tokens: torch.Tensor, kind: str = "dynamic", **given: Any) -> Any:
    found = made(family, kind)
    with torch.inference_mode():
        hybrid_model(family)(input_ids=tokens, past_key_values=found, **given)
    return found


def reserved(family: str, num_tokens: int = CUT, kind: str = "dynamic", rows: int = ROWS) -> Any:
    found = made(family, kind)
    hf.reserve(found, hybrid_model(family), batch_size=rows, num_tokens=num_tokens)
    return found


@cache
def facts(family: str) -> Any:
    model = hybrid_model(family)
    latent = family == "KimiLinear"  # whose keys turn in their last dims, which is not known
    return hf.cache_facts(model, fingerprint=family, allow_unknown=latent)


def view(family: str, found: Any) -> CacheView:
    return hf.hybrid_view(found, hybrid_model(family), facts(family))


def logits(family: str, found: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of tokens that go on from a cache, one at a time."""
    with torch.inference_mode():
        each = [
            hybrid_model(family)(input_ids=tokens[:, i : i + 1], past_key_values=found).logits
            for i in range(tokens.shape[1])
        ]
    return torch.cat(each, 1)


@pytest.mark.parametrize("kinds", [("dynamic", "static"), ("static", "dynamic")], ids="-".join)
@every_family
def test_a_conversation_goes_on_in_another_cache(family: str, kinds: tuple[str, str]) -> None:
    tokens = prompt(ROWS, LENGTH)
    src = prefilled(family, tokens[:, :CUT], kinds[0])
    dst = reserved(family, kind=kinds[1])
    migrate(view(family, src), view(family, dst), [CUT] * ROWS)
    assert verify(view(family, src), view(family, dst), [CUT] * ROWS)
    went_on = logits(family, dst, tokens[:, CUT:])
    torch.testing.assert_close(went_on, logits(family, src, tokens[:, CUT:]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["Qwen3Next", "GraniteMoeHybrid", "Lfm2", "Jamba"])
def test_the_state_matters(family: str) -> None:
    """Controls of the test above: zero, that of one token less, and of another prompt differ."""
    tokens, others = prompt(1, LENGTH), prompt(1, LENGTH, seed=1)
    src = prefilled(family, tokens[:, :CUT])
    expected = logits(family, prefilled(family, tokens[:, :CUT]), tokens[:, CUT:])
    for states in (
        reserved(family, rows=1),
        prefilled(family, tokens[:, : CUT - 1]),
        prefilled(family, others[:, :CUT]),
    ):
        dst = reserved(family, rows=1)
        migrate(view(family, src), view(family, dst), [CUT])
        for layer, of_state in zip(dst.layers, states.layers, strict=True):
            for name in ("conv_states", "recurrent_states"):
                for i, tensor in getattr(of_state, name, {}).items():
                    if tensor is not None:
                        getattr(layer, name)[i].copy_(tensor)
        assert (logits(family, dst, tokens[:, CUT:]) - expected).abs().max() > 1e-3


def test_a_padded_batch() -> None:
    """A state has no padding: rows of 20 and 13 tokens go to caches of their own."""
    family, lengths = "Qwen3Next", [CUT, 13]
    tokens = prompt(ROWS, LENGTH)
    mask = torch.ones(ROWS, CUT, dtype=torch.int64)
    mask[1, : CUT - 13] = 0
    padded = tokens[:, :CUT].clone()
    padded[1] = padded[1].roll(CUT - 13)
    padded[1, : CUT - 13] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    src = prefilled(family, padded, attention_mask=mask, position_ids=positions)
    span, lens = hf.padded_span(view(family, src), mask)
    dst = reserved(family)
    whole = view(family, dst)
    with pytest.raises(FactsMismatchError, match="stand for 20 tokens at the destination"):
        migrate(span, whole, lens)
    for row, length in enumerate(lengths):
        begin, model = CUT - length, hybrid_model(family)
        at = {"block_table": [[row]], "starts": [begin], "first_positions": [-begin]}
        with pytest.raises(InvalidArgumentError, match="a table does not say where the state"):
            migrate(view(family, src).at(**at), whole, [length])
        one = hf.hybrid_view(src, model, facts(family), rows=[row])
        one = replace(one, state_tokens=[length])
        dst = reserved(family, length, rows=1)
        migrate(one.at(**at), view(family, dst), [length])
        unpadded = prefilled(family, tokens[row : row + 1, :length])
        assert verify(view(family, unpadded), view(family, dst), [length], tolerance=1e-3)
    assert span.view.state_tokens == lengths


def test_a_state_is_never_cut() -> None:
    family = "Lfm2"
    src, dst = prefilled(family, prompt(1, 9)), reserved(family, 8, rows=1)
    with pytest.raises(FactsMismatchError, match="sequence 0 stand for 9 tokens at the source"):
        migrate(view(family, src), view(family, dst), [8])


def test_a_view_counts_as_the_cache_goes_on() -> None:
    """States are changed in place: the view's number of tokens is asked anew."""
    family = "Jamba"
    src, dst = prefilled(family, prompt(1, 9), "static"), reserved(family, 10, rows=1)
    seen = view(family, src)
    with torch.inference_mode():
        hybrid_model(family)(input_ids=prompt(1, 1), past_key_values=src)
    with pytest.raises(FactsMismatchError, match="stand for 10 tokens at the source"):
        migrate(seen, hf.hybrid_view(dst, hybrid_model(family), facts(family)), [9])
    migrate(seen, view(family, dst), [10])
    assert verify(view(family, src), view(family, dst), [10])


def test_a_model_without_attention() -> None:
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2, conv_kernel=4
    )
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(config).eval()
    with torch.inference_mode():
        caches = [
            model(input_ids=prompt(1, 9, seed=i), use_cache=True).cache_params for i in range(2)
        ]
    same = facts("Jamba")
    views = [hf.state_view(one, model, same, num_tokens=9) for one in caches]
    assert not verify(*views, [9])
    migrate(*views, [9])
    assert verify(*views, [9])
    for a, b in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(a.recurrent_states[0], b.recurrent_states[0])
        assert torch.equal(a.conv_states[0][..., 1:], b.conv_states[0][..., 1:])


class TestRefusals:
    """Each names the layer and the way out."""

    def test_an_empty_cache(self) -> None:
        with pytest.raises(InvalidArgumentError, match=r"Call\s+reserve\(cache"):
            view("Qwen3Next", made("Qwen3Next"))

    def test_drafts(self) -> None:
        found = prefilled("Qwen3Next", prompt(1, 5))
        found.layers[0].record_past = True
        with pytest.raises(UnsupportedError, match=r"layers\[0\].record_past is True"):
            view("Qwen3Next", found)

    def test_several_states_of_a_layer(self) -> None:
        found = prefilled("Qwen3Next", prompt(1, 5))
        found.layers[1].number_of_states = 2
        with pytest.raises(UnsupportedError, match=r"layers\[1\] has 2 states, expected one"):
            view("Qwen3Next", found)

    def test_a_cache_view_says_where_to_go(self) -> None:
        found = prefilled("Qwen3Next", prompt(1, 5))
        with pytest.raises(UnsupportedError, match=r"of the whole sequence\. Call hybrid_view"):
            hf.cache_view(found, facts("Qwen3Next"))

    def test_states_in_new_tensors(self) -> None:
        found = prefilled("Qwen3Next", prompt(2, 5))
        seen = view("Qwen3Next", found)
        found.layers[0].reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(InvalidArgumentError, match="in new tensors"):
            migrate(seen, view("Qwen3Next", reserved("Qwen3Next", 5)), [5, 5])

    def test_room_is_made_once(self) -> None:
        found = reserved("Qwen3Next")
        with pytest.raises(InvalidArgumentError, match="has a state already, expected none"):
            hf.reserve(found, hybrid_model("Qwen3Next"), batch_size=1, num_tokens=3)

    def test_room_in_a_cache_without_layers(self) -> None:
        with pytest.raises(InvalidArgumentError, match=r"Make it with config=model\.config"):
            hf.reserve(
                transformers.DynamicCache(), hybrid_model("Lfm2"), batch_size=1, num_tokens=3
            )


def test_the_page() -> None:
    """Its first piece of code: from one cache to another."""
    family = "Qwen3Next"
    model, other = hybrid_model(family), made(family)
    names = {"hf": hf, "migrate": migrate, "model": model, "facts": facts(family)}
    names |= {"cache": prefilled(family, prompt(1, CUT)), "other_cache": other}
    Document("hybrid.md").run(names, Document("hybrid.md").snippets()[0])
    assert verify(view(family, names["cache"]), view(family, other), [CUT])


def test_the_page_on_ranks() -> None:
    config = hybrid_model("Qwen3Next").config
    names = {
        "Plane": Plane,
        "config": config,
        "recurrent_state": recurrent_state,
        "tensor": torch.zeros(5, 3, 48),
    }
    found = Document("hybrid.md").run(names, Document("hybrid.md").snippets()[1])
    plane = (found or names)["conv"]
    assert [part.begin for part in plane.state.held()] == [8, 8, 32]
