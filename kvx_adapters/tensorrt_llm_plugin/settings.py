"""The settings of the connector."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvx_core import InvalidArgumentError
from kvx_core.snapshot import Accept, StorageFormat
from kvx_core.stores.root import Group

# KvCacheConnectorConfig has no fields for a connector's own settings: they are in the environment.
# TensorRT-LLM passes variables that begin with TRTLLM on to the processes of its ranks.
# Source: TensorRT-LLM main 2026-09, llmapi/llm_args.py, KvCacheConnectorConfig;
# llmapi/mpi_session.py, MpiPoolSession._start_mpi_pool
VARIABLE = "TRTLLM_KVX"


class Settings(BaseModel):
    """$TRTLLM_KVX, a JSON object."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path  # the store's directory; made if it does not exist
    fingerprint: str | None = None  # in place of a digest of the model's files
    fingerprint_sampling: bool = False  # digest only 4 KiB of each tensor
    chunk_tokens: int | None = Field(default=None, ge=1)  # per file; None: the store's own
    save_generated: bool = True  # save generated tokens too, not only prompts
    min_tokens: int = Field(default=32, ge=1)  # load at least this many: computing fewer is faster
    max_bytes: int | None = Field(
        default=None, gt=0
    )  # of the directory; then the least recently used files are deleted
    group: Group = "none"  # what the group of the directory may do: see kvx_core.Directory
    accept: Accept = "same"  # "lossy": load what is less precise than this engine's pool too
    format: str | None = None  # what K and V are stored in, as "q8_0"; None: as the cache has them
    key_file: Path | None = None  # its secret signs files; files not signed with it are ignored
    # Loaded in one step at most; TensorRT-LLM computes the rest. With several ranks it is one MPI
    # message, which must be less than 2 GiB.
    max_load_bytes: int = Field(default=1 << 30, gt=0)
    max_pending_bytes: int = Field(
        default=4 << 30, gt=0
    )  # copied, not yet written: beyond it saves are dropped
    # Of an FP8 pool. TensorRT-LLM's PyTorch backend leaves it at 1, whatever the checkpoint says.
    # Source: TensorRT-LLM main 2026-09, _torch/attention_backend/trtllm.py,
    # TrtllmAttention.__init__
    kv_scaling_factor: float = Field(default=1.0, gt=0)
    is_neox: bool | None = None  # PositionalEmbeddingParams.is_neox, if model.py does not know it
    rotary_dim: int | None = Field(default=None, ge=0)  # RopeParams.dim, likewise

    @field_validator("format")
    @classmethod
    def _is_a_format(cls, name: str | None) -> str | None:
        StorageFormat.of(name)
        return name

    @classmethod
    def read(cls) -> Self:
        """Reads the environment. Raises InvalidArgumentError, which names every wrong field."""
        try:
            return cls.model_validate_json(os.environ.get(VARIABLE, ""))
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join([VARIABLE, *map(str, e['loc'])])}: {e['msg']}" for e in error.errors()
            )
            raise InvalidArgumentError(
                f"{wrong}. The environment needs at least "
                f'{VARIABLE}=\'{{"path": "/the/stores/directory"}}\''
            ) from None
