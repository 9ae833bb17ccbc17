"""CacheFacts: the differences that forbid a copy although the bytes could be copied."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from kvx_core import (
    CacheFacts,
    Comparison,
    DType,
    InvalidArgumentError,
    ReorderRotary,
    compare,
)

FACTS = CacheFacts(
    engine="here 1.0",
    fingerprint="abc",
    rotary="half",
    rotary_dim=64,
    rope_applied=True,
    hadamard=False,
    scale_convention="multiply",
    num_layers=3,
    first_layer=0,
    window=0,
    total_kv_heads=8,
    first_kv_head=0,
    negative_slots="skip",
)
OTHER: dict[str, Any] = {
    "fingerprint": "abd",
    "rotary": "none",
    "rotary_dim": 32,
    "rope_applied": False,
    "hadamard": True,
    "num_layers": 4,
    "first_layer": 3,
    "window": 4096,
    "total_kv_heads": 4,
    "first_kv_head": 4,
}
THERE = replace(FACTS, engine="there 2.0")
ALIKE = Comparison(reasons=())


def test_equal_facts_agree() -> None:
    assert compare(FACTS, FACTS) == ALIKE
    assert compare(CacheFacts(), CacheFacts(), same_model=True) == ALIKE


def test_every_fact_is_compared_or_known_not_to_be() -> None:
    not_compared = {"compute_dtype", "engine", "lossy", "negative_slots", "scale_convention"}
    of_rotated = {"hadamard_k", "hadamard_v"}
    assert {field.name for field in fields(CacheFacts)} == set(OTHER) | not_compared | of_rotated


# ---- rotated K and V ----


def rotated(k: int | None, v: int | None, facts: CacheFacts = FACTS) -> CacheFacts:
    return replace(facts, hadamard=True, hadamard_k=k, hadamard_v=v)


def test_rotations_are_compared_half_by_half() -> None:
    """That both ends are rotated is not enough: K alone may be, or V in other groups."""
    assert compare(rotated(64, 0), rotated(64, 0, THERE)) == ALIKE
    assert compare(rotated(None, None), rotated(None, None, THERE)) == ALIKE
    assert compare(rotated(64, 0), rotated(64, 64, THERE)).reasons == (
        "hadamard_v is 0 at the source (here 1.0) and 64 at the destination (there 2.0)",
    )
    assert len(compare(rotated(128, 64), rotated(64, 0, THERE)).reasons) == 2
    assert compare(rotated(64, None), rotated(64, 64, THERE), same_model=True).reasons == (
        "hadamard_v is 64 at the destination (there 2.0) and unknown at the source (here 1.0): set "
        "CacheFacts.hadamard_v of the source",
    )


@pytest.mark.parametrize(
    ("src", "orders", "dst"),
    [
        (FACTS, (64, 0), rotated(64, 0, THERE)),
        (FACTS, (128, 64), rotated(128, 64, THERE)),
        (rotated(128, 64), (128, 64), THERE),
        (rotated(128, 64), (0, 64), rotated(128, 0, THERE)),
        (rotated(64, 0), (0, 64), rotated(64, 64, THERE)),
        (rotated(64, 0), (64, 32), rotated(0, 32, THERE)),
        (FACTS, (64, 0), rotated(None, None, THERE)),
        (rotated(None, None), (64, 64), THERE),
    ],
)
def test_a_copy_that_rotates(src: CacheFacts, orders: tuple[int, int], dst: CacheFacts) -> None:
    k, v = orders
    assert compare(src, dst, hadamard_k=k, hadamard_v=v) == ALIKE
    known = [facts.hadamard_k is not None for facts in (src, dst) if facts.hadamard]
    if all(known):
        for other in ((k or 32, v), (k, v or 32), (2 * k, v), (k, 2 * v)):
            if other != orders:
                assert compare(src, dst, hadamard_k=other[0], hadamard_v=other[1]).reasons


def test_a_rotation_is_undone_by_itself_alone() -> None:
    assert compare(rotated(64, 64), THERE, hadamard_k=128, hadamard_v=64).reasons == (
        "hadamard_k is 64 at the source (here 1.0) and the copy rotates 128 numbers together: "
        "hadamard_k=64 undoes the rotation",
    )
    assert compare(FACTS, rotated(64, 64, THERE), hadamard_k=64).reasons == (
        "after the rotation, hadamard_v is 0 at the source (here 1.0) and 64 at the destination "
        "(there 2.0)",
    )


def test_dims_of_keys_that_are_not_rotated_are_reordered() -> None:
    """V may be rotated."""
    there = replace(THERE, rotary="interleaved")
    assert compare(rotated(0, 64), rotated(0, 64, there)).transforms
    for k in (64, None):
        (reason,) = compare(rotated(k, 64), rotated(k, 64, there)).reasons
        assert reason.endswith("K is stored Hadamard-rotated, which mixes its dims")


def test_facts_that_only_inform_do_not_keep_apart() -> None:
    there = replace(
        THERE,
        negative_slots="wrap",
        scale_convention=None,
        compute_dtype=DType.BF16,
        lossy="q8_0",
    )
    assert compare(FACTS, there) == ALIKE


@pytest.mark.parametrize("name", OTHER)
def test_a_difference_is_a_reason(name: str) -> None:
    (reason,) = compare(FACTS, replace(THERE, **{name: OTHER[name]})).reasons
    called = name if name != "first_kv_head" else "first_kv_head + head_start"
    assert reason == (
        f"{called} is {getattr(FACTS, name)!r} at the source (here 1.0) and {OTHER[name]!r} at the "
        "destination (there 2.0)"
    )


@pytest.mark.parametrize("name", OTHER)
def test_what_only_one_end_knows_is_a_reason(name: str) -> None:
    (reason,) = compare(FACTS, replace(THERE, **{name: None})).reasons
    assert reason == (
        f"{name} is {getattr(FACTS, name)!r} at the source (here 1.0) and unknown at the "
        f"destination (there 2.0): set CacheFacts.{name} of the destination"
    )
    (reason,) = compare(replace(FACTS, engine=None, **{name: None}), THERE).reasons
    assert reason == (
        f"{name} is {getattr(FACTS, name)!r} at the destination (there 2.0) and unknown at the "
        f"source: set CacheFacts.{name} of the source"
    )


# What decides whether the bytes mean the same, whatever else is known.
DECIDES = ("fingerprint", "rotary", "rotary_dim", "rope_applied")


@pytest.mark.parametrize("name", sorted(OTHER.keys() - set(DECIDES)))
def test_what_neither_end_knows_is_no_reason_where_the_caller_knows(name: str) -> None:
    unknown = {name: None}
    assert compare(replace(FACTS, **unknown), replace(THERE, **unknown)) == ALIKE


@pytest.mark.parametrize("name", DECIDES)
def test_what_neither_end_knows_is_a_reason_where_it_decides(name: str) -> None:
    here, there = replace(FACTS, **{name: None}), replace(THERE, **{name: None})
    (reason,) = compare(here, there).reasons
    assert reason.startswith(
        f"{name} is unknown at the source (here 1.0) and destination (there 2.0): set "
        f"CacheFacts.{name} of both, or give same_model=True if they "
    )
    assert compare(here, there, same_model=True) == ALIKE
    (reason,) = compare(replace(here, engine=None), replace(there, engine=None)).reasons
    assert reason.startswith(f"{name} is unknown at the source and destination: ")


@pytest.mark.parametrize("name", DECIDES[1:])
def test_one_engine_rotates_the_keys_of_one_model_in_one_way(name: str) -> None:
    """Whatever its version: What is unknown to it is the same in all of them."""
    here = replace(FACTS, **{name: None})
    assert compare(here, replace(here, engine="here 2.0")) == ALIKE
    assert compare(here, replace(here, engine="here 2.0", fingerprint="another")).reasons


@pytest.mark.parametrize("engine", ["", " ", "\n"])
def test_an_engine_without_a_name_is_not_known(engine: str) -> None:
    """A file may have one."""
    here = replace(FACTS, engine=engine, rotary_dim=None)
    (reason,) = compare(here, here).reasons
    assert reason.startswith("rotary_dim is unknown at the source")


def test_same_model_overrules_nothing_that_is_known() -> None:
    for name, other in OTHER.items():
        assert compare(FACTS, replace(THERE, **{name: other}), same_model=True).reasons
        assert compare(FACTS, replace(THERE, **{name: None}), same_model=True).reasons


def test_all_reasons_are_given() -> None:
    assert len(compare(FACTS, replace(THERE, **OTHER)).reasons) == len(OTHER)


def test_heads_are_those_of_the_model() -> None:
    """Rank 1 of 2, whose first head is the model's fifth, out of a cache with all of them."""
    rank = replace(THERE, first_kv_head=4)
    assert compare(FACTS, rank, src_head_start=4) == ALIKE
    assert compare(rank, FACTS, src_head_start=1, dst_head_start=5) == ALIKE
    (reason,) = compare(FACTS, rank, src_head_start=3).reasons
    assert reason.startswith("first_kv_head + head_start is 3 at the source")


