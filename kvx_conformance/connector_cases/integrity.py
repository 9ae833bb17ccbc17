"""Integrity: files that are not what was written cost a hit, never a token."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvx_conformance.case import Lost, case
from kvx_conformance.connector import Setup
from kvx_conformance.connector_probe import PLAIN, SEEDS, Probe, prompts, some_are_reused
from kvx_conformance.damage import (
    Act,
    cut,
    delete,
    delete_half,
    files,
    flip,
    flip_many,
    grow,
    numbers,
    overwrite,
    replace_by_no_file,
)

_SECONDS = 300.0


def _each(change: Act) -> Act:
    """Damage of every file of numbers."""

    def damage(store: Path, chance: random.Random) -> None:
        for path in numbers(store):
            change(path, chance)

    return damage


def _check(probe: Probe, damage: Act) -> None:
    """For three seeds: a store is filled, damaged and used. Each answer is right, and what is
    stored afterwards is found.
    """
    filled, requests, others = probe.folder(), prompts(2), prompts(1, seed=6)
    probe.write(filled, requests)
    for seed in SEEDS:
        store = probe.folder() / "store"
        shutil.copytree(filled, store, symlinks=True)
        damage(store, random.Random(seed))
        probe.read(store, [*requests, *others], Setup(block_size=64 if seed % 2 else 32))
        some_are_reused(probe.read(store, others), "they were stored after the damage")


@case("benchmarks/peers.py: flipped bytes became tokens in two peers", seconds=_SECONDS)
def flipped_bits(probe: Probe) -> None:
    """One bit that has flipped in a file's numbers, or one in sixty bytes, is found before use."""
    _check(probe, _each(flip))
    _check(probe, _each(flip_many))


@case("a disk that returns another page: many bytes at once", seconds=_SECONDS)
def flipped_pages(probe: Probe) -> None:
    """Whole pages of other bytes anywhere in a file, its head included, are found."""
    _check(probe, _each(overwrite))


@case("a writer or a disk that ended early", seconds=_SECONDS)
def files_that_are_cut(probe: Probe) -> None:
    """A file without its end is found out, wherever it was cut, and so is one of no bytes."""
    _check(probe, _each(cut))
    _check(probe, _each(lambda path, chance: os.truncate(path, 0)))


@case("a file system that gives back zeros after a crash", seconds=_SECONDS)
def files_of_zeros(probe: Probe) -> None:
    """A file of the right size, all of it zeros, is found out."""
    _check(probe, _each(lambda path, chance: _fill(path, b"\0")))


@case("sizes are believed before they are checked: a sparse file of 2 GiB", seconds=_SECONDS)
def files_that_have_grown(probe: Probe) -> None:
    """Files with a hole of 2 GiB behind their end are found out, and take no memory."""
    store, requests = probe.folder(), prompts(3)
    probe.write(store, requests)
    with probe.engine(PLAIN, store, environment={}) as engine:
        before = engine.peak_bytes()
        for path in numbers(store):
            grow(path, random.Random())
        answers = engine.ask(requests)
        engine.settle()
        more = engine.peak_bytes() - before
        probe.check(answers, requests)
    if more > 1 << 30:
        raise Lost(f"{more >> 20} MiB of memory for files that have grown")
    probe.read(store, requests)


def _fill(path: Path, byte: bytes) -> None:
    path.write_bytes(byte * path.stat().st_size)


@case("a checksum in the file says nothing of its name", seconds=_SECONDS)
def files_that_have_changed_places(probe: Probe) -> None:
    """Files that are sound, but have changed names with others of the same size, are found out."""

    def swap(store: Path, chance: random.Random) -> None:
        for group in _of_one_size(numbers(store)):
            chance.shuffle(group)
            contents = [path.read_bytes() for path in group]
            for path, content in zip(group, contents[1:] + contents[:1], strict=True):
                path.write_bytes(content)

    _check(probe, swap)


def _of_one_size(paths: list[Path]) -> Iterator[list[Path]]:
    by_size: dict[int, list[Path]] = {}
    for path in paths:
        by_size.setdefault(path.stat().st_size, []).append(path)
    return (group for group in by_size.values() if len(group) > 1)


