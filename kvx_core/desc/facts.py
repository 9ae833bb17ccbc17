"""What the bytes of a cache mean beyond layout and dtype, so that a copy means the same.

An adapter fills in what it knows of its engine; the caller adds what only the caller knows (which
model). None is unknown and never equals a known value. `compare` lists the differences that forbid
a copy, and those that a copy can undo exactly: kvx_core.ops.reorder does that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal

from kvx_core.argument_checks import bad_argument, flag, instance, integer, one_of
from kvx_core.types import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """The meaning of one engine's cache; None where unknown.

    `engine`, `compute_dtype`, `negative_slots` and `lossy` inform the reader; all other fields are
    compared.
    """

    engine: str | None = None  # name and version, such as "vllm 0.32.0"
    fingerprint: str | None = None  # of what the engine computes: see ModelRecord.fingerprint
    # How the dims of K pair up in every layer held here, None where layers differ: dim i with
    # i + rotary_dim / 2 ("half"), or 2 * i with 2 * i + 1 ("interleaved").
    rotary: Literal["half", "interleaved", "none"] | None = None
    # Dims of a head that rotate, its first ones (in a latent of MLA: its last); 0 for "none".
    rotary_dim: int | None = None
    rope_applied: bool | None = None  # K is stored after its rotation
    hadamard: bool | None = None  # K or V is stored Hadamard-rotated
    # Where it is: how many numbers of each vector of K, and of V, are rotated together; 0: none.
    hadamard_k: int | None = None
    hadamard_v: int | None = None
    scale_convention: Literal["multiply", "divide"] | None = None  # KVX: value = stored * scale
    num_layers: int | None = None  # layers of the model held here
    first_layer: int | None = None  # index in the model of the first of them: see first_layer_of
    window: int | None = None  # sliding window in tokens; 0 for full attention
    total_kv_heads: int | None = None  # of the model, over all tensor-parallel ranks
    first_kv_head: int | None = None  # index in the model of the first head held here
    compute_dtype: DType | None = None  # what the model computes keys and values in
    negative_slots: Literal["skip", "wrap", "undefined"] | None = None  # in the engine's own write
    # Formats that values were rounded to when they were stored, see Precision.name: "q8_0". None:
    # they are as an engine computed them, as far as is known.
    lossy: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError."""
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value is not None:
                one_of(f"facts.{name}", value, *words)
        for name, least in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, integer(f"facts.{name}", value, lowest=least))
        if (self.rotary_dim or 0) % 2:
            raise bad_argument(
                "facts.rotary_dim", self.rotary_dim, "an even number: dims turn in pairs"
            )

    def like(self, other: CacheFacts) -> CacheFacts:
        """These facts, and of those that are unknown here what `other` says: for two caches that
        the caller knows to be alike.
        """
        unknown = {f.name for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **{name: getattr(other, name) for name in unknown})

    def of_parts(self) -> CacheFacts:
        """These facts for parts of a head, or for other tensors than K: without its rotation."""
        return replace(self, rotary=None, rotary_dim=None)

    def __str__(self) -> str:
        """A line for each fact that is known."""
        known = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return "\n".join(f"{name}: {value}" for name, value in known if value is not None)


# What each of these fields may be, if it is known.
_WORDS = {
    "rotary": ("half", "interleaved", "none"),
    "scale_convention": ("multiply", "divide"),
    "negative_slots": ("skip", "wrap", "undefined"),
}

# The least that each of these fields may be.
_NUMBERS = {
    **dict.fromkeys(("rotary_dim", "hadamard_k", "hadamard_v", "first_layer", "window"), 0),
    **dict.fromkeys(("num_layers", "total_kv_heads"), 1),
    "first_kv_head": 0,
}

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


# Compared where both ends are rotated.
_ROTATIONS = ("hadamard_k", "hadamard_v")
# What one engine does alike for one model, and another may not.
OF_ENGINE = ("rotary", "rotary_dim", "rope_applied")


def first_layer_of(layers: Sequence[int]) -> int | None:
    """The fact first_layer of layers of a model; None: they do not follow each other."""
    first = layers[0]
    return first if tuple(layers) == tuple(range(first, first + len(layers))) else None