@pytest.mark.parametrize(("src", "dst"), [("divide", "multiply"), ("multiply", "divide")])
def test_scales_that_divide_are_a_reason(src: Any, dst: Any) -> None:
    (reason,) = compare(
        replace(FACTS, scale_convention=src), replace(THERE, scale_convention=dst)
    ).reasons
    assert reason.startswith("scale_convention is 'divide' at the ")
    assert reason.endswith("expected 'multiply': give its scales as value = stored * scale")


# ---- the order of K's rotary dims ----

BOTH_ORDERS = (
    "rotary is 'half' at the source (here 1.0) and 'interleaved' at the destination (there 2.0)"
)
TURNED = replace(THERE, rotary="interleaved")


@pytest.mark.parametrize("rope_applied", [True, False, None])
def test_half_and_interleaved_differ_by_a_transform(rope_applied: bool | None) -> None:
    """Keys that are stored before they are rotated are those of reordered weights as well."""
    here, there = (replace(facts, rope_applied=rope_applied) for facts in (FACTS, TURNED))
    found = compare(here, there, same_model=True)
    transform = ReorderRotary("half", "interleaved", 64, difference=BOTH_ORDERS)
    assert found == Comparison(reasons=(), transforms=(transform,))
    assert found.reasons_as_is == (BOTH_ORDERS,)
    assert transform.name == "rotary half to interleaved"
    assert transform.sentence == (
        "the first 64 dims of each head of K go from half to interleaved order"
    )
    (back,) = compare(there, here, same_model=True).transforms
    assert (back.src, back.dst, back.rotary_dim) == ("interleaved", "half", 64)


