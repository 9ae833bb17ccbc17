"""A sound store of files for the suite's engine, and stores with one fault each.

A file holds some tokens of some heads: a digest of its name and its bytes, then the bytes. Its name
is a digest of all that decides the numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from kvx_conformance.connector import Request
from kvx_conformance.engine import Floats
from kvx_conformance.store import DIM, LAYERS

CHUNK = 32
# Fields of Setup that decide numbers, but for `longest`, which does so in one family.
DECIDING = (
    *("family", "weights", "epsilon", "theta", "dtype", "cache_dtype", "skipped", "quantization"),
)
FAULTS: list[tuple[str, type[Sound]]] = []  # the case that must find it, and the faulty store
S = TypeVar("S", bound="type[Sound]")


class Sound:
    """Chunks of CHUNK tokens, a file for each head. A shorter rest is not stored."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder, self.identity = folder, dict(identity)
        self.first_head, _ = identity["heads"]
        self.model = json.dumps([self.model_key(self.identity), self.longest_key()])
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)

    def model_key(self, identity: dict[str, Any]) -> list[Any]:
        return [identity[name] for name in DECIDING]

    def longest_key(self) -> Any:
        return self.identity["longest"] if self.identity["family"] == "longrope" else None

    def request_key(self, request: Request) -> list[Any]:
        return [request.salt, request.adapter, request.image, request.embeddings]

    def tokens_key(self, request: Request, start: int, stop: int) -> Any:
        return request.tokens[:stop]

    def name(self, request: Request, start: int, stop: int, head: int) -> str:
        key = [self.model, self.request_key(request), self.tokens_key(request, start, stop), head]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()

    def chunks(self, request: Request) -> Iterator[tuple[int, int]]:
        for stop in range(CHUNK, len(request.tokens) + 1, CHUNK):
            yield stop - CHUNK, stop

    def match(self, request: Request) -> int:
        count = 0
        for start, stop in self.chunks(request) if request.takes_stored else ():
            heads = range(self.first_head, self.first_head + self.identity["heads"][1])
            if not all(self.has(self.name(request, start, stop, head)) for head in heads):
                break
            count = stop
        return count

    def load(self, request: Request, count: int, rows: Floats) -> None:
        for start, stop in self.chunks(request):
            for i in range(rows.shape[3]):
                if start < count:
                    content = self.content(self.name(request, start, stop, self.first_head + i))
                    numbers = np.frombuffer(content, np.float32)
                    part = numbers.reshape(LAYERS, 2, stop - start, DIM)
                    rows[:, :, start : min(stop, count), i] = part[:, :, : min(stop, count) - start]

    def save(self, request: Request, rows: Floats) -> None:
        for start, stop in self.chunks(request):
            for i in range(rows.shape[3]):
                name = self.name(request, start, stop, self.first_head + i)
                if not self.is_sound(name):
                    with suppress(OSError):
                        self.write(name, self.bytes_of(rows[:, :, start:stop, i]))

    def close(self) -> None:
        pass

    def bytes_of(self, part: Floats) -> bytes:
        return part.tobytes()

    def has(self, name: str) -> bool:
        path = self.folder / name
        with suppress(OSError):
            return stat.S_ISREG(os.lstat(path).st_mode)
        return False

    def is_sound(self, name: str) -> bool:
        with suppress(OSError, ValueError):
            self.content(name)
            return True
        return False

    def content(self, name: str) -> bytes:
        """The checked bytes of a file. Raises OSError, ValueError."""
        found = self.read(name)
        if found[:32] != self.digest(name, found[32:]):
            raise ValueError(f"{name} is damaged")
        return found[32:]

    def digest(self, name: str, content: bytes) -> bytes:
        return hashlib.sha256(name.encode() + content).digest()

    def read(self, name: str) -> bytes:
        if not self.has(name):
            raise FileNotFoundError(name)
        with (self.folder / name).open("rb") as file:
            return file.read(1 << 20)

    def write(self, name: str, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.write(self.digest(name, content) + content)
            file.flush()
            os.fsync(file.fileno())
        path = self.folder / name
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        os.replace(file.name, path)


def fails(*cases: str) -> Callable[[S], S]:
    """Says which cases a store fails."""

    def add(store: S) -> S:
        FAULTS.extend((case, store) for case in cases)
        return store

    return add


# ---- models ----


@fails("models.another_layer_shares_nothing")
class KnowsShapesAlone(Sound):
    """As keys of shapes and sizes."""

    def model_key(self, identity: dict[str, Any]) -> list[Any]:
        return super().model_key(identity | {"weights": None})


@fails("models.files_that_were_replaced_share_nothing")
class KnowsThePath(Sound):
    def model_key(self, identity: dict[str, Any]) -> list[Any]:
        return super().model_key(identity | {"weights": identity["place"]})


def _digest(weights: str) -> str:
    return hashlib.sha256(weights.encode()).hexdigest()


@fails("models.some_rows_share_nothing")
class SamplesWeights(Sound):
    """Its sample lies in other rows."""

    def model_key(self, identity: dict[str, Any]) -> list[Any]:
        if identity["weights"] == _digest("rows"):
            identity = identity | {"weights": _digest("first")}
        return super().model_key(identity)


@fails("models.random_weights_share_nothing")
class ReadsTheFiles(Sound):
    """Though the engine has not read them."""

    def model_key(self, identity: dict[str, Any]) -> list[Any]:
        if identity["weights"] == _digest("random"):
            identity = identity | {"weights": _digest("first")}
        return super().model_key(identity)


@fails("models.one_name_for_two_models_shares_nothing", "models.another_name_shares")
class KnowsTheName(Sound):
    def model_key(self, identity: dict[str, Any]) -> list[Any]:
        if identity["name"]:
            identity = identity | {"weights": identity["name"]}
        return super().model_key(identity)


@fails("models.a_copy_of_the_files_shares")
class KnowsThePathToo(Sound):
    def model_key(self, identity: dict[str, Any]) -> list[Any]:
        return [*super().model_key(identity), identity["place"]]


# ---- settings ----


def _ignores(name: str) -> type[Sound]:
    """A store that does not know a field of Setup."""

    class Ignores(Sound):
        def model_key(self, identity: dict[str, Any]) -> list[Any]:
            return super().model_key(identity | {name: None})

    return _named(Ignores, f"Ignores_{name}")


def _knows(name: str) -> type[Sound]:
    """A store that keeps apart what differs in a field of Setup which changes no number."""

    class Knows(Sound):
        def model_key(self, identity: dict[str, Any]) -> list[Any]:
            return [*super().model_key(identity), identity[name]]

    return _named(Knows, f"Knows_{name}")


def _named(store: type[Sound], name: str) -> type[Sound]:
    """Where another process finds it."""
    store.__name__ = store.__qualname__ = name
    globals()[name] = store
    return store


fails("models.another_config_shares_nothing")(_ignores("epsilon"))
fails("settings.another_rotation_shares_nothing")(_ignores("theta"))
fails("settings.another_dtype_shares_nothing")(_ignores("dtype"))
fails("settings.a_rounded_cache_is_not_taken_for_an_exact_one")(_ignores("cache_dtype"))
fails("settings.precision_is_compared_layer_by_layer")(_ignores("skipped"))
fails("settings.another_quantisation_shares_nothing")(_ignores("quantization"))
fails("settings.other_blocks_share")(_knows("block_size"))
fails("settings.other_ranks_share")(_knows("ranks"))
fails("settings.other_steps_share")(_knows("step_tokens"))
fails("settings.drafts_share")(_knows("draft"))


@fails("settings.a_rotation_by_length_shares_nothing")
class KnowsNoLength(Sound):
    def longest_key(self) -> Any:
        return None


@fails("settings.other_blocks_share")
class NamesBlocks(Sound):
    """Position within the file is counted in blocks of the reader."""

    def load(self, request: Request, count: int, rows: Floats) -> None:
        super().load(request, count, rows)
        if self.identity["block_size"] != CHUNK:
            rows[:, :, :count] = np.roll(rows[:, :, :count], CHUNK, axis=2)


@fails("settings.another_layout_shares")
class StoresMemory(Sound):
    """In the order of the cache."""

    def bytes_of(self, part: Floats) -> bytes:
        return part.T.tobytes() if self.identity["layout"] else part.tobytes()


@fails("settings.other_ranks_share")
class CountsHeadsFromZero(Sound):
    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        super().__init__(folder, identity | {"heads": (0, identity["heads"][1])})


class _Refuses(Sound):
    family = ""

    def match(self, request: Request) -> int:
        return 0 if self.identity["family"] == self.family else super().match(request)


@fails("settings.windows_share")
class RefusesWindows(_Refuses):
    family = "windows"


@fails("settings.latents_share")
class RefusesLatents(_Refuses):
    family = "latents"


# ---- requests ----


@fails("requests.an_adapter_shares_nothing_with_none")
class KnowsNoAdapters(Sound):
    def request_key(self, request: Request) -> list[Any]:
        return [request.salt, request.image, request.embeddings]


@fails("requests.adapters_of_one_name_share_nothing")
class KnowsAdaptersByName(Sound):
    def request_key(self, request: Request) -> list[Any]:
        return [request.salt, request.adapter and "adapter", request.image, request.embeddings]


@fails("requests.an_image_shares_nothing_with_its_placeholders")
class KnowsNoImages(Sound):
    def request_key(self, request: Request) -> list[Any]:
        return [request.salt, request.adapter, request.embeddings]


@fails("requests.other_images_share_nothing")
class KnowsImagesBySize(Sound):
    def request_key(self, request: Request) -> list[Any]:
        is_there = request.image is not None
        return [request.salt, request.adapter, is_there, request.embeddings]


@fails("requests.embeddings_share_nothing")
class KnowsNoEmbeddings(Sound):
    def request_key(self, request: Request) -> list[Any]:
        return [request.salt, request.adapter, request.image]


@fails("requests.another_salt_shares_nothing")
class KnowsNoSalt(Sound):
    def request_key(self, request: Request) -> list[Any]:
        return [request.adapter, request.image, request.embeddings]


@fails("requests.the_same_salt_shares")
class SaltsWithItself(Sound):
    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.own = os.urandom(8).hex()
        super().__init__(folder, identity)

    def request_key(self, request: Request) -> list[Any]:
        return [*super().request_key(request), request.salt and self.own]


@fails("requests.who_wants_nothing_stored_gets_nothing")
class AlwaysTakes(Sound):
    def match(self, request: Request) -> int:
        return super().match(Request(**vars(request) | {"takes_stored": True}))


@fails("requests.another_process_finds_the_same")
class HashesByProcess(Sound):
    def request_key(self, request: Request) -> list[Any]:
        return [*super().request_key(request), hash("text")]


@fails("requests.the_same_tokens_behind_others_share_nothing")
class NamesTokensOfAChunk(Sound):
    def tokens_key(self, request: Request, start: int, stop: int) -> Any:
        return request.tokens[start:stop]


# ---- weights ----


@fails(
    "weights.files_loaded_in_place_share_nothing",
    "weights.tensors_written_in_place_share_nothing",
    "weights.weights_in_place_poison_nobody",
)
class JudgesOnce(Sound):
    """The weights of a process, when it has started."""

    first: ClassVar[dict[Path, str]] = {}

    def model_key(self, identity: dict[str, Any]) -> list[Any]:
        weights = self.first.setdefault(self.folder, identity["weights"])
        return super().model_key(identity | {"weights": weights})


@fails("weights.a_reset_loses_nothing_stored")
class ResetsWithTheEngine(Sound):
    """Each object has a random name for what it stores."""

    def request_key(self, request: Request) -> list[Any]:
        return [*super().request_key(request), id(self), time.monotonic_ns() // 10**8]


# ---- reuse ----


@fails("reuse.a_prompt_is_found_again")
class StoresNothing(Sound):
    def save(self, request: Request, rows: Floats) -> None:
        pass


@fails("reuse.most_of_a_prompt_is_found", "reuse.a_prompt_that_is_computed_in_pieces")
class FindsTheFirstChunks(Sound):
    def match(self, request: Request) -> int:
        return min(super().match(request), 128)


@fails("reuse.lengths_around_blocks")
class RoundsUp(Sound):
    """To whole chunks, of which the last ones' numbers are not there."""

    def match(self, request: Request) -> int:
        count = super().match(request)
        return min(count + CHUNK // 2, len(request.tokens)) if count else 0


@fails("reuse.a_common_beginning_is_found", "reuse.a_beginning_alone")
class NamesWholePrompts(Sound):
    def tokens_key(self, request: Request, start: int, stop: int) -> Any:
        return [request.tokens[:300], start]


@fails("reuse.a_conversation_goes_on")
class NamesLengths(Sound):
    def tokens_key(self, request: Request, start: int, stop: int) -> Any:
        return [request.tokens[:stop], len(request.tokens) // 310]


@fails("reuse.prompts_that_fork_anywhere")
class ComparesTheFirstOfAChunk(Sound):
    def tokens_key(self, request: Request, start: int, stop: int) -> Any:
        return request.tokens[: start + 1]


@fails("reuse.requests_at_once")
class RemembersByBeginning(Sound):
    """Requests that begin like one that was found are taken for it."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        super().__init__(folder, identity)
        self.known: dict[tuple[int, ...], Request] = {}

    def load(self, request: Request, count: int, rows: Floats) -> None:
        known = self.known.setdefault(request.tokens[:150], request)
        super().load(known, count, rows)


@fails("reuse.engines_by_turns")
class ListsOnce(Sound):
    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        super().__init__(folder, identity)
        self.names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()

    def has(self, name: str) -> bool:
        return name in self.names and super().has(name)


@fails("schedules.a_load_that_many_wait_for")
class AnswersOnce(Sound):
    """A prompt that was asked for is not found again."""

    asked: ClassVar[set[Request]] = set()

    def match(self, request: Request) -> int:
        if request in self.asked:
            return 0
        self.asked.add(request)
        return super().match(request)


# ---- integrity ----


class Unchecked(Sound):
    """Files are believed; what a cut one lacks is zeros."""

    def content(self, name: str) -> bytes:
        size = LAYERS * 2 * CHUNK * DIM * 4
        return self.read(name)[32 : 32 + size].ljust(size, b"\0")


fails(
    "integrity.flipped_bits",
    "integrity.flipped_pages",
    "integrity.files_that_are_cut",
    "integrity.files_of_zeros",
)(Unchecked)


@fails("integrity.files_that_have_changed_places", "integrity.files_of_another_model")
class ChecksumsContentAlone(Sound):
    def digest(self, name: str, content: bytes) -> bytes:
        return hashlib.sha256(content).digest()


@fails("integrity.files_that_have_grown")
class ReadsAll(Sound):
    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


@fails("integrity.files_that_are_gone", "integrity.gone_between_lookup_and_load")
class RemembersNames(Sound):
    """What was there once is loaded: what is not there is left as it is."""

    names: ClassVar[set[str]] = set()

    def has(self, name: str) -> bool:
        if super().has(name):
            self.names.add(name)
        return name in self.names

    def is_sound(self, name: str) -> bool:
        return self.has(name)

    def content(self, name: str) -> bytes:
        try:
            return super().content(name)
        except FileNotFoundError:
            return bytes(LAYERS * 2 * CHUNK * DIM * 4)


@fails("integrity.links_pipes_and_folders")
class OpensPipes(Sound):
    def has(self, name: str) -> bool:
        path = self.folder / name
        return path.exists() and not path.is_dir() and not path.is_char_device()


@fails("integrity.one_damage_after_the_other")
class ChecksOnce(Sound):
    """A file that was sound is not checked again."""

    sound: ClassVar[set[str]] = set()

    def content(self, name: str) -> bytes:
        if name in self.sound:
            return Unchecked.content(self, name)  # type: ignore[arg-type]
        found = super().content(name)
        self.sound.add(name)
        return found


class WithARecord(Sound):
    """A small file says what the store is; it is believed."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        super().__init__(folder, identity)
        path = folder / "record.json"
        if not path.exists():
            path.write_text(json.dumps({"chunk": CHUNK}))
        self.chunk = json.loads(path.read_text())["chunk"]


fails("integrity.records_that_are_damaged")(WithARecord)


# ---- faults ----


class WritesInPlace(Unchecked):
    """A file that is there is whole."""

    def is_sound(self, name: str) -> bool:
        return self.has(name)

    def write(self, name: str, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("wb", buffering=0) as file:
            whole = bytes(32) + content
            for at in range(0, len(whole), 1024):
                file.write(whole[at : at + 1024])


fails("faults.killed_while_it_saves", "faults.a_full_disk", "faults.short_reads_and_writes")(
    WritesInPlace
)


@fails("faults.killed_at_any_time")
class LocksWithAFile(Sound):
    """Which stays when its process is killed: nobody stores anything then."""

    def save(self, request: Request, rows: Floats) -> None:
        lock = self.folder / "lock"
        with suppress(FileExistsError):
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            time.sleep(0.05)
            super().save(request, rows)
            lock.unlink()


@fails("faults.errors_of_the_file_system")
class LeavesWhatFails(Sound):
    """A part that cannot be read is left as it is."""

    def load(self, request: Request, count: int, rows: Floats) -> None:
        with suppress(OSError, ValueError):
            super().load(request, count, rows)


@fails("faults.slow_calls")
class GivesUpSilently(Sound):
    """After 10 ms a load is over."""

    def load(self, request: Request, count: int, rows: Floats) -> None:
        begun = time.monotonic()
        for start, stop in self.chunks(request):
            if start < count and time.monotonic() - begun < 0.01:
                part = Request(**vars(request) | {"tokens": request.tokens[:stop]})
                super().load(part, min(stop, count), rows)


@fails("faults.a_folder_that_cannot_be_written", "faults.no_folder")
class RaisesWhenItSaves(Sound):
    def save(self, request: Request, rows: Floats) -> None:
        self.write("now", b"")
        super().save(request, rows)

    def write(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(self.digest(name, content) + content)
