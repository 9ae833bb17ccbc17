"""The ModelRecord of what vLLM serves, under which its keys and values are stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.version import __version__ as vllm_version

from kvx_adapters import vllm
from kvx_core import ModelRecord, UnsupportedError, model_files_digest
from kvx_core.connector.local_model import local_model
from kvx_core.model_files import model_config_digest

if TYPE_CHECKING:
    from kvx_adapters.vllm_plugin.settings import Settings

logger = init_logger("vllm.kvx")


def model_record(vllm_config: Any, settings: Settings) -> ModelRecord:
    """The record of an engine. Raises UnsupportedError if its model's files are not known."""
    files = settings.fingerprint or _files(vllm_config, sample=settings.fingerprint_sampling)
    return vllm.model_record(vllm_config, files, os.environ, version=vllm_version)


def _files(vllm_config: Any, *, sample: bool) -> str:
    """A digest of the files of the model that an engine has loaded."""
    model, load = vllm_config.model_config, vllm_config.load_config
    directory = local_model(model.model, model.revision, _OWN, cache=load.download_dir)
    config = None
    if not (directory / "config.json").is_file():  # only weights go to download_dir
        config = local_model(model.model, model.revision, _OWN)
    if model.hf_config_path:
        revision = getattr(model, "_hf_config_revision", None) or model.revision
        config = local_model(model.hf_config_path, revision, _OWN)
    if load.load_format == "dummy":
        return model_config_digest(directory, config=config)
    if not vllm.loads_files(vllm_config) or model.model_weights:
        raise UnsupportedError(
            f"load_format is {load.load_format!r} and model_weights {model.model_weights!r}, so "
            f"the weights are not those of {directory}/*.safetensors. {_OWN}"
        )
    found = model_files_digest(directory, config=config, sample=sample, progress=_log)
    return f"{found} by {load.load_format}" if _depends_on_format(directory, load) else found


def _depends_on_format(directory: Path, load: Any) -> bool:
    """Whether load_format decides which files are loaded: Mistral's, or those of a rank.

    Source: vllm 0.32 model_executor/model_loader/default_loader.py, _prepare_weights
    """
    is_mistral = {path.name.startswith("consolidated") for path in directory.glob("*.safetensors")}
    return len(is_mistral) == 2 or "sharded" in str(load.load_format)


_OWN = (
    "Give kv_connector_extra_config a 'fingerprint' that is the same for all engines that serve "
    "these weights, and for no others"
)


def _log(read: int, total: int) -> None:
    logger.info(
        "KVX reads the model's weights once, to compute their digest: %.1f of %.1f GB",
        read / 1e9,
        total / 1e9,
    )
