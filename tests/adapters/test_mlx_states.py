"""kvx_adapters.mlx on hybrid models: what transformers has computed goes on in mlx-lm, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from kvx_adapters import mlx as adapter
from kvx_adapters import transformers as hf
from kvx_core import (
    BlockTable,
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    Section,
    SlotMapping,
    Snapshot,
    UnsupportedError,
    migrate,
    verify,
)
from tests.hybrid_models import SIZES, hybrid_model, prompt

ROWS, LENGTH, CUT = 2, 30, 20

# What mlx-lm calls otherwise in a model's config.json.
NAMES: dict[str, dict[str, Any]] = {
    "Qwen3Next": {},
    "GraniteMoeHybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "intermediate_size": 64,
        "position_embedding_type": "nope",
    },
    "Lfm2": {
        "full_attn_idxs": [1, 3],
        "block_dim": 64,
        "conv_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
    },
    "FalconH1": {},
    "NemotronH": {},
}
LAYERS = {"NemotronH": [0, 2]}  # the others of its layers have no cache in mlx-lm
every_family = pytest.mark.parametrize("family", NAMES)


@cache
def in_mlx(family: str) -> Any:
    """The weights of hybrid_model in mlx-lm."""
    mx.set_default_device(mx.cpu)
    folder = Path(mkdtemp())
    hybrid_model(family).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = (config.get("rope_parameters") or {}).get("rope_theta", 1e4)
    (folder / "config.json").write_text(json.dumps(config | NAMES[family]))
    return load_model(folder)[0]


def prefilled(family: str, tokens: torch.Tensor) -> Any:
    found = make_prompt_cache(in_mlx(family))
    mx.eval(in_mlx(family)(mx.array(tokens.numpy()), cache=found))
    return found


def reserved(family: str, num_tokens: int = CUT) -> Any:
    found = make_prompt_cache(in_mlx(family))
    adapter.reserve_states(found, in_mlx(family).args, batch_size=ROWS)
    parts = [part for layer in found for part in getattr(layer, "caches", [layer])]
    kv = [part for part in parts if type(part).__name__ == "KVCache"]
    heads = {"num_kv_heads": SIZES["num_key_value_heads"], "head_dim": SIZES["head_dim"]}
    adapter.reserve(kv, batch_size=ROWS, num_tokens=num_tokens, **heads)
    return found


@cache
def facts(family: str) -> Any:
    return hf.cache_facts(hybrid_model(family), fingerprint=family)


def mlx_view(family: str, found: Any) -> CacheView:
    own = adapter.cache_facts(
        rotary=facts(family).rotary,
        rotary_dim=facts(family).rotary_dim,
        num_layers=1,
        num_kv_heads=SIZES["num_key_value_heads"],
        fingerprint=family,
    )
    return adapter.hybrid_view(found, in_mlx(family).args, own, layers=LAYERS.get(family))


def hf_cache(family: str, tokens: torch.Tensor | None = None) -> Any:
    found = transformers.DynamicCache(config=hybrid_model(family).config)
    if tokens is None:
        hf.reserve(found, hybrid_model(family), batch_size=ROWS, num_tokens=CUT)
    else:
        with torch.inference_mode():
            hybrid_model(family)(input_ids=tokens, past_key_values=found)
    return found


def hf_view(family: str, found: Any) -> CacheView:
    return hf.hybrid_view(found, hybrid_model(family), facts(family))


def logits_of(family: str, tokens: torch.Tensor) -> Any:
    """Of the last tokens, computed by transformers at once."""
    with torch.inference_mode():
        return hybrid_model(family)(input_ids=tokens).logits[:, CUT:].numpy()


def step_by_step(step: Any, tokens: torch.Tensor) -> Any:
    each = [np.asarray(step(tokens[:, i : i + 1])) for i in range(CUT, LENGTH)]
    return np.concatenate(each, 1)


def mlx_step(family: str, found: Any, tokens: torch.Tensor) -> Any:
    logits = in_mlx(family)(mx.array(tokens.numpy()), cache=found)
    mx.eval(logits)
    return logits


@every_family
def test_both_engines_compute_the_same_states(family: str) -> None:
    tokens = prompt(ROWS, CUT)
    src, dst = hf_cache(family, tokens), prefilled(family, tokens)
    found = verify(hf_view(family, src), mlx_view(family, dst), [CUT] * ROWS, tolerance=2e-3)
    assert found, str(found)


@every_family
def test_from_transformers_to_mlx(family: str) -> None:
    tokens = prompt(ROWS, LENGTH)
    src, dst = hf_cache(family, tokens[:, :CUT]), reserved(family)
    migrate(hf_view(family, src), mlx_view(family, dst), [CUT] * ROWS)
    assert verify(hf_view(family, src), mlx_view(family, dst), [CUT] * ROWS)
    found = step_by_step(partial(mlx_step, family, dst), tokens)
    np.testing.assert_allclose(found, logits_of(family, tokens), atol=1e-3, rtol=0)


@every_family
def test_from_mlx_to_transformers(family: str) -> None:
    tokens = prompt(ROWS, LENGTH)
    src, dst = prefilled(family, tokens[:, :CUT]), hf_cache(family)
    migrate(mlx_view(family, src), hf_view(family, dst), [CUT] * ROWS)
    with torch.inference_mode():
        found = step_by_step(
            lambda one: hybrid_model(family)(input_ids=one, past_key_values=dst).logits, tokens
        )
    np.testing.assert_allclose(found, logits_of(family, tokens), atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["Qwen3Next", "GraniteMoeHybrid", "Lfm2"])
def test_through_a_file(family: str, tmp_path: Path) -> None:
    """A snapshot of transformers is restored into mlx-lm: files have states in one order."""
    tokens = prompt(ROWS, LENGTH)
    src, dst = hf_cache(family, tokens[:, :CUT]), reserved(family)
    row = 1

    def sections(whole: CacheView, num_tokens: int | None) -> list[Section]:
        recurrent = {plane.layer for plane in whole.planes}
        attention = [i for i in range(4) if i not in recurrent]
        facts = replace(whole.facts, num_layers=4, first_layer=0)
        states = tuple(replace(plane, slots=SlotMapping.of([row])) for plane in whole.planes)
        no_layers = replace(whole, layers=(), planes=states, holds=None, facts=facts)
        kv = replace(whole, planes=(), state_tokens=None, facts=facts)
        return [
            Section(tuple(attention), kv, BlockTable.packed([[row]])),
            Section(tuple(sorted(recurrent)), no_layers, None, state_tokens=num_tokens),
        ]

    with pytest.raises(InvalidArgumentError, match="states of 20 tokens by its engine's own count"):
        Snapshot.capture(tokens[row, :9].tolist(), sections(hf_view(family, src), 9))
    ids = tokens[row, :CUT].tolist()
    found = Snapshot.capture(ids, sections(hf_view(family, src), CUT))
    assert found is not None
    with (tmp_path / "file").open("wb") as file:
        found.save(file)
    read = Snapshot.open(tmp_path / "file").read((0, 1, 2, 3))
    for section in sections(mlx_view(family, dst), None):
        read.restore(section, 0, CUT)
    at = {"block_table": [[row]]}
    same = [
        hf.hybrid_view(src, hybrid_model(family), facts(family), rows=[row]).at(**at),
        replace(
            mlx_view(family, dst),
            planes=tuple(
                replace(plane, slots=SlotMapping.of([row]))
                for plane in mlx_view(family, dst).planes
            ),
        ).at(**at),
    ]
    assert verify(*same, [CUT])


def test_a_transposed_state_goes_wrong() -> None:
    """A control: [V, K] taken for [K, V] is no small thing."""
    family = "Qwen3Next"
    tokens = prompt(ROWS, LENGTH)
    src, dst = hf_cache(family, tokens[:, :CUT]), reserved(family)
    migrate(hf_view(family, src), mlx_view(family, dst), [CUT] * ROWS)
    for layer in dst:
        if type(layer).__name__ == "ArraysCache":
            state = layer.cache[1]
            layer.cache[1] = mx.contiguous(
                state.swapaxes(-1, -2).reshape(state.shape)  # the bytes of the other order
            )
    found = step_by_step(partial(mlx_step, family, dst), tokens)
    assert np.abs(found - logits_of(family, tokens)).max() > 1e-3


def test_a_view_is_out_of_date_after_a_step() -> None:
    family = "Lfm2"
    tokens = prompt(ROWS, LENGTH)
    src = prefilled(family, tokens[:, :CUT])
    seen, to = mlx_view(family, src), hf_view(family, hf_cache(family))
    mlx_step(family, src, tokens[:, CUT : CUT + 1])
    with pytest.raises(InvalidArgumentError, match="src is out of date"):
        migrate(seen, to, [CUT] * ROWS)


def test_a_state_is_never_cut() -> None:
    family = "Lfm2"
    src, dst = prefilled(family, prompt(ROWS, CUT)), hf_cache(family)
    with pytest.raises(FactsMismatchError, match="stand for 20 tokens at the source"):
        migrate(mlx_view(family, src), hf_view(family, dst), [CUT - 1] * ROWS)


class TestRefusals:
    def test_tokens_that_lie_in_a_ring(self) -> None:
        """A view of rows from their first slot on would take them in another order."""
        found = prefilled("Lfm2", prompt(ROWS, 5))
        found[1] = RotatingKVCache(8)
        with pytest.raises(UnsupportedError, match=r"cache\[1\] is a RotatingKVCache, expected KV"):
            mlx_view("Lfm2", found)

    def test_padding(self) -> None:
        found = prefilled("Lfm2", prompt(ROWS, 5))
        found[0].left_padding = mx.array([0, 1])
        with pytest.raises(UnsupportedError, match=r"cache\[0\] has lengths or left_padding"):
            mlx_view("Lfm2", found)

    def test_no_state_yet(self) -> None:
        empty = [ArraysCache(1)]
        with pytest.raises(InvalidArgumentError, match=r"Call reserve_states\(cache, \.\.\.\)"):
            adapter.state_view(empty, in_mlx("Lfm2").args, facts("Lfm2"), num_tokens=1)

    def test_room_is_made_once(self) -> None:
        found = reserved("Lfm2")
        with pytest.raises(InvalidArgumentError, match="or a state already, expected 1"):
            adapter.reserve_states(found, in_mlx("Lfm2").args, batch_size=1)

    def test_states_whose_axes_are_not_known(self) -> None:
        config = {
            "model_type": "kimi_linear",
            "linear_attn_config": {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4},
        }
        with pytest.raises(UnsupportedError, match="states of kda, expected one of gdn, mamba2"):
            adapter.state_view([ArraysCache(4)], config, facts("Lfm2"), num_tokens=1)

    def test_layers_that_are_not_the_caches(self) -> None:
        found = prefilled("NemotronH", prompt(ROWS, 5))
        with pytest.raises(InvalidArgumentError, match=r"layers is .*, expected 2 different"):
            adapter.hybrid_view(
                found, in_mlx("NemotronH").args, facts("NemotronH"), layers=[0, 1, 2, 3]
            )
