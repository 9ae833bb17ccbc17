"""What the bytes of a cache mean beyond layout and dtype, so that a copy means the same.

An adapter fills in what it knows of its engine; the caller adds what only the caller knows (which
model). Unknown is None, and is never taken for agreement with something known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvx_core.errors import InvalidArgumentError
from kvx_core.types import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """The meaning of one engine's cache; None where unknown.

    `engine`, `compute_dtype` and `negative_slots` inform the reader; all other fields are compared.
    """

    engine: str | None = None  # name and version, such as "vllm 0.32.0"
    fingerprint: str | None = None  # of model, weights and tokenizer: see fingerprint()
    rotary: Literal["half", "interleaved", "none"] | None = None  # how the dims of K pair up
    rotary_dim: int | None = None  # dims of a head that rotate; 0 for "none"
    rope_applied: bool | None = None  # K is stored after its rotation
    hadamard: bool | None = None  # K or V is stored Hadamard-rotated
    scale_convention: Literal["multiply", "divide"] | None = None  # KVX: value = stored * scale
    num_layers: int | None = None  # layers of the model held here
    first_layer: int | None = None  # index in the model of the first of them
    window: int | None = None  # sliding window in tokens; 0 for full attention
    total_kv_heads: int | None = None  # of the model, over all tensor-parallel ranks
    first_kv_head: int | None = None  # index in the model of the first head held here
    compute_dtype: DType | None = None  # what the model computes keys and values in
    negative_slots: Literal["skip", "wrap", "undefined"] | None = None  # in the engine's own write


_EQUAL = (
    "fingerprint",
    "rotary",
    "rotary_dim",
    "rope_applied",
    "hadamard",
    "num_layers",
    "first_layer",
    "window",
    "total_kv_heads",
)


# What one engine does alike for one model, and another may not.
_OF_ENGINE = ("rotary", "rotary_dim", "rope_applied")


def compare(
    src: CacheFacts,
    dst: CacheFacts,
    *,
    src_head_start: int = 0,
    dst_head_start: int = 0,
    same_model: bool = False,
) -> list[str]:
    """Why bytes copied from `src` to `dst` would not mean the same: a sentence each, or none.

    src_head_start, dst_head_start: the first head to be copied at either end, counted from the
    first that the end holds; both have to be the same head of the model.
    same_model: the caller knows that both ends serve the same model and store it alike
    A fact that only one end knows is a reason too. That neither knows is one for the fingerprint,
    and for how keys rotate if two engines may do it differently, unless same_model says otherwise.
    Which part of the model a cache holds is for the caller to know if the facts do not say.
    """
    reasons = [
        reason
        for name in _EQUAL
        for reason in _unequal(name, getattr(src, name), getattr(dst, name), src, dst)
    ]
    if not same_model:
        reasons += _unknown(src, dst)
    src_head = None if src.first_kv_head is None else src.first_kv_head + src_head_start
    dst_head = None if dst.first_kv_head is None else dst.first_kv_head + dst_head_start
    name = "first_kv_head" if src_head is None or dst_head is None else "first_kv_head + head_start"
    reasons += _unequal(name, src_head, dst_head, src, dst)
    for end, facts in (("source", src), ("destination", dst)):
        if facts.scale_convention not in (None, "multiply"):
            reasons.append(
                f"scale_convention is {facts.scale_convention!r} at the {_named(end, facts)}, "
                "expected 'multiply': give its scales as value = stored * scale"
            )
    return reasons


def _unknown(src: CacheFacts, dst: CacheFacts) -> Iterator[str]:
    """What neither end knows and may differ."""
    ends = f"{_named('source', src)} and {_named('destination', dst)}"
    if src.fingerprint is None and dst.fingerprint is None:
        yield (
            f"fingerprint is unknown at the {ends}: set CacheFacts.fingerprint of both, or give "
            "same_model=True if they serve the same model"
        )
    engines = {None if f.engine is None else f.engine.split()[0] for f in (src, dst)}
    if len(engines) == 1 and engines != {None}:
        return
    for name in _OF_ENGINE:
        if getattr(src, name) is None and getattr(dst, name) is None:
            yield (
                f"{name} is unknown at the {ends}: set CacheFacts.{name} of both, or give "
                "same_model=True if they store the keys of the same model alike"
            )


def _unequal(
    name: str, at_src: object, at_dst: object, src: CacheFacts, dst: CacheFacts
) -> Iterator[str]:
    """The reason, if there is one, why `name` keeps the two ends apart."""
    source, destination = _named("source", src), _named("destination", dst)
    if at_src == at_dst:
        return
    if at_src is None:
        yield (
            f"{name} is {at_dst!r} at the {destination} and unknown at the {source}: "
            f"set CacheFacts.{name} of the source"
        )
    elif at_dst is None:
        yield (
            f"{name} is {at_src!r} at the {source} and unknown at the {destination}: "
            f"set CacheFacts.{name} of the destination"
        )
    else:
        yield f"{name} is {at_src!r} at the {source} and {at_dst!r} at the {destination}"


def _named(end: str, facts: CacheFacts) -> str:
    return end if facts.engine is None else f"{end} ({facts.engine})"


def fingerprint(*parts: bytes | str | Path) -> str:
    """SHA-256, as hex, of `parts` in order: equal only if every part is.

    parts: bytes and str stand for themselves (str as UTF-8); a Path for the content of a file, or
           of all files below a directory together with their names there.
    Raises OSError for a file that cannot be read, InvalidArgumentError for a path that is neither.
    """
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            content = _path_digest(part)
        else:
            content = hashlib.sha256(part.encode() if isinstance(part, str) else part).digest()
        digest.update(content)
    return digest.hexdigest()


def _path_digest(path: Path) -> bytes:
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    if not path.is_dir():
        raise InvalidArgumentError(f"fingerprint: {path} is neither a file nor a directory")
    digest = hashlib.sha256()
    for file_path in sorted(found for found in path.rglob("*") if found.is_file()):
        digest.update(hashlib.sha256(file_path.relative_to(path).as_posix().encode()).digest())
        digest.update(_path_digest(file_path))
    return digest.digest()