@case("a store's own small files: what it says of itself", seconds=_SECONDS)
def records_that_are_damaged(probe: Probe) -> None:
    """Small files that are flipped, cut or gone cost hits, no token and no engine. (They may cost
    the store until somebody repairs it.)
    """
    filled, requests = probe.folder(), prompts(3)
    probe.write(filled, requests)
    for seed, act in enumerate((flip, overwrite, cut, delete)):
        store = probe.folder() / "store"
        shutil.copytree(filled, store, symlinks=True)
        for path in {*files(store)} - {*numbers(store)}:
            if path.stat().st_size:
                act(path, random.Random(seed))
        probe.read(store, requests)


@case("replay: files of another model, put under the names of this one's", seconds=_SECONDS)
def files_of_another_model(probe: Probe) -> None:
    """Sound files that another model has computed of the same tokens are found out."""
    other = probe.folder()
    probe.write(other, prompts(2), Setup(weights="layer", place="other"))

    def replay(store: Path, chance: random.Random) -> None:
        theirs = {path.stat().st_size: path.read_bytes() for path in numbers(other)}
        for path in numbers(store):
            path.write_bytes(theirs.get(path.stat().st_size, path.read_bytes()))

    _check(probe, replay)


@case("an administrator's rm, and eviction by other engines", seconds=_SECONDS)
def files_that_are_gone(probe: Probe) -> None:
    """Each second file, then all files, and then the folders too, are gone."""

    def folders(store: Path, chance: random.Random) -> None:
        for path in store.iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    _check(probe, delete_half)
    _check(probe, _each(delete))
    _check(probe, folders)


@case("what is no file in a file's place", seconds=_SECONDS)
def links_pipes_and_folders(probe: Probe) -> None:
    """A link to a device, a loop of links, a pipe that nobody writes to, or a folder in a file's
    place neither hangs an engine nor ends it.
    """

    filled, requests = probe.folder(), prompts(3)
    probe.write(filled, requests)
    for seed in SEEDS:
        store = probe.folder() / "store"
        shutil.copytree(filled, store)
        chance = random.Random(seed)
        for path in files(store):
            replace_by_no_file(path, chance)
        probe.read(store, requests)


@case("between a lookup's answer and its load, others may delete", seconds=_SECONDS)
def gone_between_lookup_and_load(probe: Probe) -> None:
    """A prompt whose files are deleted after they were found is computed, and so is one that shares
    its beginning and runs beside it.
    """
    filled, (stored,), (other,) = probe.folder(), prompts(1), prompts(1, seed=9)
    probe.write(filled, [stored])
    for caching in (True, False):
        setup = Setup(prefix_caching=caching, block_size=64)
        store = probe.folder() / "store"
        shutil.copytree(filled, store)
        fork = type(stored)(stored.tokens[:200] + other.tokens[:100])
        with probe.engine(setup, store) as engine:
            engine.lose(store)
            probe.check(engine.ask([stored, fork]), [stored, fork], setup)
            engine.settle()
            probe.check(engine.ask([stored, fork]), [stored, fork], setup)


@case("docs/security.md: what lies in a store was written by anyone", seconds=_SECONDS)
def one_damage_after_the_other(probe: Probe) -> None:
    """An engine whose store is damaged between its requests answers each right, and finds what it
    has stored again since.
    """
    store, chance = probe.folder(), random.Random(4)
    requests = prompts(3)
    probe.write(store, requests)
    acts: list[Act | None] = [flip, overwrite]
    acts.append(lambda path, chance: os.truncate(path, path.stat().st_size // 2))
    acts += [None, None]  # a damage may be met a request later
    with probe.engine(PLAIN, store) as engine:
        for act in acts:
            for path in numbers(store)[:: chance.randrange(1, 3)] if act else ():
                assert act is not None
                act(path, chance)
            engine.forget()
            answers = engine.ask(requests)
            probe.check(answers, requests)
            engine.settle()
    some_are_reused(answers, "they were stored again after the last damage")
