"""ScaleDesc: the scales of a tensor of FP8 or S8, and what each of them covers. Spec: 6.6

Scales and zero points of U8_ZERO and U8_BIAS are ScaleDescs too, and scales of F4_E2M1.
Spec: E.14, E.18
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi
from kvx_core.argument_checks import bad_argument, coerce_fields
from kvx_core.desc.tensors import Borrowed, TensorLike, borrowed_fields, read_array
from kvx_core.formats import SCALES
from kvx_core.types import DType, Memory, ScaleGranularity


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class ScaleDesc(Borrowed):
    """Scales of a tensor of FP8 or S8: value = stored * scale.

    Raises InvalidArgumentError for fields of other types.
    Spec: 6.6
    """

    takes: ClassVar[Collection[DType] | None] = SCALES

    granularity: ScaleGranularity
    memory: Memory = Memory.HOST

    def __post_init__(self) -> None:
        if type(self.granularity) is not ScaleGranularity:
            coerce_fields(self, granularity=ScaleGranularity.called)
        Borrowed.__post_init__(self)

    def kind(self) -> str | None:
        return self.granularity.name

    @classmethod
    def of(
        cls,
        scale: ScaleDesc | TensorLike | float,
        granularity: ScaleGranularity | str = ScaleGranularity.PER_TENSOR,
        *,
        name: str = "scale",
    ) -> ScaleDesc:
        """Scales from a tensor, zero-copy, or one scale from a number.

        scale:       F32, F16 or BF16, any strides, or a float. PER_TENSOR one element,
                     PER_BLOCK (num_blocks,), PER_HEAD (num_kv_heads,), PER_BLOCK_HEAD
                     (num_blocks, num_kv_heads), PER_TOKEN_HEAD
                     (num_blocks, block_size, num_kv_heads). Of U8_ZERO and U8_BIAS:
                     PER_CHANNEL (num_blocks, num_kv_heads, head_dim), PER_GROUP
                     (num_blocks, block_size, num_kv_heads, groups), PER_TOKEN_HEAD. Of F4_E2M1:
                     F8_E4M3 or F8_E8M0, PER_GROUP or PER_GROUP_4X4; and one F32 for the tensor. A
                     ScaleDesc is returned as it is.
        granularity: a ScaleGranularity or its name
        name:        what errors call the scale
        Raises InvalidArgumentError, UnsupportedError.
        """
        if isinstance(scale, ScaleDesc):
            return scale
        if isinstance(scale, bool):
            raise bad_argument(name, scale, "a number or a tensor")
        if isinstance(scale, (int, float, np.number)):
            scale = np.array(scale, np.float32)
        fields = borrowed_fields(name, scale, SCALES)
        return cls(granularity=ScaleGranularity.of(granularity, "granularity"), **fields)

    def to_numpy(self) -> npt.NDArray[Any]:
        """The scales, a copy. Raises UnsupportedError if they are on a device."""
        return read_array("scale", self.data, self.shape, self.stride, self.dtype, self.memory)

    def to_c(self) -> abi.kvx_scale_desc_t:
        """A new C struct with these fields."""
        return abi.kvx_scale_desc_t(granularity=self.granularity, **self.c_fields("scale"))
