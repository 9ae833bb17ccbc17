"""ModelRecord and the rotary parameters in it."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from kvx_core import ModelRecord
from kvx_core.model.record import without_rope
from kvx_core.model.rope import as_applied, standard_rope

ROPE = {"": {"rope_type": "default", "rope_theta": 10000.0}}
RECORD = ModelRecord(files="f", architecture="llama", rope=ROPE)
OTHER: dict[str, Any] = {
    "files": "g",
    "architecture": "qwen3",
    "rope": {"": {"rope_type": "default", "rope_theta": 20000.0}},
    "latent": True,
    "weights": "dummy",
    "quantization": {"method": "fp8"},
    "overrides": {"rms_norm_eps": 1e-3},
    "adapters": ("a",),
    "multimodal": ("0a",),
    "salts": {"engine": "vllm 1"},
}


def test_every_field_counts() -> None:
    assert {field.name for field in fields(ModelRecord)} == set(OTHER)
    found = {replace(RECORD, **{name: value}).fingerprint for name, value in OTHER.items()}
    assert len(found | {RECORD.fingerprint}) == len(OTHER) + 1


def test_the_order_of_keys_does_not_matter() -> None:
    turned = {"": dict(reversed(ROPE[""].items()))}
    assert replace(RECORD, rope=turned).fingerprint == RECORD.fingerprint
    assert len(RECORD.fingerprint) == 64


def test_integers_are_the_floats_that_they_are_equal_to() -> None:
    one, other = (replace(RECORD, overrides={"a": {"b": [n]}}) for n in (2, 2.0))
    assert one.fingerprint == other.fingerprint
    assert replace(RECORD, overrides={"a": {"b": [True]}}).fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"rope_theta": None, "rope_scaling": None}, {}),
        ({"rope_theta": 10000}, ROPE),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}, ROPE),
        ({"rope_parameters": {"a": {"rope_theta": 1e4}, "b": {"rope_theta": 10000}}}, ROPE),
        (
            {"rope_parameters": {"a": {"rope_theta": 1e4}, "b": {"rope_theta": 1e6}, "c": None}},
            {
                "a": {"rope_type": "default", "rope_theta": 1e4},
                "b": {"rope_type": "default", "rope_theta": 1e6},
            },
        ),
        (
            {
                "rope_theta": 1,
                "rope_scaling": {"type": "yarn", "factor": 4},
                "max_position_embeddings": 9,
            },
            {
                "": {
                    "rope_type": "yarn",
                    "rope_theta": 1.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 9.0,
                }
            },
        ),
        (  # sections of positions that a text token has alike
            {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}},
            {"": ROPE[""] | {"mrope_section": [2.0, 3.0]}},
        ),
        ({"rope_parameters": [1]}, {"": {"rope_type": "[1]"}}),
        ({"rope_scaling": {"type": ["a"]}}, {"": {"rope_type": "['a']"}}),
    ],
)
def test_rope_in_one_way(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert standard_rope(config) == expected


LENGTH = "original_max_position_embeddings"


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
@pytest.mark.parametrize(
    ("in_config", "in_parameters", "alone", "nested"),
    [(7, 8, 7, 8), (7, None, 7, 9), (None, 8, 8, 8), (None, None, 9, 9)],
)
def test_the_length_that_a_model_was_first_trained_for(
    kind: str, in_config: int | None, in_parameters: int | None, alone: int, nested: int
) -> None:
    """The config's own is before that of parameters of all layers, and after none of a type's."""
    config = {"max_position_embeddings": 9, LENGTH: in_config}
    rope = {"rope_type": kind, "rope_theta": 1e4, LENGTH: in_parameters}
    other = {"rope_type": "default", "rope_theta": 1.0}
    assert standard_rope(config | {"rope_parameters": rope})[""][LENGTH] == alone
    found = standard_rope(config | {"rope_parameters": {"a": rope, "b": other}})
    assert found["a"][LENGTH] == nested
    assert LENGTH not in found["b"]


LONG = standard_rope(
    {
        "rope_theta": 1e4,
        "rope_scaling": {"type": "longrope", "short_factor": [1, 2], "long_factor": [3, 4]},
        "original_max_position_embeddings": 256,
    }
)


def test_one_of_longropes_lists_is_applied() -> None:
    short, still, long = (
        as_applied(LONG, num_tokens=n, max_position_embeddings=1024)[""] for n in (1, 256, 257)
    )
    scaling = math.sqrt(1 + math.log(4) / math.log(256))
    assert short == still
    assert short == {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factors": [1.0, 2.0],
        "scaling": scaling,
    }
    assert long == short | {"factors": [3.0, 4.0]}
    (within,) = as_applied(LONG, num_tokens=1, max_position_embeddings=256).values()
    assert within["scaling"] == 1.0


def test_each_engine_scales_longrope_in_its_way() -> None:
    def scaling(is_transformers: bool, **more: float) -> float:
        found = {"": LONG[""] | more}
        applied = as_applied(
            found, num_tokens=300, max_position_embeddings=1024, is_transformers=is_transformers
        )
        return float(applied[""]["scaling"])

    assert scaling(True) == scaling(False)
    assert scaling(True, attention_factor=1.5) == 1.5
    assert scaling(False, attention_factor=1.5) == scaling(False)
    assert scaling(False, long_mscale=1.25, short_mscale=2.0) == 1.25
    assert scaling(True, long_mscale=1.25, short_mscale=2.0) == scaling(True)
    assert scaling(True, factor=4.0) == scaling(True)
    assert scaling(True, factor=8.0) > scaling(False, factor=8.0) == scaling(False)


def test_dynamic_rope_depends_on_the_length_of_the_config() -> None:
    dynamic = standard_rope({"rope_theta": 1, "rope_scaling": {"type": "dynamic", "factor": 2}})
    first, second = (
        as_applied(dynamic, num_tokens=9, max_position_embeddings=n) for n in (128, 256)
    )
    assert first != second


def test_overrides_are_told_without_rope() -> None:
    config = {
        "rope_theta": 1.0,
        "rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5},
        "text_config": {"rope_scaling": None, "layers": 2},
        "dtype": "float16",
        "hidden": 3,
    }
    assert without_rope(config) == {
        "partial_rotary_factor": 0.5,
        "text_config": {"layers": 2.0},
        "hidden": 3.0,
    }