@dataclass(frozen=True, slots=True)
class ReorderRotary:
    """Reorders K's rotary dims: dims (i, i + rotary_dim / 2) of pair i in "half" order are dims
    (2 * i, 2 * i + 1) in "interleaved" order. No number changes.

    An engine that rotates in another order than its model was trained in reorders the model's key
    and query weights, so that scores stay the same. So its keys are the other engine's keys in
    another order, before and after the rotation: the angle belongs to the pair, not to the position
    of its dims. Biases, norm weights and scales per head are reordered too; rotations of whole
    heads (Hadamard) are not.
    """

    src: Literal["half", "interleaved"]
    dst: Literal["half", "interleaved"]
    rotary_dim: int
    difference: str  # the reason of a copy that leaves the dims where they are

    @property
    def name(self) -> str:
        return f"rotary {self.src} to {self.dst}"

    @property
    def sentence(self) -> str:
        """The transform in one line."""
        return (
            f"the first {self.rotary_dim} dims of each head of K go from {self.src} to {self.dst} "
            "order"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`. A copy means the same if there are no reasons and it does all
    transforms."""

    reasons: tuple[str, ...]  # why no copy would mean the same: a sentence each
    transforms: tuple[ReorderRotary, ...] = ()  # exact: they move bytes and change no number

    @property
    def reasons_as_is(self) -> tuple[str, ...]:
        """Why a copy that does no transform would not mean the same: a sentence each."""
        return *self.reasons, *(transform.difference for transform in self.transforms)


def compare(
    src: CacheFacts,
    dst: CacheFacts,
    *,
    src_head_start: int = 0,
    dst_head_start: int = 0,
    same_model: bool = False,
    hadamard_k: int = 0,
    hadamard_v: int = 0,
) -> Comparison:
    """Whether bytes copied from `src` to `dst` would mean the same, and what the copy has to do.

    src_head_start, dst_head_start: the first head to be copied at either end, counted from the
    first that the end holds; both have to be the same head of the model.
    same_model: the caller knows that both ends serve the same model and store it alike
    hadamard_k, hadamard_v: the copy rotates groups of so many numbers of K, or V, by Hadamard's
    matrix; 0: none. One end, and only one, stores them so. It then reorders no dims.
    A fact that only one end knows is a reason too. So is a fingerprint that neither end knows, and
    a rotation that neither knows where two engines may differ, unless same_model is set. If the
    facts do not say which part of the model a cache holds, the caller must know it.
    `migrate` does the transforms; a caller that does none uses `reasons_as_is`.
    """
    if type(hadamard_k) is not int or type(hadamard_v) is not int:
        hadamard_k = integer("hadamard_k", hadamard_k)
        hadamard_v = integer("hadamard_v", hadamard_v)
    if hadamard_k or hadamard_v:
        _check(src, dst, hadamard_k=hadamard_k, hadamard_v=hadamard_v)
        turned = _turned(src, hadamard_k, hadamard_v)
        if isinstance(turned, str):
            return Comparison((turned,))
        if dst.hadamard_k is None and dst.hadamard_v is None:  # it does not say how it is rotated
            turned = replace(turned, hadamard_k=None, hadamard_v=None)
        found = compare(
            turned,
            dst,
            src_head_start=src_head_start,
            dst_head_start=dst_head_start,
            same_model=same_model,
        )
        return Comparison(tuple(map(_of_rotated, found.reasons_as_is)))
    try:
        return _compared(src, dst, src_head_start, dst_head_start, same_model)
    except TypeError:  # a fact that cannot be hashed, such as a list
        return _compared.__wrapped__(src, dst, src_head_start, dst_head_start, same_model)


def _check(src: object, dst: object, **numbers: object) -> None:
    """Raises InvalidArgumentError."""
    for name, facts in (("src", src), ("dst", dst)):
        instance(name, facts, CacheFacts, "a CacheFacts")
    for name, number in numbers.items():
        integer(name, number)


# Migrations between the same two caches compare the same facts every time.
@lru_cache(maxsize=256, typed=True)
def _compared(
    src: CacheFacts, dst: CacheFacts, src_head_start: int, dst_head_start: int, same_model: bool
) -> Comparison:
    _check(src, dst, src_head_start=src_head_start, dst_head_start=dst_head_start)
    flag("same_model", same_model)
    reasons: list[str] = []
    transforms: list[ReorderRotary] = []
    for name in _EQUAL:
        unequal = list(_unequal(name, getattr(src, name), getattr(dst, name), src, dst))
        if name == "rotary" and unequal and {src.rotary, dst.rotary} == {"half", "interleaved"}:
            found = _reorder_rotary(src, dst, unequal[0])
            if isinstance(found, ReorderRotary):
                transforms.append(found)
            elif found is not None:
                reasons.append(found)
        else:
            reasons += unequal
    if src.hadamard and dst.hadamard:
        for name in _ROTATIONS:
            reasons += _unequal(name, getattr(src, name), getattr(dst, name), src, dst)
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
    return Comparison(tuple(reasons), tuple(transforms))


def _turned(facts: CacheFacts, *orders: int) -> CacheFacts | str:
    """The facts of what a copy has made of a source that it rotates, or why they are not known.

    orders: of K and of V, as in `compare`
    """
    if facts.hadamard is None:
        return facts
    before = [getattr(facts, name) if facts.hadamard else 0 for name in _ROTATIONS]
    if None in before:
        return replace(facts, hadamard=not facts.hadamard, hadamard_k=None, hadamard_v=None)
    after = []
    for name, stored, order in zip(_ROTATIONS, before, orders, strict=True):
        if stored and order and stored != order:
            return (
                f"{name} is {stored} at the {_named('source', facts)} and the copy rotates {order} "
                f"numbers together: {name}={stored} undoes the rotation"
            )
        after.append(0 if stored == order else stored or order)
    k, v = after if any(after) else (None, None)
    return replace(facts, hadamard=any(after), hadamard_k=k, hadamard_v=v)


def _of_rotated(reason: str) -> str:
    """A reason of a copy that rotates K or V."""
    return f"after the rotation, {reason}" if reason.startswith("hadamard") else reason


def _reorder_rotary(
    src: CacheFacts, dst: CacheFacts, difference: str
) -> ReorderRotary | str | None:
    """The transform between two orders of K's dims, the reason why there is none, or None if the
    orders are the same.

    `src.rotary` and `dst.rotary` are "half" and "interleaved".
    """
    rotary_dim = src.rotary_dim
    if rotary_dim != dst.rotary_dim or src.hadamard != dst.hadamard:
        return difference  # and these are reasons of their own
    if rotary_dim is None:
        return f"{difference}: set CacheFacts.rotary_dim of both, so that K can be reordered"
    if src.hadamard is None:
        return (
            f"{difference}, and hadamard is unknown at both: K can be reordered if it is False, "
            "set CacheFacts.hadamard of both"
        )
    if src.hadamard and (src.hadamard_k, dst.hadamard_k) != (0, 0):
        return f"{difference}, and K is stored Hadamard-rotated, which mixes its dims"
    if rotary_dim <= 2:
        return None  # one pair stands alike in both orders, and so does none
    if src.rotary == "half":
        return ReorderRotary("half", "interleaved", rotary_dim, difference)
    return ReorderRotary("interleaved", "half", rotary_dim, difference)


def _unknown(src: CacheFacts, dst: CacheFacts) -> Iterator[str]:
    """The reasons for facts that neither end knows and that may differ."""
    ends = f"{_named('source', src)} and {_named('destination', dst)}"
    if src.fingerprint is None and dst.fingerprint is None:
        yield (
            f"fingerprint is unknown at the {ends}: set CacheFacts.fingerprint of both, or give "
            "same_model=True if they serve the same model"
        )
    engines = {next(iter((f.engine or "").split()), None) for f in (src, dst)}
    if len(engines) == 1 and engines != {None}:
        return
    for name in OF_ENGINE:
        if getattr(src, name) is None and getattr(dst, name) is None:
            yield (
                f"{name} is unknown at the {ends}: set CacheFacts.{name} of both, or give "
                "same_model=True if they store the keys of the same model alike"
            )


def _unequal(
    name: str, at_src: object, at_dst: object, src: CacheFacts, dst: CacheFacts
) -> Iterator[str]:
    """Why fact `name` forbids a copy; None if it does not."""
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
