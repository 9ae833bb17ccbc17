"""SpaceRecord: the record of a space, on which the keys of its entries depend.

Format: docs/store_format.md, "space.json".
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from kvx_core.snapshot import CorruptError, PlaneKind
from kvx_core.stores.strict_json import strict_json

MAX_BYTES = 1 << 20  # of a record
FORMAT = 3
_MOST_LAYERS, _MOST_HEADS = 4096, 1 << 20
_HEX = "[0-9a-f]{64}"

_Heads = Annotated[int, Field(ge=0, le=_MOST_HEADS)]
_Plane = tuple[int, int, int, bool]


@validated(config=ConfigDict(extra="forbid", strict=True))
class _Fields:
    kvx_space: Literal[3]
    fingerprint: Annotated[str, Field(max_length=4096)]
    epoch: Annotated[str, Field(max_length=4096)]
    kv_heads: Annotated[list[_Heads], Field(min_length=1, max_length=_MOST_LAYERS)]
    state_heads: Annotated[list[_Heads], Field(max_length=_MOST_LAYERS)]
    planes: Annotated[list[_Plane], Field(max_length=16 * _MOST_LAYERS)]
    lossy: Annotated[str, Field(max_length=64)]
    salt: Annotated[str, Field(pattern=rf"^({_HEX})?$")]


_FIELDS = TypeAdapter(_Fields)


@dataclass(frozen=True)
class SpaceRecord:
    """The facts that the keys of entries depend on, beside the tokens.

    fingerprint: of the model as it is computed: ModelRecord.fingerprint
    kv_heads:    KV heads of each layer of the model; 0: the layer has states alone
    state_heads: the heads of the states of each layer: 1 if every rank has the states whole, 0 if
                 the layer has no states; (): no layer has states
    epoch:       names the weights if they are not those of the model's files; else ""
    planes:      the planes beside K and V
    lossy:       the format that rounds the stored values; "": values are not rounded
    salt:        salt_digest of the salt; "": there is no salt
    """

    fingerprint: str
    kv_heads: tuple[int, ...]
    epoch: str = ""
    planes: tuple[PlaneKind, ...] = ()
    lossy: str = ""
    salt: str = ""
    state_heads: tuple[int, ...] = ()

    @cached_property
    def text(self) -> bytes:
        """The bytes of space.json."""
        fields = {
            "kvx_space": FORMAT,
            "fingerprint": self.fingerprint,
            "epoch": self.epoch,
            "kv_heads": list(self.kv_heads),
            "state_heads": list(self.state_heads),
            "planes": [
                [p.layer, int(p.role), p.tokens_per_entry, p.replicated]
                for p in sorted(self.planes)
            ],
            "lossy": self.lossy,
            "salt": self.salt,
        }
        return canonical_json(fields)

    @cached_property
    def name(self) -> str:
        """The folder of the space, and the parent of first chunks: 64 hex digits."""
        return hashlib.sha256(self.text).hexdigest()

    @classmethod
    def parse(cls, raw: bytes, name: str) -> Self:
        """Parses the file of a record, which anybody may have written.

        name: the name that the space must have
        Raises CorruptError.
        """
        where = f"{name}/space.json"
        try:
            strict_json(raw)
            fields = _FIELDS.validate_json(raw, strict=True)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise CorruptError(
                f"{where} is no record of a space: {wrong['loc']}: {wrong['msg'][:200]}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{where} is no record of a space: {error}") from None
        record = cls(
            fields.fingerprint,
            tuple(fields.kv_heads),
            fields.epoch,
            tuple(PlaneKind(*plane) for plane in fields.planes),
            fields.lossy,
            fields.salt,
            tuple(fields.state_heads),
        )
        if len(record.state_heads) not in (0, len(record.kv_heads)):
            raise CorruptError(
                f"{where} is no record of a space: state_heads has {len(record.state_heads)} "
                f"numbers, expected one of each of the {len(record.kv_heads)} layers, or none"
            )
        if hashlib.sha256(raw).hexdigest() != name or record.text != raw:
            raise CorruptError(f"{where} is not what its folder is named after")
        return record

    def heads(self, states: bool) -> tuple[int, ...]:
        """Returns state_heads if `states`, else kv_heads."""
        return self.state_heads if states else self.kv_heads

    def planes_of(self, states: bool) -> list[PlaneKind]:
        """Returns the planes that are states if `states`, else the planes of tokens."""
        return [plane for plane in self.planes if states != bool(plane.tokens_per_entry)]

    def salted(self, salt: str) -> Self:
        """Returns the same record for another salt."""
        return replace(self, salt=salt_digest(salt))

    def has_salt(self, salt: str) -> bool:
        """True if the record is that of this salt; "" means no salt."""
        return self.salt == salt_digest(salt)


def salt_digest(salt: str) -> str:
    """Returns the digest of a salt that a record has; "" for no salt."""
    return hashlib.sha256(b"kvx salt" + salt.encode()).hexdigest() if salt else ""


def canonical_json(value: object) -> bytes:
    """Returns a value as canonical JSON: the only text that it may have in records."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")
