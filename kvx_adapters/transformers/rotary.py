"""Which dims of a key a transformers model rotates together: found by rotating one.

The decoder's own function turns a key by 90 degrees (cos 0, sin 1, or the complex angle i), as wide
as its rotary embedding makes angles, for each type of layer.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvx_core import UnsupportedError

_ROTARY = re.compile(r"rotary|rope", re.IGNORECASE)
# Names of what such a function takes; one without a default that is not here is not known.
_KEYS = ("q", "k", "x", "xq", "xk", "tensor")


class Rotation(NamedTuple):
    """How the keys of a layer turn."""

    order: Literal["half", "interleaved", "none"]  # as CacheFacts.rotary
    dim: int  # first dims of a head that turn


def rotations(model: Any) -> dict[str, Rotation]:
    """The rotation of each type of layer of a model's decoder; "": of all that are not named.

    model: a PreTrainedModel. Its rotary embedding is run once for each type
    Raises UnsupportedError, which names why it is not known.
    Source: transformers 5.19 models/*/modeling_*.py, apply_rotary_pos_emb, apply_rotary_emb
    """
    decoder = model.get_decoder()
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None) is not None:
        raise _unknown(model, "keys of latent attention (MLA) turn in their last dims")
    functions = _functions(decoder)
    embeddings = [part for name, part in decoder.named_modules() if _is_embedding(name, part)]
    turns = functions or embeddings or _may_turn(decoder)
    if getattr(config, "alibi", False) or not turns or _does_not_turn(decoder, config):
        return {"": Rotation("none", 0)}
    if len(functions) != 1:
        names = ", ".join(sorted(functions)) or "no function that is known"
        raise _unknown(model, f"its attention turns keys by {names}, expected one function")
    ((name, turn),) = functions.items()
    angles = _angles(embeddings, config)
    if not angles:
        raise _unknown(
            model,
            "its rotary embedding takes other arguments than x and position_ids, or there are "
            "several, whose angles have different shapes",
        )
    found = {}
    for kind, given in angles.items():
        rotation = _rotation(turn, given)
        if rotation is None:
            raise _unknown(
                model, f"{name} neither turns halves of a key nor neighbours by a right angle"
            )
        found[kind] = rotation
    return found


def _unknown(model: Any, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"the rotation of {type(model).__name__} is not known: {reason}. With "
        "cache_facts(model, allow_unknown=True) caches of transformers take its keys, and no other "
        "engine's"
    )


def _is_embedding(name: str, part: Any) -> bool:
    of_class = type(part).__name__.endswith("RotaryEmbedding")
    return of_class or "rotary_emb" in name.rpartition(".")[2]


def _does_not_turn(decoder: Any, config: Any) -> bool:
    """Whether a decoder that can turn keys is told not to.

    Source: transformers 5.19 modeling_granitemoehybrid.py, GraniteMoeHybridModel: rotary_emb is
    None; modeling_zamba2.py, Zamba2Attention
    """
    return getattr(decoder, "rotary_emb", ...) is None or not getattr(config, "use_mem_rope", True)


def _functions(decoder: Any) -> dict[str, Callable[..., Any]]:
    """The functions of the decoder's modules that its layers call to turn keys, by name."""
    found = {}
    for kind in {type(part) for part in decoder.modules()}:
        for method in vars(kind).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            module = getattr(sys.modules.get(kind.__module__), "__dict__", {})
            for name in code.co_names if code is not None else ():
                if "apply" in name and _ROTARY.search(name) and callable(module.get(name)):
                    found[name] = module[name]
    return found


def _may_turn(decoder: Any) -> bool:
    """Whether something in the decoder is called after rotation."""
    kinds = {type(part) for part in decoder.modules()}
    return any(_ROTARY.search(name) for kind in kinds for name in (kind.__name__, *vars(kind)))


def _angles(embeddings: list[Any], config: Any) -> dict[str, Tensor]:
    """The cosines that the embeddings make of a token for each type of layer, or complex angles."""
    found: dict[str, Tensor] = {}
    for embedding in embeddings:
        buffer = next(embedding.buffers(), torch.zeros(()))
        call = {
            "x": torch.zeros(1, 1, 1, device=buffer.device),
            "position_ids": torch.zeros(1, 1, dtype=torch.int64, device=buffer.device),
        }
        by_type = "layer_type" in inspect.signature(embedding.forward).parameters
        for kind in sorted(set(config.layer_types)) if by_type else [""]:
            try:
                made = embedding(**call, layer_type=kind) if by_type else embedding(**call)
            except AttributeError:
                continue  # layers of this type do not turn
            except (TypeError, ValueError, RuntimeError):
                return {}
            angles = made[0] if isinstance(made, tuple) else made
            if found.setdefault(kind, angles).shape != angles.shape:
                return {}
    if not embeddings and isinstance(getattr(config, "rotary_dim", None), int):
        found[""] = torch.zeros(1, 1, config.rotary_dim // 2)  # GPT-J
    return found


def _rotation(turn: Callable[..., Any], angles: Tensor) -> Rotation | None:
    """How `turn` turns a key by angles of such a shape; None if in no way that is known.

    A cosine belongs to each dim, or to each pair.
    """
    width = angles.shape[-1]
    for dim in (2 * width,) if angles.is_complex() else (width, 2 * width):
        key = torch.arange(1.0, dim + 1).expand(1, 1, 1, dim)
        turned = _turned(turn, key, width)
        if turned is None or turned.shape != key.shape:
            continue
        half = torch.cat([-key[..., dim // 2 :], key[..., : dim // 2]], dim=-1)
        interleaved = torch.stack([-key[..., 1::2], key[..., 0::2]], dim=-1).flatten(-2)
        if torch.equal(turned, half):
            return Rotation("half", dim)
        if torch.equal(turned, interleaved):
            return Rotation("interleaved", dim)
    return None


def _turned(turn: Callable[..., Any], key: Tensor, width: int) -> Tensor | None:
    """A key, turned by a right angle; None if the function takes something else."""
    angles: Mapping[str, Tensor] = {
        "cos": torch.zeros(1, 1, width),
        "sin": torch.ones(1, 1, width),
        "freqs_cis": torch.full((1, 1, width), 1j),
    }
    call = dict(_arguments(turn, key, angles))
    try:
        made = turn(**call)
    except (TypeError, ValueError, RuntimeError):
        return None
    turned = made[-1] if isinstance(made, tuple) else made
    return turned if isinstance(turned, Tensor) else None


def _arguments(
    turn: Callable[..., Any], key: Tensor, angles: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for name in inspect.signature(turn).parameters:
        if name in _KEYS:
            yield name, key
        elif name in angles:
            yield name, angles[name]
