"""Tokens that no entry stands for yet, as engines keep them: rows of values and scores.

A row is [values | scores] in float32; of a CSA layer each half is [b | a], see StateCache. vLLM
adds the position's bias (ape) to the scores when it stores them, SGLang when it reads them.
Source: vllm 0.32 models/deepseek_v4/compressor.py; sglang 0.5.23 CompressStatePool
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.words import instance, integer


def pending_tokens(num_tokens: int, ratio: int, *, overlap: bool) -> range:
    """Positions whose rows a sequence still needs.

    overlap: of a CSA layer, whose next entry also reads the tokens of its last one
    """
    num_tokens, ratio = integer("num_tokens", num_tokens, 0, 2**40), integer("ratio", ratio, 1)
    first = num_tokens // ratio * ratio
    return range(max(0, first - ratio) if overlap else first, num_tokens)


def migrate_pending(
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    positions: Tensor,
    *,
    src_has_ape: bool,
    dst_has_ape: bool,
    ape: Tensor | None = None,
) -> None:
    """Moves rows of pending tokens of one layer between two engines.

    src, dst:     (blocks, rows of a block, 2 * row) float32, any strides; row is 2 * head_dim of a
                  CSA layer, head_dim of an HCA layer
    src_rows, dst_rows: (n,) int64, block * rows of a block + row
    positions:    (n,) int64, of the tokens in their sequence
    src_has_ape, dst_has_ape: whether scores have the bias added
    ape:          (ratio, row) float32, columns as in a row; needed if only one end has it
    With the bias at both ends or neither, bytes are copied. Otherwise it is added or subtracted,
    which rounds scores to float32 once.
    Mutates these rows of dst. Raises InvalidArgumentError; UnsupportedError without the ape, where
    a sequence can go on from its last complete block, whose tokens are computed again.
    """
    for name, state in (("src", src), ("dst", dst)):
        instance(name, state, Tensor, "a tensor")
        if state.dim() != 3 or state.dtype is not torch.float32 or state.shape[2] % 2:
            raise InvalidArgumentError(
                f"{name} is {tuple(state.shape)} of {state.dtype}, expected (blocks, rows, "
                "2 * row) of torch.float32"
            )
    if src.shape[2] != dst.shape[2]:
        raise InvalidArgumentError(
            f"rows of src have {src.shape[2]} numbers, expected {dst.shape[2]} as those of dst"
        )
    rows = src[src_rows // src.shape[1], src_rows % src.shape[1]]
    if src_has_ape != dst_has_ape:
        half = src.shape[2] // 2
        if ape is None:
            raise UnsupportedError(
                "scores have the bias (ape) added at one end only: pass ape, or drop these rows "
                "and let the engine compute the tokens after the last complete block again"
            )
        if ape.dim() != 2 or ape.shape[1] != half:
            raise InvalidArgumentError(
                f"ape is {tuple(ape.shape)}, expected (ratio, {half}), as wide as the scores"
            )
        bias = ape[positions % ape.shape[0]].float()
        rows[:, half:] += bias if dst_has_ape else -bias
    dst[dst_rows // dst.shape[1], dst_rows % dst.shape[1]] = rows
