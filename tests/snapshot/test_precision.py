"""Precision: which formats include which, and which entries a store finds for an engine."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_core import DType, InvalidArgumentError, Precision, PrefixStore, StoreError
from kvx_core.snapshot import Snapshot
from kvx_core.stores.match import Match
from kvx_core.stores.names import parse_entry
from tests.caches import assert_same_bytes
from tests.snapshot.sections import section_of
from tests.stores.engine import Engine, save, store_in
from tests.stores.test_prefix import files_of

F32, BF16, F16 = (Precision.of(name) for name in ("float32", "bfloat16", "float16"))
E4M3, E5M2 = Precision.of("float8_e4m3fn"), Precision.of("float8_e5m2")
TORCH = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
}
TOKENS = range(20)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a dtype of at most 16 bits, as float32."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    if dtype.itemsize == 1:
        return bits[:256].to(torch.int8).view(dtype).float()
    return bits.to(torch.int16).view(dtype).float()


@pytest.mark.parametrize(("one", "two"), list(itertools.product(TORCH, repeat=2)))
def test_a_precision_includes_another_if_it_has_all_its_numbers(one: str, two: str) -> None:
    if two == "f32":
        has_all = one == "f32"
    else:
        values = numbers(TORCH[two])
        through = values.to(TORCH[one]).float()
        has_all = bool((through == values)[~values.isnan()].all())
    assert Precision.parse(one).includes(Precision.parse(two)) is has_all


def test_what_went_through_two_formats_is_no_better_than_either() -> None:
    both = BF16.meet(F16)
    assert both.name == "bf16+f16"
    assert not both.includes(BF16)
    assert not both.includes(F16)
    assert BF16.includes(both)
    assert both.includes(E4M3)
    assert both.includes(both)
    assert BF16.meet(F32) == F32.meet(BF16) == BF16
    assert both.meet(E5M2) == E5M2
    assert Precision().meet(F16) == F16
    assert Precision().includes(F32)
    assert not F32.includes(Precision())
    for one in (F32, BF16, F16, E4M3, E5M2, both, Precision.of(opaque="x")):
        assert Precision.parse(one.name) == one


def test_opaque_rows_are_equal_or_not_at_all() -> None:
    one, two = Precision.of(opaque="one"), Precision.of(opaque="two")
    assert one.includes(one)
    assert not one.includes(two)
    assert not one.may_become(two)
    assert not F32.may_become(one)
    assert not one.may_become(F32)
    assert F32.may_become(E5M2)
    assert E5M2.may_become(F32)
    mixed = Precision.of("bfloat16", opaque="one")
    assert F32.includes(BF16)
    assert mixed.includes(mixed)
    assert F32.may_become(mixed)
    assert one.may_become(mixed)


def test_scales_per_row_are_other_numbers() -> None:
    rows = Precision.of("bfloat16", DType.F8_E4M3, vector_scales=True)
    assert rows.name == "f8_e4m3_row"
    assert BF16.includes(rows)
    assert not rows.includes(E4M3)
    assert not E4M3.includes(rows)


def test_dtypes_that_hold_no_keys() -> None:
    with pytest.raises(InvalidArgumentError, match="dtype is S32, expected F16, BF16, F32"):
        Precision.of("int32")
    for name in ("", "f64", "F32", "f32+bf16", "bf16+bf16", "f16+bf16", "rows-x", "f32\n"):
        with pytest.raises(ValueError, match="expected one that KVX has written"):
            Precision.parse(name)


# --- In a store -----------------------------------------------------------------------------------


def reader(path: Path, dtype: Any, **options: Any) -> PrefixStore:
    return store_in(path, precision=Precision.of(dtype), **options)


def engine(dtype: torch.dtype, seed: int = 0) -> Engine:
    return Engine(dtype=dtype, seed=seed, layout="nhd")


def test_no_reader_takes_what_is_less_precise_unasked(tmp_path: Path) -> None:
    """The definition, for every pair: rows of small integers, which all dtypes hold, so that every
    load that is allowed is right to the bit.
    """
    for one, two in itertools.product(TORCH, repeat=2):
        root = tmp_path / one / two
        tokens = [0, 1]
        writer = engine(TORCH[one])
        save(reader(root, TORCH[one]), tokens, writer)
        store = reader(root, TORCH[two])
        found = store.lookup(tokens).num_tokens
        assert found == (2 if Precision.parse(one).includes(Precision.parse(two)) else 0), (
            one,
            two,
        )
        lossy = reader(root, TORCH[two], accept="lossy")
        match = lossy.lookup(tokens)
        assert match.num_tokens == 2
        there = engine(TORCH[two], seed=1)
        if found:
            store.load(match, 0, 2, there.sections())
            continue
        before = there.cache.clone()
        with pytest.raises(StoreError, match=f"stored as {one}, expected numbers that include"):
            store.load(match, 0, 2, there.sections())
        assert_same_bytes(there.cache, before)
        assert lossy.load(match, 0, 2, there.sections()) > 0


def test_precisions_lie_side_by_side(tmp_path: Path) -> None:
    coarse, fine = reader(tmp_path, torch.bfloat16), reader(tmp_path, torch.float32)
    save(coarse, TOKENS, engine(torch.bfloat16))
    assert not is_missing(coarse)
    assert is_missing(fine)
    assert fine.lookup(TOKENS).num_tokens == 0
    assert all(save(fine, TOKENS, engine(torch.float32)))
    assert len(files_of(tmp_path)) == 4
    for store in (coarse, fine):
        assert not is_missing(store)
        match = store.lookup(TOKENS)
        assert match.num_tokens == 20
        assert match.num_tokens == 20
        assert precisions(store, TOKENS) == ["bf16" if store is coarse else "f32"] * 2


def test_what_is_more_precise_need_not_be_stored_again(tmp_path: Path) -> None:
    save(reader(tmp_path, torch.float32), TOKENS, engine(torch.float32))
    store, there = reader(tmp_path, torch.bfloat16), engine(torch.bfloat16, seed=1)
    assert not is_missing(store)
    store.load(store.lookup(TOKENS), 0, 20, there.sections())
    there.check(TOKENS, 0, 20)
    assert store.carried == Precision()
    assert is_missing(reader(tmp_path, torch.float16)) is False


def is_missing(store: PrefixStore) -> bool:
    return store.missing(TOKENS, 0, 16, range(3), (0, 4))


def test_the_longest_comes_first_and_then_the_most_precise(tmp_path: Path) -> None:
    for dtype, tokens in (
        (torch.float8_e5m2, TOKENS),
        (torch.bfloat16, range(10)),
        (torch.float16, range(10)),
    ):
        save(reader(tmp_path, dtype), tokens, engine(dtype))
    store = reader(tmp_path, torch.float32, accept="lossy")
    assert store.lookup(TOKENS).num_tokens == 20
    assert precisions(store, TOKENS) == ["f8_e5m2", "f8_e5m2"]
    assert precisions(store, range(10)) == ["f16"]  # more digits than BF16
    assert precisions(reader(tmp_path, torch.bfloat16, accept="lossy"), range(10)) == ["bf16"]


def precisions(store: PrefixStore, tokens: Any) -> list[str]:
    """Of each file of a match; of each of its layers, if they differ."""
    found = []
    for name in (name for span in store.lookup(tokens).spans for name in span.names):
        entry = parse_entry(name)
        assert entry is not None
        kind = store.kinds.get(entry.kind)
        assert kind is not None
        each = [kind.precision_of(layer).name for layer in kind.layers]
        found.append(each[0] if len(set(each)) == 1 else " ".join(each))
    return found


def test_what_was_loaded_with_a_loss_is_never_stored_as_more_precise(tmp_path: Path) -> None:
    save(reader(tmp_path, torch.bfloat16), TOKENS, engine(torch.bfloat16))
    store = reader(tmp_path, torch.float32, accept="lossy")
    there = engine(torch.float32, seed=1)
    assert is_missing(store)
    match = store.lookup(TOKENS)
    salted = store.salted("x")
    store.load(match, 0, 20, there.sections())
    assert store.carried == salted.carried == BF16
    assert not is_missing(store)
    # Another prompt and another salt, in the same process.
    other = [*range(10), 99, 98]
    for each in (store, salted):
        save(each, other, there)
    strict = reader(tmp_path, torch.float32)
    assert strict.lookup(TOKENS).num_tokens == 0
    assert strict.lookup(other).num_tokens == strict.salted("x").lookup(other).num_tokens == 0
    assert store.lookup(other).num_tokens == 12
    fresh = reader(tmp_path, torch.float32, accept="lossy")
    assert fresh.carried == Precision()
    fresh.carry(Precision.parse("f8_e4m3"))  # what another process has loaded
    fresh.carry(BF16)  # the coarsest counts, not the last
    assert fresh.carried == Precision.parse("f8_e4m3")
    save(fresh, [7, 8], there)
    assert precisions(reader(tmp_path, torch.float32, accept="lossy"), [7, 8]) == ["f8_e4m3"]


def test_the_dtype_of_the_computation_counts_too(tmp_path: Path) -> None:
    """A cache of float32 in an engine that computes in bfloat16."""
    there = engine(torch.float32).compute(TOKENS)
    sections = there.sections(compute_dtype=DType.BF16)
    assert sections[0].precision == BF16
    store = reader(tmp_path, torch.float32)
    snapshot = store.capture(TOKENS, 0, 16, sections)
    assert snapshot is not None
    assert snapshot.header.precision == BF16
    store.commit(snapshot)
    assert store.lookup(TOKENS).num_tokens == 0
    assert reader(tmp_path, torch.bfloat16).lookup(TOKENS).num_tokens == 16
    # What the section does not say, the store does.
    coarse = store_in(tmp_path, precision=Precision.of(torch.float32, torch.float16))
    snapshot = coarse.capture(TOKENS, 0, 16, there.sections())
    assert snapshot is not None
    assert snapshot.header.precision == F16


def test_sections_of_several_precisions(tmp_path: Path) -> None:
    """Each layer is compared with its own."""
    fine, coarse = engine(torch.float32).compute(TOKENS), engine(torch.bfloat16).compute(TOKENS)

    def sections(rest: Engine) -> list[Any]:
        facts = {"fingerprint": "model", "compute_dtype": DType.F32}
        return [
            section_of(fine.cache, (0,), fine.blocks, at=(0,), **facts),
            section_of(rest.cache, (1, 2), rest.blocks, at=(1, 2), **facts),
        ]

    store = store_in(tmp_path, precision=BF16)
    snapshot = store.capture(TOKENS, 0, 16, sections(coarse))
    assert snapshot is not None
    store.commit(snapshot)
    assert precisions(store, TOKENS) == ["f32 bf16 bf16"]
    match = store.lookup(TOKENS)
    assert store.load(match, 0, 16, sections(coarse)) > 0
    with pytest.raises(StoreError, match=r"layer 1 is stored as bf16, expected .* f32.*layer 2"):
        store.load(match, 0, 16, sections(fine))


SKIPPED: dict[str, tuple[torch.dtype, ...]] = {
    "none": (torch.float8_e4m3fn,) * 3,
    "0": (torch.float32, torch.float8_e4m3fn, torch.float8_e4m3fn),
    "2": (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32),
    "0 and 2": (torch.float32, torch.float8_e4m3fn, torch.float32),
    "all": (torch.float32,) * 3,
}


class Mixed:
    """An engine that computes in float32 and keeps layers in several dtypes."""

    def __init__(self, path: Path, skipped: str, accept: Any = "same") -> None:
        self.engines = [engine(dtype).compute(TOKENS) for dtype in SKIPPED[skipped]]
        facts = {"fingerprint": "model", "compute_dtype": DType.F32}
        self.sections = [
            section_of(one.cache, (layer,), one.blocks, at=(layer,), **facts)
            for layer, one in enumerate(self.engines)
        ]
        each = [Precision.of(torch.float32, dtype) for dtype in SKIPPED[skipped]]
        self.store = store_in(path, precision=each, accept=accept)

    def save(self) -> None:
        for start, stop in self.store.spans(len(TOKENS)):
            snapshot = self.store.capture(TOKENS, start, stop, self.sections)
            assert snapshot is not None
            self.store.commit(snapshot)

    def load(self, match: Match) -> None:
        """All of it, into caches that have nothing of it; each layer is right to the bit."""
        before = [one.cache.clone() for one in self.engines]
        for one in self.engines:
            one.cache.storages[0].fill_(0x35)
        assert self.store.load(match, 0, match.num_tokens, self.sections) > 0
        for layer, (one, wanted) in enumerate(zip(self.engines, before, strict=True)):
            for token in range(match.num_tokens):
                block, at = one.place(token)
                halves = zip(
                    one.cache.layers[layer].halves(), wanted.layers[layer].halves(), strict=True
                )
                for found, expected in halves:
                    here, there = (
                        half.tensor[block, at].contiguous().view(torch.uint8)
                        for half in (found, expected)
                    )
                    assert torch.equal(here, there)


@pytest.mark.parametrize("writer", SKIPPED)
@pytest.mark.parametrize("reader", SKIPPED)
def test_layers_of_a_cache_are_compared_one_by_one(
    writer: str, reader: str, tmp_path: Path
) -> None:
    """As with layers that stay in float32 when a cache is quantised: entries are found where each
    layer is as precise as the reader's own.
    """
    there = Mixed(tmp_path, writer)
    there.save()
    here = Mixed(tmp_path, reader)
    is_found = all(
        one == two or one is torch.float32
        for one, two in zip(SKIPPED[writer], SKIPPED[reader], strict=True)
    )
    match = here.store.lookup(TOKENS)
    assert match.num_tokens == (20 if is_found else 0)
    for start, stop in here.store.spans(len(TOKENS)):
        assert here.store.missing(TOKENS, start, stop, (0, 1, 2), (0, 4)) is not is_found
    if is_found:
        here.load(match)
        assert here.store.carried == Precision()
        return
    with pytest.raises(StoreError, match=r"layer \d is stored as f8_e4m3, expected .* f32"):
        here.store.load(there.store.lookup(TOKENS), 0, 20, here.sections)
    lossy = Mixed(tmp_path, reader, accept="lossy")
    assert lossy.store.load(lossy.store.lookup(TOKENS), 0, 20, lossy.sections) > 0
    assert lossy.store.carried == E4M3
    lossy.save()  # all layers count as that coarse
    assert here.store.lookup(TOKENS).num_tokens == 0


def test_layers_of_one_section_are_stored_each_as_precise_as_it_is(tmp_path: Path) -> None:
    """A section of three layers, one of float32: as one group of vLLM has them."""
    mixed = Mixed(tmp_path, "0")
    views = [section.view for section in mixed.sections]
    whole = replace(
        mixed.sections[0],
        layers=(0, 1, 2),
        view=replace(
            views[0],
            layers=tuple(view.layers[0] for view in views),
            k_scales=(None,) * 3,
            v_scales=(None,) * 3,
        ),
    )
    if len({tuple(one.blocks) for one in mixed.engines}) == 1:  # one table for all
        mixed.sections = [whole]
    mixed.save()
    assert precisions(mixed.store, TOKENS) == ["f32 f8_e4m3 f8_e4m3"] * 2
    mixed.load(mixed.store.lookup(TOKENS))


def test_a_store_of_layers_that_differ_needs_one_of_each(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="or one for each of the 3 layers"):
        store_in(tmp_path, precision=[F32, E4M3])
    with pytest.raises(InvalidArgumentError, match="or one for each of the 3 layers"):
        store_in(tmp_path, precision=[F32, E4M3, "f32"])
    with pytest.raises(InvalidArgumentError, match="a number of heads for each of the 3 layers"):
        store_in(tmp_path, total_kv_heads=[4, 2])


def test_a_snapshot_carries_what_it_is_told(tmp_path: Path) -> None:
    section = engine(torch.float32).sections()
    snapshot = Snapshot.capture(range(3), section, precision=E4M3)
    assert snapshot is not None
    snapshot.save(tmp_path / "file")
    with Snapshot.open(tmp_path / "file") as file:
        assert file.header.precision == E4M3


def test_stores_that_say_no_precision(tmp_path: Path) -> None:
    for wrong in (Precision(), torch.float32, "f32", None):
        with pytest.raises(InvalidArgumentError, match=r"precision is .*, expected Precision.of"):
            store_in(tmp_path, precision=wrong)
    with pytest.raises(InvalidArgumentError, match="accept is 'all', expected 'same' or 'lossy'"):
        store_in(tmp_path, accept="all")
