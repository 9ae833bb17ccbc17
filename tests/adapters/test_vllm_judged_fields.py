"""Which settings of vLLM matter: all are listed, and engines with other settings share nothing."""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any

import pytest
import torch

from kvx_adapters.vllm import judged_fields
from kvx_adapters.vllm.salts import judgement, salts
from kvx_core.model.config_values import as_json


def test_every_field_of_the_installed_vllm_is_judged() -> None:
    pytest.importorskip("vllm")
    from tests.vllm_matrix.judged_fields import classes, unjudged

    assert len(classes()) == 10
    assert unjudged() == []


def test_a_field_is_in_one_list() -> None:
    lists = (judged_fields.DO_NOT_MATTER, judged_fields.MAPPED, judged_fields.COUNT)
    found = [
        (kind, name)
        for each in lists
        for kind, groups in each.items()
        for names in groups.values()
        for name in names.split()
    ]
    assert len(found) == len(set(found))
    assert all(reason for each in lists for groups in each.values() for reason in groups)


def test_only_the_whole_configuration_is_walked() -> None:
    assert judgement("VllmConfig", "load_config") == "walked"
    assert judgement("ModelConfig", "load_config") is None


# ---- of a vLLM that does not exist ----


class Mode(enum.Enum):
    FAST = 1


@dataclasses.dataclass
class LoadConfig:
    load_format: str = "auto"
    device: str | None = None
    ignore_patterns: list[str] = dataclasses.field(default_factory=lambda: ["original/**/*"])
    sharpness: int = 3
    mode: Mode = Mode.FAST


@dataclasses.dataclass
class VllmConfig:
    load_config: LoadConfig = dataclasses.field(default_factory=LoadConfig)
    instance_id: str = ""
    flavour: Any = None


def test_what_is_at_its_default_salts_nothing() -> None:
    assert salts(VllmConfig(), {}, version="1") == ({}, [])
    assert salts(VllmConfig(LoadConfig(load_format="pt", device="x"), "a"), {}, version="1") == (
        {},
        [],
    )


def test_what_counts_and_what_nobody_has_judged_salts() -> None:
    config = VllmConfig(LoadConfig(ignore_patterns=[], sharpness=4), flavour={"b": torch.float16})
    found, unjudged = salts(config, {}, version="1.2")
    assert found == {
        "engine": "vllm 1.2",
        "VllmConfig.flavour": {"b": "torch.float16"},
        "LoadConfig.ignore_patterns": [],
        "LoadConfig.sharpness": 4,
    }
    assert unjudged == ["VllmConfig.flavour", "LoadConfig.sharpness"]


def test_the_environment_salts() -> None:
    environment = {"VLLM_MARLIN_INPUT_DTYPE": "int8", "VLLM_CPU_INT4_W4A8": "", "HOME": "x"}
    found, unjudged = salts(VllmConfig(), environment, version="1")
    assert found == {"engine": "vllm 1", "VLLM_MARLIN_INPUT_DTYPE": "int8"}
    assert unjudged == []


def test_values_are_the_same_in_every_process() -> None:
    value = {
        "class": re.Pattern,
        "function": re.compile,
        "mode": Mode.FAST,
        "set": {2, 1},
        "load": LoadConfig(),
        1: (None, 0.5),
    }
    assert as_json(value) == {
        "class": "re.Pattern",
        "function": "re.compile",
        "mode": "Mode.FAST",
        "set": [1, 2],
        "load": {
            "": "LoadConfig",
            "load_format": "auto",
            "device": None,
            "ignore_patterns": ["original/**/*"],
            "sharpness": 3,
            "mode": "Mode.FAST",
        },
        "1": [None, 0.5],
    }


@pytest.mark.parametrize("value", [object(), lambda: None, re.compile("a")])
def test_what_cannot_be_told_apart_is_like_nothing_else(value: Any) -> None:
    assert as_json(value) != as_json(value)
