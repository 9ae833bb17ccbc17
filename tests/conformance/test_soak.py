"""What a soak finds, on small stores; the conditions under which it fails."""

from __future__ import annotations

import pytest

from kvx_conformance.soak import Found, soak


def found(
    growth: float = 0, descriptors: float = 0, end: int = 1800, step: int = 0, at: int = 900
) -> list[str]:
    """Problems of half an hour, a sample each second: what a second adds, after a beginning that
    fills caches. growth: in MiB; step: what is added once, at a second
    """
    one = Found()
    one.counts["tokens reused"] = 1
    one.usage = [
        (
            t,
            int((700 + min(t, 200) / 2 + t * growth + step * (t > at)) * 2**20),
            int(60 + t * descriptors),
        )
        for t in range(end)
    ]
    one.judge(1800)
    return one.problems


def test_memory_and_descriptors() -> None:
    assert found() == []
    (problem,) = found(growth=2 / 60)  # a minute adds two mebibytes
    assert problem == "growth: memory +34 MiB, descriptors +0"
    for at in range(200, 1800, 100):
        assert found(step=60, at=at) == []  # a buffer that is kept
        assert found(growth=2 / 60, step=60, at=at)
    (problem,) = found(descriptors=1 / 300)
    assert problem.startswith("growth: memory +0 MiB, descriptors +")
    (problem,) = found(end=100)
    assert problem == "lost: the steady engine has ended: 0 samples of its memory"


def test_a_store_that_is_never_hit() -> None:
    one = Found()
    assert one.judge(60) == "memory: not judged in so short a time"
    assert one.problems == ["lost: no token was reused: a store that is never hit is never wrong"]


@pytest.mark.slow
def test_a_sound_store_and_a_faulty_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert soak("store", "tests.conformance.small_stores:Sound", minutes=0.15)
    unchecked = "tests.conformance.small_stores:Unchecked"
    assert not soak("store", unchecked, minutes=10, until_first=True)
    assert "wrong answers: " in capfd.readouterr().out
