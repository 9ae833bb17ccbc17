"""Tiers: makes the stores that a list such as ["memory:8GB", "/nvme", "s3://bucket/kvx"] names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvx_core.errors import InvalidArgumentError, StoreError
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.blobs import Directory
from kvx_core.stores.config import StoreConfig, read_config
from kvx_core.stores.inventory import num_bytes_of
from kvx_core.stores.root import Group
from kvx_core.stores.tiers import objects, valkey
from kvx_core.stores.tiers.memory import MemoryStore
from kvx_core.stores.tiers.objects import ObjectStore
from kvx_core.stores.tiers.remote import RemoteStore
from kvx_core.stores.tiers.tiered import Tiered
from kvx_core.stores.tiers.valkey import ValkeyStore

_MEMORY = "memory:"
_CONFIG = "kvx-store."  # how names of kvx-store.json and its MACs begin
_MOST_CONFIG = 4096  # bytes of one of them
_URL = re.compile(r"([a-z][a-z0-9+]*)://")
_FAR = (*objects.SCHEMES, *valkey.SCHEMES)
_FORMS = 'expected "memory:8GB", a directory, or a URL such as "s3://bucket/folder"'


class Tiers(NamedTuple):
    """The tiers that a list names.

    memory: bytes of the memory tier; None: there is none
    path:   of the directory; None: there is none
    urls:   of the stores behind a network: a Valkey server, an object store
    """

    memory: int | None
    path: Path | None
    urls: tuple[str, ...]

    @classmethod
    def parse(cls, tiers: Sequence[str]) -> Tiers:
        """Raises InvalidArgumentError."""
        memory, path, urls, last = None, None, list[str](), -1
        for i, text in enumerate(tiers):
            name = f"tiers[{i}]"
            if not isinstance(text, str) or not text:
                raise InvalidArgumentError(f"{name} is {text!r}, {_FORMS}")
            if text.startswith(_MEMORY):
                memory, rank = num_bytes_of(text.removeprefix(_MEMORY), name), 0
            elif found := _URL.match(text):
                if found[1] not in _FAR:
                    raise InvalidArgumentError(
                        f"{name} is {text!r}, expected one of {', '.join(_FAR)} before ://"
                    )
                urls.append(text)
                rank = 3 if found[1] in objects.SCHEMES else 2
            else:
                path, rank = Path(text).expanduser(), 1
            if rank <= last:
                raise InvalidArgumentError(
                    f"{name} is {text!r} behind {tiers[i - 1]!r}, expected memory, then a "
                    "directory, a Valkey server, an object store, each at most once"
                )
            last = rank
        if path is None and not urls:
            raise InvalidArgumentError(
                f"tiers is {list(tiers)}, expected a directory or a URL in it: memory alone does "
                "not last"
            )
        return cls(memory, path, tuple(urls))

    def open(
        self, max_bytes: int | None = None, *, group: Group = "none", deadline: float = 5.0
    ) -> list[BlobStore]:
        """Opens the tiers, the fastest first. Makes no file but the folder of a memory tier.

        max_bytes: of the directory
        deadline:  seconds that a call to the object store may take
        Raises InvalidArgumentError.
        """
        levels: list[BlobStore] = []
        if self.memory is not None:
            below = self.urls[-1] if self.urls else str(self.path and self.path.absolute())
            name = hashlib.sha256(below.encode()).hexdigest()[:16]
            levels.append(MemoryStore(name, self.memory))
        if self.path is not None:
            levels.append(Directory(self.path, max_bytes, group=group))
        return levels + [far_store(url, deadline=deadline) for url in self.urls]


def far_store(url: str, *, deadline: float) -> RemoteStore:
    """Returns the store that a URL names. Raises InvalidArgumentError."""
    kind = ValkeyStore if url.partition("://")[0] in valkey.SCHEMES else ObjectStore
    return kind(url, deadline=deadline)


def directory_of(blobs: BlobStore) -> Directory | None:
    """Returns the directory on a disk among the levels of a store; None: there is none."""
    levels = blobs.levels if isinstance(blobs, Tiered) else (blobs,)
    found = (one for one in levels if isinstance(one, Directory) and not one.is_volatile)
    return next(found, None)


def join_levels(blobs: BlobStore, config: StoreConfig) -> None:
    """Makes each level of a store a store like the whole, so that it can be used alone.

    config: of the whole, which has been checked
    Raises StoreError if a level was made with other chunk_tokens, or for other keys: its files
    would never be found. A level that does not answer is not judged.
    """
    if not isinstance(blobs, Tiered):
        return
    for level in blobs.levels:
        other = None
        with suppress(StoreError):
            other = read_config(level)
        if other is None:
            continue
        wanted = config.chunk_tokens, config.is_encrypted
        if (other.chunk_tokens, other.is_encrypted) != wanted:
            raise StoreError(
                f"{level.path_of('kvx-store.json')} has chunk_tokens {other.chunk_tokens} and is "
                f"{'' if other.is_encrypted else 'not '}encrypted, expected {config.chunk_tokens} "
                f"and {'' if config.is_encrypted else 'not '}encrypted, as the tier above it. Use "
                "another place for one of them, or delete it: what it holds is computed again"
            )
    names = sorted(name for name in blobs.names("") if name.startswith(_CONFIG))
    for name in reversed(names):  # the MACs before what they are of
        found = blobs.read(name, _MOST_CONFIG)
        if found is not None:
            blobs.share(name, found)
