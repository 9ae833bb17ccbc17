"""adapter_files_digest: a digest of all in a LoRA adapter's files that its results depend on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvx_core.argument_checks import instance
from kvx_core.errors import InvalidArgumentError
from kvx_core.model.content_digest import content_digest
from kvx_core.model.digest_cache import FileState, state_of
from kvx_core.model.tensor_digests import Progress, digests

# The first that is there is loaded. Source: peft 0.19 utils/save_and_load.py, load_peft_weights;
# vllm 0.32 lora/lora_model.py, from_local_checkpoint
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_CONFIG = "adapter_config.json"


def adapter_files_digest(directory: Path | str, *, progress: Progress | None = None) -> str:
    """A digest of the files of an adapter, in a directory as PEFT saves it.

    It covers adapter_config.json, with rank, scaling and target modules, and name, dtype, shape and
    every byte of each tensor. Of a file with pickles it takes the bytes, and loads nothing.
    progress: called with bytes read and bytes to read when it takes seconds
    Reads the bytes of a file once, and keeps its digests in $XDG_CACHE_HOME/kvx until it changes.
    Raises InvalidArgumentError if a file is missing or broken, or changes meanwhile; OSError.
    """
    instance("directory", directory, (str, Path), "a path: a str or a pathlib.Path")
    config, weights = _files(Path(directory))
    try:
        settings: Any = json.loads(config.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{config} is not JSON: {error}") from None
    parts: list[str | Path] = ["kvx adapter 1", json.dumps(settings, sort_keys=True)]
    if weights.suffix != ".safetensors":
        return content_digest(*parts, weights.name, weights)
    tensors = digests([weights], progress=progress)
    found = sorted((each.name, each.dtype, each.shape, each.digest) for each in tensors)
    return content_digest(*parts, json.dumps(found))


def adapter_files_state(directory: Path | str) -> tuple[tuple[str, FileState], ...]:
    """Returns a value that differs if an adapter's files have changed. Reads no tensors.

    Raises InvalidArgumentError if a file is missing; OSError.
    """
    return tuple((str(path), state_of(path.stat())) for path in _files(Path(directory)))


def _files(directory: Path) -> tuple[Path, Path]:
    """Returns the config and the weights of an adapter. Raises InvalidArgumentError."""
    weights = [path for name in _WEIGHTS if (path := directory / name).is_file()]
    if not weights or not (directory / _CONFIG).is_file():
        raise InvalidArgumentError(
            f"{directory} has no {_CONFIG} or no {_WEIGHTS[0]}, expected an adapter as PEFT saves "
            "it"
        )
    return directory / _CONFIG, weights[0]
