"""The settings that the connectors of all engines share, and the stores that they open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from kvx_core.errors import InvalidArgumentError
from kvx_core.model.record import ModelRecord
from kvx_core.snapshot import (
    Accept,
    PlaneKind,
    Precision,
    StorageFormat,
    StoreError,
    read_key,
)
from kvx_core.snapshot.secrets import Secrets, secret_of_variable
from kvx_core.stores.access import check_access
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.blobs import Directory
from kvx_core.stores.config import MIN_CHUNK_TOKENS, MOST_CHUNK_TOKENS, read_config
from kvx_core.stores.inventory import num_bytes_of
from kvx_core.stores.prefix import PrefixStore
from kvx_core.stores.root import Group
from kvx_core.stores.tiers import Tiered, Tiers
from kvx_core.stores.tiers.levels import directory_of, join_levels


class StoreSettings(BaseModel):
    """The settings of a connector: where it stores prefixes, and how much it may use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | None = None  # the store's directory; made if it does not exist
    # In place of `path`: levels of the store, such as ["memory:8GB", "/nvme/kvx", "s3://bucket/kvx"]
    tiers: tuple[str, ...] | None = Field(default=None, validate_default=True)
    fingerprint: str | None = None  # replaces the digest of the model's files
    fingerprint_sampling: bool = False  # digest only 4 KiB of each tensor
    chunk_tokens: int | None = Field(
        default=None, ge=MIN_CHUNK_TOKENS, le=MOST_CHUNK_TOKENS
    )  # tokens per file; None: as the store has it
    save_generated: bool = True  # save prompts and generated tokens, not only prompts
    min_tokens: int = Field(default=8, ge=1)  # fewer tokens are not loaded: computing is faster
    max_bytes: int | None = Field(
        default=None, gt=0
    )  # of the directory; above it the least recently used files are deleted. None: see `store`
    group: Group = "none"  # the rights of the directory's group: see kvx_core.Directory
    accept: Accept = "same"  # "lossy": load entries less precise than this engine's cache too
    format: str | None = None  # the format of stored K and V, as "q8_0"; None: the cache's
    # Files of secrets. The first secret signs files of the store; a file signed with any of them is
    # loaded: [new, old] while keys change. None: nothing is signed.
    key_files: tuple[Path, ...] | None = None
    encryption_key_files: tuple[Path, ...] | None = None  # likewise, to encrypt with AES-256-GCM
    encryption_key_variable: str | None = None  # an environment variable with one such secret
    writer_threads: int = Field(default=2, ge=1)
    loader_threads: int = Field(default=2, ge=1)
    max_pending_bytes: int = Field(
        default=4 << 30, gt=0
    )  # copied and not yet written; above it saves are dropped
    lookup_seconds: float = Field(default=1.0, ge=0)  # after it a prompt is computed
    fresh_seconds: float = Field(default=0.25, ge=0)  # how long memory answers for the disk
    tier_seconds: float = Field(default=5.0, gt=0)  # a call to a far tier has failed after it
    shutdown_seconds: float = Field(default=60.0, ge=0)  # after it files stay unwritten

    @field_validator("max_bytes", "max_pending_bytes", mode="before")
    @classmethod
    def _with_a_unit(cls, size: object, field: ValidationInfo) -> object:
        """Converts sizes that are text, such as "50GB"."""
        return None if size is None else num_bytes_of(size, field.field_name or "")

    @field_validator("key_files", "encryption_key_files", mode="before")
    @classmethod
    def _one_or_several(cls, paths: object) -> object:
        if isinstance(paths, (str, Path)):
            return (paths,)
        if paths in ([], ()):
            raise ValueError("expected a path, or a list of them: [new, old]")
        return paths

    @field_validator("tiers")
    @classmethod
    def _or_a_path(
        cls, tiers: tuple[str, ...] | None, info: ValidationInfo
    ) -> tuple[str, ...] | None:
        if "path" in info.data and (tiers is None) == (info.data["path"] is None):
            found = "neither path nor tiers is" if tiers is None else "path and tiers are both"
            raise ValueError(f"{found} set, expected one of them")
        if tiers is not None:
            Tiers.parse(tiers)
        return tiers

    @field_validator("format")
    @classmethod
    def _is_a_format(cls, name: str | None) -> str | None:
        StorageFormat.of(name)
        return name

    def store(
        self,
        *,
        fingerprint: str | ModelRecord,
        num_layers: int,
        total_kv_heads: int | Sequence[int],
        precision: Precision | Sequence[Precision],
        new_chunk_tokens: int = 128,
        windows: Sequence[int] | None = None,
        planes: Iterable[PlaneKind] = (),
        state_heads: Sequence[int] | None = None,
    ) -> PrefixStore:
        """Opens the store of a model: see PrefixStore.

        Without max_bytes the store keeps the limit that it was made with: the max_bytes of the
        engine that made it or, if its settings had none, half of the space then free on the disk.
        A store that an earlier version of KVX made without a limit stays without a limit.
        Raises InvalidArgumentError, StoreError.
        """
        blobs = self._blobs()
        directory = directory_of(blobs)
        key, encryption_key = self._keys()
        if directory is not None and self.max_bytes is None and read_config(blobs) is None:
            directory.max_bytes = max(directory.free_bytes() // 2, 1)
        store = PrefixStore(
            blobs,
            fingerprint=fingerprint,
            num_layers=num_layers,
            total_kv_heads=total_kv_heads,
            chunk_tokens=self.chunk_tokens,
            new_chunk_tokens=new_chunk_tokens,
            precision=precision,
            accept=self.accept,
            format=self.format,
            key=key,
            encryption_key=encryption_key,
            windows=windows,
            planes=planes,
            state_heads=state_heads,
        )
        store.index.fresh_seconds = self.fresh_seconds
        config = read_config(blobs, Secrets.of(key, encryption_key))
        if config is not None:
            join_levels(blobs, config)
            if directory is not None and self.max_bytes is None:  # another engine may have made it
                directory.max_bytes = config.max_bytes
        return store

    def _blobs(self) -> BlobStore:
        """Returns where the store's files are. Raises InvalidArgumentError."""
        levels = self._tiers.open(self.max_bytes, group=self.group, deadline=self.tier_seconds)
        return levels[0] if len(levels) == 1 else Tiered(levels)

    @property
    def lookup_threads(self) -> int:
        """Threads for lookups: behind a network each waits for several round trips."""
        return 16 if self.is_far else 2

    @property
    def is_far(self) -> bool:
        """True if a tier is behind a network."""
        return bool(self._tiers.urls)

    @property
    def _tiers(self) -> Tiers:
        return Tiers.parse([str(self.path)] if self.tiers is None else self.tiers)

    def _keys(self) -> tuple[list[bytes] | None, list[bytes] | None]:
        """Returns the keys that sign and the keys that encrypt. In each list the first key writes.

        Raises InvalidArgumentError.
        """
        if self.encryption_key_files is not None and self.encryption_key_variable is not None:
            raise InvalidArgumentError(
                "encryption_key_files and encryption_key_variable are set, expected one of them"
            )
        if self.encryption_key_variable is not None:
            encryption: list[bytes] | None = [secret_of_variable(self.encryption_key_variable)]
        else:
            encryption = _read_all(self.encryption_key_files, "encryption_key_files")
        return _read_all(self.key_files, "key_files"), encryption

    def check(self, *, writes: bool) -> None:
        """Checks the settings as far as it can before an engine's model is loaded.

        writes: True if the engine saves
        Reads the keys and checks access to the directory; makes no file or folder. Does not judge
        the contents of the store. Raises InvalidArgumentError for settings that can never work.
        """
        Secrets.of(*self._keys())
        directory = directory_of(self._blobs())
        if directory is not None:
            check_access(directory, writes=writes)

    def told(self, fingerprint: str, chunk_tokens: int) -> str:
        """Returns a log line for the start of an engine: where its prefixes go."""
        tiers = self._tiers
        places = [] if tiers.memory is None else [f"memory ({tiers.memory / 1e9:.1f} GB)"]
        limits = ""
        if tiers.path is not None:
            directory = Directory(tiers.path.absolute())
            places.append(str(directory.root))
            try:
                max_bytes = self._limit_of(directory)
                limit = "no limit" if max_bytes is None else f"at most {max_bytes / 1e9:.1f} GB"
                free = f"{directory.free_bytes() / 1e9:.1f} GB"
            except StoreError as error:
                limit, free = "limit unknown", f"unknown ({error})"
            limits = f", {limit}, free there: {free}"
        places += tiers.urls
        return (
            f"KVX keeps prefixes in {', '.join(places)}: model {fingerprint[:12]}, chunks of "
            f"{chunk_tokens} tokens{limits}"
        )

    def limit_warning(self) -> str:
        """Returns a warning for the log if the directory has no limit, else ""."""
        path = self._tiers.path
        if path is None:
            return ""
        directory = Directory(path.absolute())
        with suppress(StoreError):
            if read_config(directory) is not None and self._limit_of(directory) is None:
                return (
                    f"The KVX store {directory.root} has no limit: it grows until the disk is "
                    "full. Set `max_bytes`, such as '50GB'"
                )
        return ""

    def _limit_of(self, directory: Directory) -> int | None:
        """Returns the limit of an existing store; None: it has none. Raises StoreError."""
        if self.max_bytes is not None:
            return self.max_bytes
        config = read_config(directory)
        return None if config is None else config.max_bytes


def _read_all(paths: Sequence[Path] | None, field: str) -> list[bytes] | None:
    """Reads the keys in files. Raises InvalidArgumentError, whose message names `field`."""
    return None if paths is None else [read_key(path.expanduser(), field) for path in paths]
