"""Makes the ModelRecord of the model that vLLM serves, under which its tokens are stored."""

from __future__ import annotations

import copy
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.version import __version__ as vllm_version

from kvx_adapters import vllm
from kvx_adapters.vllm_plugin.settings import Settings
from kvx_core import KvxError, ModelRecord, UnsupportedError, model_files_digest
from kvx_core.connector.local_model import local_model
from kvx_core.connector.weights import Files
from kvx_core.model.adapter_files import adapter_files_digest, adapter_files_state
from kvx_core.model.config_values import changed, values
from kvx_core.model.files import model_config_digest
from kvx_core.model.tensor_digests import tensor_types

logger = init_logger("vllm.kvx")


def model_record(vllm_config: Any, settings: Settings) -> ModelRecord:
    """Returns an engine's record. Raises UnsupportedError if its model's files are not known."""
    files = settings.fingerprint or _files(vllm_config, sample=settings.fingerprint_sampling)
    return vllm.model_record(vllm_config, files, os.environ, version=vllm_version)


def _files(vllm_config: Any, *, sample: bool) -> str:
    """Returns a digest of the model files that an engine has loaded. Raises UnsupportedError."""
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


def adapter_settings(vllm_config: Any) -> str:
    """Returns the settings with which vLLM applies LoRA adapters, "" if they are the default."""
    config = vllm_config.lora_config
    names = [name for name in values(config) if name not in _LORA_IGNORED]
    found = changed(config, names)
    if config.lora_dtype == vllm_config.model_config.dtype:
        found.pop("lora_dtype", None)
    return f"vllm {vllm_version} {json.dumps(found, sort_keys=True)}" if found else ""


class AdapterFiles(NamedTuple):
    """The files that vLLM has loaded a LoRA adapter from."""

    path: str  # as the request has it
    directory: str
    state: object  # adapter_files_state of that time
    settings: str  # with which vLLM applies it, if they are not the default

    def are_unchanged(self) -> bool:
        """True if the files are those of that time."""
        with suppress(KvxError, OSError):
            return adapter_files_state(self.directory) == self.state
        return False

    def name(self) -> str | None:
        """Returns the name of the adapter; None: the files have changed.

        Raises InvalidArgumentError, OSError.
        """
        digest = adapter_files_digest(self.directory, progress=_log)
        if not self.are_unchanged():
            return None
        return f"{digest} in {self.settings}" if self.settings else digest


# They choose an adapter, kernels or how much memory there is, or come after the keys and values.
# Source: vllm 0.32 config/lora.py
_LORA_IGNORED = (
    "default_mm_loras",
    "fully_sharded_loras",
    "max_cpu_loras",
    "max_lora_cls_labels",
    "max_lora_rank",
    "max_loras",
    "specialize_active_lora",
)


def files_state(model: str, revision: str | None) -> str:
    """Returns a text that differs if a model's files have changed. Reads no tensors.

    Raises UnsupportedError, OSError.
    """
    directory = local_model(model, revision, _OWN)
    found = [(path.name, path.stat()) for path in sorted(directory.iterdir()) if path.is_file()]
    return json.dumps([[name, s.st_ino, s.st_size, s.st_mtime_ns] for name, s in found])


class StartFiles:
    """The files that an engine has started with. It names weights loaded from other files.

    The other files must have the same config and the same tensors: an engine that reloads weights
    keeps its config, and tensors that are not in the files keep their values.
    """

    def __init__(self, vllm_config: Any, settings: Settings, fingerprint: str) -> None:
        self._config, self._settings, self._fingerprint = vllm_config, settings, fingerprint
        model = vllm_config.model_config
        self.records: dict[str, ModelRecord] = {}  # of weights from other files, by their name
        self._like: tuple[str, object] | None = None
        is_plain = not (settings.fingerprint or settings.fingerprint_sampling)
        if is_plain and not model.hf_config_path and vllm.loads_files(vllm_config):
            with suppress(KvxError, OSError):
                self._like = _likeness(local_model(model.model, model.revision, _OWN))

    def name(self, files: Files) -> str | None:
        """Returns the name of weights loaded from other files: see kvx_core.connector.epochs.

        None: an engine that starts from these files might compute something else.
        Raises KvxError, OSError if the files cannot be read.
        """
        directory = local_model(files.model, files.revision, _OWN)
        is_same = files_state(files.model, files.revision) == files.state
        if self._like is None or not is_same or _likeness(directory) != self._like:
            return None
        model = copy.copy(self._config.model_config)
        model.model, model.revision = files.model, files.revision
        config = copy.copy(self._config)
        config.model_config = model
        record = model_record(config, self._settings)
        if files_state(files.model, files.revision) != files.state:
            return None
        if record.fingerprint == self._fingerprint:
            return ""
        name = f"files:{record.fingerprint}"
        self.records[name] = record
        return name


def _likeness(directory: Path) -> tuple[str, object]:
    """Returns the config digest and tensor types, which replacement files must share."""
    found: dict[str, object] = {}
    for path in directory.glob("*.safetensors"):
        found |= tensor_types(path)
    return model_config_digest(directory), found


def _depends_on_format(directory: Path, load: Any) -> bool:
    """True if load_format decides which files vLLM loads: Mistral's or others, or a rank's own.

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
