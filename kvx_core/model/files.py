"""model_files_digest: a digest of all in a model's files that keys and values depend on."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvx_core.argument_checks import instance
from kvx_core.errors import InvalidArgumentError
from kvx_core.model.config_values import IGNORED, QUANTIZATION
from kvx_core.model.content_digest import content_digest
from kvx_core.model.rope import KEYS, standard_rope
from kvx_core.model.tensor_digests import Progress, Tensor, digests, metadata

logger = logging.getLogger("kvx")

# Settings in tokenizer.json that any call of the tokenizer may have left there.
_TOKENIZER_IGNORED = ("padding", "truncation")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt")
# Files that quantisers write beside config.json: which layers are quantised, and how.
_QUANTIZERS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_CONFIGS = ("config.json", "params.json")  # params.json: as Mistral writes it


def model_files_digest(
    directory: Path | str,
    *,
    config: Path | str | None = None,
    sample: bool = False,
    progress: Progress | None = None,
) -> str:
    """A digest of the files of a model, in a directory as transformers saves it.

    It covers config.json, how the model is quantised, the tokenizer, code that the config names,
    and name, dtype, shape and every byte of each tensor. It does not depend on how tensors are
    spread over files, on the version of transformers that wrote the rotary parameters, or on
    settings of generation.
    config: a config.json, or a directory that has one, in place of the model's own
    sample: 4 KiB out of the middle of each tensor, not all bytes: models that differ elsewhere,
            such as fine-tunes of a few embeddings, then have the same. Never equal to a digest of
            all bytes
    progress: called with bytes read and bytes to read when it takes seconds; None: logs them
    Reads the bytes of a file once, and keeps its digests in $XDG_CACHE_HOME/kvx until it changes.
    Raises InvalidArgumentError if there is no config.json or *.safetensors, or if one is broken or
    changes meanwhile.
    """
    instance("directory", directory, (str, Path), "a path: a str or a pathlib.Path")
    directory = Path(directory)
    parts: list[str | bytes | Path] = ["kvx model 2, sampled" if sample else "kvx model 2"]
    parts += _config_parts(directory, directory if config is None else Path(config))
    for name in _TOKENIZERS:
        path = directory / name
        if path.is_file():
            is_json = path.suffix == ".json"
            parts += [name, _canonical(_json(path), _TOKENIZER_IGNORED) if is_json else path]
    files = sorted(directory.glob("*.safetensors"))
    tensors = digests(
        files,
        sample=sample,
        progress=progress or _log(directory),
    )
    if not tensors:
        raise InvalidArgumentError(
            f"{directory} has no tensors in *.safetensors, expected the weights there. Save them "
            "so, or give the fingerprint yourself"
        )
    if "torchao" in str(parts[1]):  # torchao assembles tensors from the files' metadata
        told = {item for path in files for item in metadata(path).items()}
        parts.append(json.dumps(sorted(told)))
    return content_digest(*parts, *_tensor_parts(directory, tensors))


def model_config_digest(directory: Path | str, *, config: Path | str | None = None) -> str:
    """A digest of a model's config and code alone, for engines that load no weights.

    Raises InvalidArgumentError if there is no config.json, or it is broken.
    """
    instance("directory", directory, (str, Path), "a path: a str or a pathlib.Path")
    directory = Path(directory)
    parts = _config_parts(directory, directory if config is None else Path(config))
    return content_digest("kvx config 2", *parts)


def _config_parts(directory: Path, config: Path) -> list[str | bytes | Path]:
    folder = config if config.is_dir() else config.parent
    paths = [folder / name for name in _CONFIGS] if config.is_dir() else [config]
    read = {path: _json(path) for path in paths if path.is_file()}
    if not read:
        raise InvalidArgumentError(
            f"{config} has no config.json, expected a model as transformers saves it. Give the "
            "fingerprint of another one yourself"
        )
    parts: list[str | bytes | Path] = []
    for path, found in read.items():
        parts += [path.name] if path.name == "params.json" else []
        parts.append(_canonical(_with_standard_rope(found), IGNORED))
    for name in _QUANTIZERS:
        if (directory / name).is_file():
            parts += [name, _canonical(_json(directory / name), ())]
    if "auto_map" in json.dumps(list(read.values())):  # otherwise code in the folder is not run
        for code in sorted(folder.rglob("*.py")):
            parts += [code.relative_to(folder).as_posix(), code]
    return parts


def _tensor_parts(directory: Path, tensors: list[Tensor]) -> Iterator[str]:
    """The tensors, sorted by name.

    If two have the same name, file names and the index decide which one is loaded, so they count.
    """
    found = {(t.name, t.dtype, t.shape, t.digest) for t in tensors}
    ambiguous = {name for name, count in Counter(t[0] for t in found).items() if count > 1}
    entries = sorted(
        {
            (t.name, t.dtype, t.shape, t.digest, t.file if t.name in ambiguous else "")
            for t in tensors
        }
    )
    yield from (json.dumps(entry) for entry in entries)
    if ambiguous:
        for index in sorted(directory.glob("*.safetensors.index.json")):
            yield _canonical(_json(index), ())


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from None


def _canonical(value: Any, ignored: tuple[str, ...]) -> str:
    """JSON without the keys that do not change the results; keys sorted."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: item if key in QUANTIZATION else kept(item)
                for key, item in value.items()
                if key not in ignored
            }
        return value

    return json.dumps(kept(value), sort_keys=True)


def _with_standard_rope(config: Any) -> Any:
    """A config with its rotary parameters, also those of its parts, in standard form."""
    if not isinstance(config, dict):
        return config
    found = {key: _with_standard_rope(value) for key, value in config.items() if key not in KEYS}
    if any(key in config for key in KEYS):
        found["rope"] = standard_rope(config)
        found.pop("partial_rotary_factor", None)
    return found


def _log(directory: Path) -> Progress:
    def progress(read: int, total: int) -> None:
        logger.info(
            "Reading the weights in %s once, to compute their digest: %.1f of %.1f GB",
            directory,
            read / 1e9,
            total / 1e9,
        )

    return progress
