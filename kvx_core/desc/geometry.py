"""The sizes of a cache as they come from outside: an engine's config, a file, a command line.

They are checked once, when they are loaded. Descriptors of memory: tensor_desc.py, cache.py.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
)

from kvx_core.desc import layouts
from kvx_core.errors import InvalidArgumentError
from kvx_core.formats import ELEMENTS
from kvx_core.types import DType, Layout

_Count = Annotated[int, Field(strict=True, ge=1, le=2**32 - 1)]


def _element(dtype: object) -> DType:
    return DType.of(dtype, takes=ELEMENTS)


class CacheGeometry(BaseModel):
    """Sizes and element type of the paged cache of a model in one engine process.

    Raises InvalidArgumentError, which names every wrong field, its value and what was expected.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: _Count
    num_blocks: _Count
    block_size: _Count  # tokens per block
    num_kv_heads: _Count  # held here: one tensor-parallel rank's share
    head_dim: _Count  # of K
    v_head_dim: Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)] = Field(
        default_factory=lambda fields: fields["head_dim"]
    )  # 0: no V; head_dim if not given
    dtype: Annotated[DType, BeforeValidator(_element)]  # or its name, such as "bfloat16"

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            # If head_dim is wrong, it alone is reported, not the v_head_dim derived from it.
            wrong = [e for e in error.errors() if e["type"] != "default_factory_not_called"]
            raise InvalidArgumentError("; ".join(map(_sentence, wrong))) from None

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The geometry that `model_dump_json` wrote, or an object with these fields.

        Raises InvalidArgumentError.
        """
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise InvalidArgumentError(f"geometry is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidArgumentError(
                f"geometry is a JSON {type(fields).__name__}, expected an object"
            )
        return cls(**fields)

    @field_serializer("dtype")
    def _dtype_name(self, dtype: DType) -> str:
        return dtype.label

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache has room for."""
        return self.num_blocks * self.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of one layer, K and V together."""
        dims = self.head_dim + self.v_head_dim
        units = dims // self.dtype.numbers
        return self.block_size * self.num_kv_heads * units * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache, all layers."""
        return self.num_layers * self.num_blocks * self.bytes_per_block

    def k_shape(self, layout: Layout, *, pack: int = 1) -> tuple[int, ...]:
        """Shape of one layer's K in `layout`."""
        return self._shape(layout, self.head_dim, pack)

    def v_shape(self, layout: Layout, *, pack: int = 1) -> tuple[int, ...]:
        """Shape of one layer's V in `layout`."""
        return self._shape(layout, self.v_head_dim, pack)

    def _shape(self, layout: Layout, head_dim: int, pack: int) -> tuple[int, ...]:
        return layouts.shape(
            layout,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
            pack=pack,
        )


def _sentence(error: Any) -> str:
    """One pydantic error as KVX says it: field, found, expected."""
    name = "geometry." + ".".join(map(str, error["loc"]))
    match error["type"]:
        case "missing":
            return f"{name} is missing"
        case "extra_forbidden":
            expected = ", ".join(CacheGeometry.model_fields)
            return f"{name} is not a field of CacheGeometry, expected one of {expected}"
        case "value_error":  # DType.of raised: its own sentence
            return f"geometry.{error['ctx']['error']}"
        case _:
            return f"{name} is {error['input']!r}: {error['msg'].lower()}"