def test_other_reasons_stay_beside_a_transform() -> None:
    found = compare(FACTS, replace(TURNED, window=4096))
    (reason,) = found.reasons
    assert reason.startswith("window is 0 at the source")
    assert found.reasons_as_is == (reason, BOTH_ORDERS)


@pytest.mark.parametrize("rotary_dim", [0, 2])
def test_one_pair_of_dims_stands_alike_in_both_orders(rotary_dim: int) -> None:
    here, there = (replace(facts, rotary_dim=rotary_dim) for facts in (FACTS, TURNED))
    assert compare(here, there) == ALIKE


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"rotary_dim": None}, ": set CacheFacts.rotary_dim of both, so that K can be reordered"),
        ({"hadamard": True}, ", and K is stored Hadamard-rotated, which mixes its dims"),
        (
            {"hadamard": None},
            ", and hadamard is unknown at both: K can be reordered if it is False, set "
            "CacheFacts.hadamard of both",
        ),
    ],
)
def test_what_keeps_dims_from_being_reordered(facts: dict[str, Any], reason: str) -> None:
    found = compare(replace(FACTS, **facts), replace(TURNED, **facts), same_model=True)
    assert found == Comparison(reasons=(BOTH_ORDERS + reason,))


@pytest.mark.parametrize("facts", [{"rotary_dim": 32}, {"hadamard": True}])
def test_dims_are_not_reordered_where_another_fact_of_them_differs(facts: dict[str, Any]) -> None:
    found = compare(FACTS, replace(TURNED, **facts))
    assert not found.transforms
    assert BOTH_ORDERS in found.reasons
    assert len(found.reasons) == 2


@pytest.mark.parametrize("rotary", ["none", None])
@pytest.mark.parametrize("other", ["half", "interleaved"])
def test_only_known_orders_are_reordered(rotary: Any, other: Any) -> None:
    for ends in ((rotary, other), (other, rotary)):
        found = compare(*(replace(FACTS, rotary=known) for known in ends))
        assert not found.transforms
        assert len(found.reasons) == 1


def test_facts_that_no_cache_of_results_takes_are_compared() -> None:
    here, there = (replace(facts, fingerprint=["a", "b"]) for facts in (FACTS, THERE))  # type: ignore[arg-type]
    assert compare(here, there) == ALIKE
    (reason,) = compare(here, THERE).reasons
    assert reason.startswith("fingerprint is ['a', 'b'] at the source")


def test_facts_like_others() -> None:
    own = CacheFacts(fingerprint="m", rotary="half", window=0)
    other = CacheFacts(fingerprint="n", rotary="interleaved", rotary_dim=64, rope_applied=False)
    assert own.like(other) == CacheFacts(
        fingerprint="m", rotary="half", rotary_dim=64, rope_applied=False, window=0
    )
    assert str(own) == "fingerprint: m\nrotary: half\nwindow: 0"


def test_words_that_no_fact_has() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        CacheFacts(rotary="neox")  # type: ignore[arg-type]
    sentence = "facts.rotary is 'neox', expected 'half', 'interleaved' or 'none'"
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"rotary_dim": 63}, "facts.rotary_dim is 63, expected an even number: dims turn in pairs"),
        ({"rotary_dim": -2}, "facts.rotary_dim is -2, expected 0 to 4294967295"),
        ({"rotary_dim": True}, "facts.rotary_dim is True, expected an integer, 0 to 4294967295"),
        ({"num_layers": 0}, "facts.num_layers is 0, expected 1 to 4294967295"),
        ({"total_kv_heads": 0}, "facts.total_kv_heads is 0, expected 1 to 4294967295"),
        ({"first_kv_head": -1}, "facts.first_kv_head is -1, expected 0 to 4294967295"),
        ({"first_layer": 1.5}, "facts.first_layer is 1.5, expected an integer, 0 to 4294967295"),
        ({"window": "8"}, "facts.window is '8', expected an integer, 0 to 4294967295"),
        ({"hadamard_k": -64}, "facts.hadamard_k is -64, expected 0 to 4294967295"),
    ],
)
def test_numbers_that_no_cache_has(facts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        CacheFacts(**facts)
    assert str(raised.value) == sentence


def test_numbers_of_any_integer_type() -> None:
    facts = CacheFacts(rotary_dim=np.int64(64), window=np.uint8(3))
    assert (type(facts.rotary_dim), type(facts.window)) == (int, int)
