"""Makes the store that a list of tiers names, such as ["memory:8GB", "/nvme/kvx", "s3://bucket/kvx"]."""

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
from kvx_core.tiers.memory import MemoryStore
from kvx_core.tiers.objects import SCHEMES, ObjectStore
from kvx_core.tiers.tiered import Tiered

_MEMORY = "memory:"
_URL = re.compile(r"([a-z][a-z0-9+]*)://")
_FORMS = 'expected "memory:8GB", a directory, or a URL such as "s3://bucket/folder"'


class Tiers(NamedTuple):
    """The tiers that a list names.

    memory: bytes of the memory tier; None: there is none
    path:   of the directory; None: there is none
    url:    of the object store; "": there is none
    """

    memory: int | None
    path: Path | None
    url: str

    @classmethod
    def parse(cls, tiers: Sequence[str]) -> Tiers:
        """Raises InvalidArgumentError."""
        memory, path, url, last = None, None, "", -1
        for i, text in enumerate(tiers):
            name = f"tiers[{i}]"
            if not isinstance(text, str) or not text:
                raise InvalidArgumentError(f"{name} is {text!r}, {_FORMS}")
            if text.startswith(_MEMORY):
                memory, rank = num_bytes_of(text.removeprefix(_MEMORY), name), 0
            elif found := _URL.match(text):
                if found[1] not in SCHEMES:
                    raise InvalidArgumentError(
                        f"{name} is {text!r}, expected one of {', '.join(SCHEMES)} before ://"
                    )
                url, rank = text, 2
            else:
                path, rank = Path(text).expanduser(), 1
            if rank <= last:
                raise InvalidArgumentError(
                    f"{name} is {text!r} behind {tiers[i - 1]!r}, expected memory, then a "
                    "directory, then an object store, each at most once"
                )
            last = rank
        if path is None and not url:
            raise InvalidArgumentError(
                f"tiers is {list(tiers)}, expected a directory or an object store in it: memory "
                "alone does not last"
            )
        return cls(memory, path, url)

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
            below = self.url or str(self.path and self.path.absolute())
            name = hashlib.sha256(below.encode()).hexdigest()[:16]
            levels.append(MemoryStore(name, self.memory))
        if self.path is not None:
            levels.append(Directory(self.path, max_bytes, group=group))
        if self.url:
            levels.append(ObjectStore(self.url, deadline=deadline))
        return levels


def directory_of(blobs: BlobStore) -> Directory | None:
    """Returns the directory on a disk among the levels of a store; None: there is none."""
    levels = blobs.levels if isinstance(blobs, Tiered) else (blobs,)
    found = (one for one in levels if isinstance(one, Directory) and not one.is_volatile)
    return next(found, None)


def check_levels(blobs: BlobStore, config: StoreConfig) -> None:
    """Raises StoreError if a level was made with other chunk_tokens, or for other keys, than
    `config` says: its files would never be found. A level that does not answer is not judged.
    """
    for level in blobs.levels if isinstance(blobs, Tiered) else ():
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
