"""The suite's cases for engines: sound engines pass all of them, each fault fails the one meant."""

from __future__ import annotations

from typing import Any

import pytest

from kvx_conformance.case import Case, Outcome
from kvx_conformance.subjects import cases_of
from kvx_conformance.worker import outcome_of
from tests.conformance import doubles

CASES = {case.name: case for case in cases_of("engine")}


@pytest.mark.parametrize("engine", doubles.SOUND, ids=lambda engine: engine.__name__)
def test_a_sound_engine_fails_no_case(engine: Any) -> None:
    for case in CASES.values():
        outcome, why = outcome_of(case, engine())
        assert outcome in (Outcome.PASS, Outcome.NOT_APPLICABLE), f"{case.name}: {why}"


def test_each_case_is_run_by_a_sound_engine() -> None:
    for case in CASES.values():
        assert Outcome.PASS in {outcome_of(case, engine())[0] for engine in doubles.SOUND}, case.name
