"""The settings of KVXConnector, and checks of the engine's own configuration."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ValidationError
from vllm.version import __version__ as vllm_version

from kvx_adapters.vllm import model_refusal, num_kv_layers
from kvx_adapters.vllm.encodings import FP8, PER_TOKEN_HEAD, opaque_name
from kvx_adapters.vllm.spec import minor
from kvx_core import InvalidArgumentError, KvxError, Status, UnsupportedError
from kvx_core.connector.settings import StoreSettings
from kvx_core.snapshot import Precision


class Settings(StoreSettings):
    """The settings in KVXConnector's kv_connector_extra_config."""

    async_load: bool = False  # load beside other requests' steps; prefix caching always does
    layerwise: bool = False  # copy each layer once it is computed, not all after the last one
    # Of a hybrid model: store the states after one in so many tokens too, in prompts and, without
    # asynchronous scheduling, in answers.
    state_every_tokens: int | None = Field(default=None, ge=1)
    # Compute what is found where that is sooner than loading it. None: where a tier is far.
    load_or_compute: bool | None = None
    share_embeddings: bool = True  # store and load requests with prompt embeddings, by their bytes
    # The names of weights that were replaced while the engine ran: of their files only, or also
    # vLLM's weight_version, which then means the same weights on every engine of this model.
    weights: Literal["files", "versioned"] = "files"

    @property
    def loads_beside(self) -> bool:
        """True if loads run beside steps: no step waits for a network."""
        return self.async_load or self.is_far

    @property
    def chooses(self) -> bool:
        """True if requests compute what they would load later than that."""
        return self.is_far if self.load_or_compute is None else self.load_or_compute

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        """Reads the settings of an engine. Raises InvalidArgumentError, which names every wrong
        field.
        """
        return cls.read(vllm_config.kv_transfer_config)

    @classmethod
    def read(cls, transfer: Any) -> Self:
        """Reads the settings of an engine.

        transfer: vllm's KVTransferConfig
        Raises InvalidArgumentError as `of` does.
        """
        found = dict(transfer.kv_connector_extra_config)
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


def check_settings(transfer: Any) -> None:
    """Rejects settings that can never work, before vLLM starts its engine processes.

    transfer: vllm's KVTransferConfig
    Raises SettingsError.
    """
    try:
        Settings.read(transfer).check(writes=transfer.is_kv_producer)
    except (KvxError, ValueError) as error:
        raise SettingsError(f"KVX cannot start with these settings: {error}") from None


def check_model(model_config: Any) -> None:
    """Rejects a model whose prefixes cannot be shared, before its weights are loaded.

    model_config: vllm's ModelConfig
    Raises SettingsError.
    """
    if reason := model_refusal(model_config):
        raise SettingsError(
            f"KVXConnector does not share prefixes of {model_config.hf_text_config.model_type}: "
            f"{reason}. `kvx doctor --model` says what its caches hold. Serve it without "
            "KVXConnector"
        )


class SettingsError(KvxError, RuntimeError):
    """The connector's settings can never work.

    It is no ValueError, because pydantic would put the message of a ValueError in the middle of a
    report on VllmConfig.
    """

    status = Status.INVALID_ARGUMENT


def check_engine(vllm_config: Any, settings: Settings) -> None:
    """Raises UnsupportedError for engines whose blocks do not hold whole tokens in order, or whose
    keys and values depend on more than the model's files and the tokens before.
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
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        raise UnsupportedError(
            "kv_sharing_fast_prefill is True, expected False: a step then computes some layers for "
            "its last tokens only, which has not been tried"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):  # until 0.31
        raise UnsupportedError(
            "calculate_kv_scales is True, expected False: tokens loaded before the first forward "
            "pass would be stored with scales that this pass then replaces"
        )


def precisions(model_config: Any, cache_config: Any) -> list[Precision]:
    """Returns the precision of each layer's values: of the arithmetic and of the cache.

    model_config: vllm's ModelConfig; cache_config: vllm's CacheConfig
    Source: vllm 0.32 config/cache.py, CacheConfig; model_executor/layers/attention/attention.py
    """
    dtype, num_layers = model_config.dtype, num_kv_layers(model_config)
    found = [_of_most_layers(dtype, cache_config.cache_dtype)] * num_layers
    # Skipped layers store values in the dtype of the model.
    skipped = set(getattr(cache_config, "kv_cache_dtype_skip_layers", None) or ())
    if "sliding_window" in skipped:
        skipped |= {str(layer) for layer in _windowed(model_config, cache_config, num_layers)}
    for layer in range(num_layers):
        if str(layer) in skipped:
            found[layer] = Precision.of(dtype)
    return found


def _windowed(model_config: Any, cache_config: Any, num_layers: int) -> list[int]:
    """Returns the layers with a sliding window. `never_found` later checks the worker's layers.

    Source: vllm 0.32 model_executor/models/gemma4.py, Gemma4DecoderLayer; attention/attention.py
    """
    kinds = getattr(model_config.hf_text_config, "layer_types", None)
    if kinds is None:  # all layers are alike
        has_windows = getattr(cache_config, "sliding_window", None) is not None
        return list(range(num_layers)) if has_windows else []
    return [i for i, kind in enumerate(kinds[:num_layers]) if kind == "sliding_attention"]


def _of_most_layers(dtype: Any, cache_dtype: str) -> Precision:
    if cache_dtype == "auto":
        return Precision.of(dtype)
    if cache_dtype in ("float16", "bfloat16", "float32"):
        return Precision.of(dtype, cache_dtype)
    if cache_dtype in FP8:
        return Precision.of(dtype, FP8[cache_dtype])
    if cache_dtype in PER_TOKEN_HEAD:
        return Precision.of(dtype, PER_TOKEN_HEAD[cache_dtype], vector_scales=True)
    return Precision.of(opaque=opaque_name(minor(vllm_version), cache_dtype))
