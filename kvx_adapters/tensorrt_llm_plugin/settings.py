"""The settings of the connector, read from the environment."""

from __future__ import annotations

import os
from typing import Self

from pydantic import Field, ValidationError

from kvx_core import InvalidArgumentError
from kvx_core.connector.settings import StoreSettings

# KvCacheConnectorConfig has no field for a connector's own settings: the environment has them.
# TensorRT-LLM passes variables that begin with TRTLLM on to the processes of its ranks.
# Source: TensorRT-LLM main 2026-09, llmapi/llm_args.py, KvCacheConnectorConfig;
# llmapi/mpi_session.py, MpiPoolSession._start_mpi_pool
VARIABLE = "TRTLLM_KVX"


class Settings(StoreSettings):
    """The settings in $TRTLLM_KVX, a JSON object."""

    min_tokens: int = Field(default=32, ge=1)  # fewer tokens are not loaded: computing is faster
    # The most bytes loaded in one step; TensorRT-LLM computes the rest. With several ranks they are
    # one MPI message, which must be less than 2 GiB.
    max_load_bytes: int = Field(default=1 << 30, gt=0)
    # The scheduler waits for the store while each next chunk is found or read within this time, for
    # at most lookup_seconds.
    chunk_seconds: float = Field(default=0.1, ge=0)
    # The factor of an FP8 pool. TensorRT-LLM's PyTorch backend leaves it at 1, whatever factor the
    # checkpoint has.
    # Source: TensorRT-LLM main 2026-09, _torch/attention_backend/trtllm.py,
    # TrtllmAttention.__init__
    kv_scaling_factor: float = Field(default=1.0, gt=0)
    is_neox: bool | None = None  # PositionalEmbeddingParams.is_neox, for models unknown to model.py
    rotary_dim: int | None = Field(default=None, ge=0)  # RopeParams.dim, likewise

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
