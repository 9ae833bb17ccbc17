"""The settings of KVXConnector, and what it requires of the engine's own configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvx_adapters.vllm.encodings import FP8, opaque_name
from kvx_adapters.vllm.spec import minor
from kvx_adapters.vllm_plugin.identity import model_record
from kvx_core import DType, InvalidArgumentError, UnsupportedError
from kvx_core.snapshot import Accept, Precision, StorageFormat, read_key
from kvx_core.stores.blobs import Directory
from kvx_core.stores.prefix import PrefixStore
from kvx_core.stores.root import Group

_MAX_SALTS = 1024


class Settings(BaseModel):
    """kv_connector_extra_config of KVXConnector."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path  # the store's directory; made if it does not exist
    fingerprint: str | None = None  # in place of a digest of the model's files
    fingerprint_sampling: bool = False  # digest only 4 KiB of each tensor
    chunk_tokens: int | None = Field(default=None, ge=1)  # per file; None: the store's own
    async_load: bool = False  # load beside other requests' steps; always with prefix caching
    layerwise: bool = False  # copy each layer when it is computed, not all after the last
    save_generated: bool = True  # save generated tokens too, not only prompts
    min_tokens: int = Field(default=8, ge=1)  # load at least this many: computing fewer is faster
    max_bytes: int | None = Field(
        default=None, gt=0
    )  # of the directory; then the least recently used files are deleted
    group: Group = "none"  # what the group of the directory may do: see kvx_core.Directory
    accept: Accept = "same"  # "lossy": load what is less precise than this engine's cache too
    format: str | None = None  # what K and V are stored in, as "q8_0"; None: as the cache has them
    key_file: Path | None = None  # its secret signs files; files not signed with it are ignored
    writer_threads: int = Field(default=1, ge=1)
    max_pending_bytes: int = Field(
        default=4 << 30, gt=0
    )  # copied, not yet written: beyond it saves are dropped

    @field_validator("format")
    @classmethod
    def _is_a_format(cls, name: str | None) -> str | None:
        StorageFormat.of(name)
        return name

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        """Raises InvalidArgumentError, which names every wrong field."""
        found = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        try:
            return cls(**found)
        except ValidationError as error:
            wrong = "; ".join(
                f"kv_connector_extra_config.{'.'.join(map(str, e['loc']))}: {e['msg']}"
                for e in error.errors()
            )
            raise InvalidArgumentError(
                f"{wrong}. KVXConnector needs at least {{'path': '/the/stores/directory'}}"
            ) from None


def check_engine(vllm_config: Any, settings: Settings) -> None:
    """Raises UnsupportedError for engines whose blocks do not hold whole tokens in order, or whose
    tokens depend on more than the model's files.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedError(
                f"{name} is {getattr(parallel, name)}, expected 1: its ranks share out the tokens "
                "of a block, which KVXConnector does not put together again"
            )
    in_parts = any(getattr(parallel, name, False) for name in ("enable_dbo", "use_ubatching"))
    if settings.layerwise and in_parts:
        raise UnsupportedError(
            "layerwise is True with enable_dbo or ubatch_size, expected one of them: a step then "
            "computes a layer in parts, and it would be copied after the first"
        )
    for part, name in (
        (vllm_config, "diffusion_config"),
        (vllm_config.attention_config, "use_non_causal"),
    ):
        if getattr(part, name, None):
            raise UnsupportedError(
                f"{name} is {getattr(part, name)!r}, expected none: where tokens see those after "
                "them, the keys and values of a prefix depend on what follows it"
            )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):  # until 0.31
        raise UnsupportedError(
            "calculate_kv_scales is True, expected False: tokens loaded before the first forward "
            "pass would be stored with scales that this pass then replaces"
        )


class Stores:
    """The stores of an engine's model, by cache_salt: different salts share nothing."""

    def __init__(self, vllm_config: Any, settings: Settings, window: int) -> None:
        """window: the shortest sliding window of a cache group; 0: there is none"""
        model = vllm_config.model_config
        self.fingerprint = model_record(vllm_config, settings).fingerprint
        self._store = PrefixStore(
            Directory(settings.path.expanduser(), settings.max_bytes, group=settings.group),
            fingerprint=self.fingerprint,
            num_layers=model.get_total_num_hidden_layers(),
            total_kv_heads=model.get_total_num_kv_heads(),
            chunk_tokens=settings.chunk_tokens,
            # When a chunk is full, its beginning must not have left the window.
            new_chunk_tokens=min(128, 1 << (window.bit_length() - 1)) if window else 128,
            precision=precision(model.dtype, vllm_config.cache_config),
            accept=settings.accept,
            format=settings.format,
            key=None if settings.key_file is None else read_key(settings.key_file.expanduser()),
        )
        self._salted: dict[str, PrefixStore] = {}

    @property
    def chunk_tokens(self) -> int:
        return self._store.chunk_tokens

    def __getitem__(self, salt: str) -> PrefixStore:
        store = self._salted.get(salt)
        if store is None:
            if len(self._salted) >= _MAX_SALTS:
                self._salted.clear()
            store = self._salted[salt] = self._store.salted(salt)
        return store


def precision(dtype: Any, cache_config: Any) -> Precision:
    """The precision of an engine's values: the coarsest of its arithmetic and its layers' caches.

    dtype: vllm's ModelConfig.dtype; cache_config: vllm's CacheConfig
    Source: vllm 0.32 config/cache.py, CacheConfig.cache_dtype
    """
    name = cache_config.cache_dtype
    if name == "auto":
        return Precision.of(dtype)
    if name in ("float16", "bfloat16", "float32"):
        return Precision.of(dtype, name)
    if name in FP8:
        return Precision.of(dtype, FP8[name])
    if name == "fp8_per_token_head":
        return Precision.of(dtype, DType.F8_E4M3, vector_scales=True)
    from vllm.version import __version__ as version

    opaque = Precision.of(opaque=opaque_name(minor(version), name))
    # Skipped layers store values in the dtype of the model.
    skipped = getattr(cache_config, "kv_cache_dtype_skip_layers", None)
    return opaque.meet(Precision.of(dtype)) if skipped else opaque
