"""Walks: how much of a prompt a space of a store has, where that ends, and why."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvx_core.snapshot import CorruptError, StoreError
from kvx_core.stores.inventory import Inventory
from kvx_core.stores.marks import Mark, most_bytes, parse_mark
from kvx_core.stores.names import Ids, key_of, mark_name, rungs, shared_tokens
from kvx_core.stores.space import SpaceRecord
from kvx_core.stores.stored_kind import StoredFile, StoredKind
from kvx_core.stores.stored_space import Space
from kvx_core.stores.verified import secrets_of_mark

_MOST_WORDS = 200  # characters of a reason that a file gives
_SHOWN = 12  # digits of a hash


@dataclass(slots=True)
class Walk:
    """What a space has of a prompt.

    num_tokens: the longest prefix whose keys and values are there, all layers and heads of it
    num_states: the longest prefix of it whose states are there too; None: the model has no states
    windowed:   the layers that are missing in chunks before the last one of a longer prefix, and
                the tokens of that prefix: it is there for engines that read these layers' last
                tokens alone
    why:        why no longer prefix is there; "": all of the prompt is
    """

    space: Space
    num_tokens: int = 0
    num_states: int | None = None
    windowed: tuple[str, int] = ("", 0)
    why: str = ""
    files: list[StoredFile] = field(default_factory=list)  # of the prefix

    @property
    def usable(self) -> int:
        """The tokens that an engine of this space can load if it reads all layers as a whole."""
        return self.num_tokens if self.num_states is None else self.num_states

    @property
    def precisions(self) -> list[str]:
        """The names of the precisions of the files."""
        kinds = {file.kind for file in self.files}
        return sorted({name for kind in kinds for name in self.space.kinds[kind].precisions})


def walk(found: Inventory, space: Space, ids: Ids) -> Walk:
    """Looks a prompt up as an engine does. Reads heads of files, and marks.

    ids: (n,), int64, contiguous
    """
    if space.record is None:
        return Walk(space, why=f"the space cannot be read: {space.reason}")
    here = _Here(found, space, space.record)
    seen, step, node, nodes = Walk(space), found.config.chunk_tokens, space.name, list[str]()
    absent, at = set[int](), 0  # layers that a chunk before `at` lacks
    while at < len(ids):
        rest = ids[at : at + step]
        nodes.append(node)
        key, count = key_of(node, rest), len(rest)
        held = here.held(key)
        if held.absent or not held.files:
            shorter, other, why = here.marked(node, rest)
            seen.why = seen.why or why or f"of tokens {at} to {at + len(rest)} {held.why}"
            if not held.files:
                count, key, held = shorter, other, here.held(other)
            elif shorter and not absent:
                seen.num_tokens = at + shorter
                seen.files += here.held(other).files
        if held.files and not held.absent and not absent:
            seen.num_tokens = at + count
            seen.files += held.files
        elif held.files and not held.absent:
            seen.windowed = _ranges(sorted(absent)), at + count
        absent.update(held.absent)
        at += count
        if count < step or not held.files:
            break
        node = key
    if seen.num_tokens == len(ids):
        seen.why = ""
    if any(space.record.state_heads):
        seen.num_states = here.states(ids, nodes, seen.num_tokens)
        if seen.num_states < seen.num_tokens:
            after = f"after {seen.num_states} of them" if seen.num_states else "after none of them"
            seen.why = (
                f"keys and values of {seen.num_tokens} tokens are there, and the model's states "
                f"{after}"
            )
    return seen


class _Held(NamedTuple):
    """The files of an entry that an engine can use, the layers that they lack, and why."""

    files: list[StoredFile]
    absent: list[int]
    why: str


class _Here:
    """The entries of a space, by their keys."""

    def __init__(self, found: Inventory, space: Space, record: SpaceRecord) -> None:
        self._found, self._space, self._record = found, space, record
        self._marks = {mark.name for mark in space.marks}
        self.files: Mapping[str, list[StoredFile]] = defaultdict(list)
        self._with_states: Mapping[str, list[StoredFile]] = defaultdict(list)
        for kind in space.kinds.values():
            group = self._with_states if kind.is_states else self.files
            for file in kind.files:
                group[file.key].append(file)

    def held(self, key: str, *, states: bool = False) -> _Held:
        """Returns what there is of an entry."""
        files = (self._with_states if states else self.files).get(key, [])
        if not files:
            return _Held([], [], "there is no file: nobody has stored them, or they were evicted")
        good, whys, heads = list[StoredFile](), list[str](), defaultdict[int, set[int]](set)
        for file in files:
            kind = self._space.kinds[file.kind]
            why = kind.reason if kind.kind is None else self._unusable(file, kind)
            if why or kind.kind is None:
                whys.append(f"{_name(file)} is of no use: {why}"[:_MOST_WORDS])
                continue
            good.append(file)
            for layer in kind.kind.layers:
                heads[layer].update(range(*kind.kind.heads_of(layer)))
        counts = enumerate(self._record.heads(states))
        absent = [layer for layer, count in counts if len(heads[layer]) < count]
        if absent and not whys:
            whys.append(
                f"layers {_ranges(absent)} are missing, or some of their heads: a rank has not "
                "stored them, they were evicted, or a sliding window has left them"
            )
        return _Held(good, absent, whys[0] if absent else "")

    def _unusable(self, file: StoredFile, kind: StoredKind) -> str:
        """Returns why an engine cannot use a file, as far as its head tells; "" if it can."""
        try:
            with self._found.opened_chunk(file, kind):
                return ""
        except CorruptError as error:
            return str(error)
        except StoreError as error:
            # Whoever asks may not have the keys that the engines have.
            needs_keys = kind.kind is not None and (kind.kind.keyed or kind.kind.encrypted)
            has_keys = self._found.secrets.is_keyed or self._found.secrets.is_encrypted
            return "" if needs_keys and not has_keys else str(error)

    def marked(self, node: str, rest: Ids) -> tuple[int, str, str]:
        """Returns how many of these tokens an entry begins with that marks lead to, its key, and
        why they are no more; "" if no mark says why.

        node: the key of all tokens before
        """
        best = 0, "", ""
        for _, rung in rungs(node, rest, self._found.config.chunk_tokens):
            name = mark_name(self._space.name, rung)
            if name not in self._marks:
                continue
            try:
                mark = self._mark(name)
            except StoreError as error:
                why = f"{name.rpartition('/')[2][:_SHOWN]}.mark: {error}"[:_MOST_WORDS]
                best = (*best[:2], best[2] or why)
                continue
            count, held = shared_tokens(rest, mark.ids), self.held(mark.key)
            if count > best[0] and held.files and not held.absent:
                more = "goes on with other tokens" if count < len(mark.ids) else "ends there"
                best = count, mark.key, f"the entry that begins so {more}"
        return best

    def _mark(self, name: str) -> Mark:
        most = most_bytes(self._found.config.chunk_tokens)
        raw = self._found.read(name, most)
        secrets = secrets_of_mark(self._found.secrets, raw, name)
        return parse_mark(raw, name, secrets, self._found.config.chunk_tokens)

    def states(self, ids: Ids, nodes: list[str], most: int) -> int:
        """Returns the longest prefix of at most so many tokens that has states; 0: none has."""
        step, best = self._found.config.chunk_tokens, 0
        for first in range(0, most, step):
            digest = hashlib.sha256(bytes.fromhex(nodes[first // step]))
            for count in range(first + 1, min(first + step, most) + 1):
                digest.update(ids[count - 1 : count].data)
                key = digest.hexdigest()
                if key in self._with_states:
                    held = self.held(key, states=True)
                    best = count if held.files and not held.absent else best
        return best


def differences(one: Space, other: Space) -> list[tuple[str, str, str]]:
    """Returns the facts that make the keys of two spaces differ: name, and both values."""
    if one.record is None or other.record is None:
        return []
    mine, its = one.record, other.record
    found = [
        (name, str(getattr(mine, name)), str(getattr(its, name)))
        for name in ("epoch", "lossy", "kv_heads", "state_heads")
    ]
    found.append(("salt", mine.salt[:_SHOWN] or "none", its.salt[:_SHOWN] or "none"))
    found.append(("model", mine.fingerprint[:_SHOWN], its.fingerprint[:_SHOWN]))
    if one.model and other.model:
        with suppress(RecursionError):  # a record may be nested deeply
            here, there = dict(_flat(one.model)), dict(_flat(other.model))
            found[-1:] = [
                (f"model {n[:_MOST_WORDS]}", str(here.get(n, "none")), str(there.get(n, "none")))
                for n in sorted(here.keys() | there.keys())
            ]
    return [fact for fact in found if fact[1] != fact[2]]


def _flat(value: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """Yields the values of nested mappings, with dots in their names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _name(file: StoredFile) -> str:
    return file.name.rpartition("/")[2][:_SHOWN]


def _ranges(numbers: list[int]) -> str:
    """Numbers in order, as text: 0-3, 7."""
    found = list[str]()
    for number in numbers:
        first, _, last = found[-1].partition("-") if found else ("", "", "")
        if found and int(last or first) == number - 1:
            found[-1] = f"{first}-{number}"
        else:
            found.append(str(number))
    return ", ".join(found)
