"""Refusals whose sentences name a way out: both are run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kvx_core import KvxError


class WayOut(NamedTuple):
    """A call that is refused, and the one that its sentence names."""

    sentence: str  # how it ends; ... stands for anything
    refused: Callable[[], object]
    way_out: Callable[[], object]

    def __str__(self) -> str:
        return self.sentence


def leads_out(case: WayOut) -> None:
    with pytest.raises(KvxError) as raised:
        case.refused()
    expected = re.escape(case.sentence).replace(r"\.\.\.", ".*") + "$"
    assert re.search(expected, str(raised.value), re.DOTALL), str(raised.value)
    case.way_out()
