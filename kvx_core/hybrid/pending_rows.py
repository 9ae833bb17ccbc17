"""Tokens that no entry stands for yet, as engines keep them: rows of values and scores.

A row is [values | scores] in float32; of a CSA layer each half is [b | a], see StateCache. vLLM
adds the position's bias (ape) to the scores when it stores them, SGLang when it reads them.
Source: vllm 0.32 models/deepseek_v4/compressor.py; sglang 0.5.23 CompressStatePool
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvx_core.argument_checks import flag, instance, integer
from kvx_core.desc.tensors import require_resolved, require_whole
from kvx_core.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from kvx_core.hybrid.state_cache import NO_SCORE, StateCache, Tails


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
    Mutates these rows of dst. Raises InvalidArgumentError, OutOfRangeError; UnsupportedError
    without the ape, where a sequence can go on from its last complete block, whose tokens are
    computed again.
    """
    for name, state in (("src", src), ("dst", dst)):
        instance(name, state, Tensor, "a tensor")
        if state.dim() != 3 or state.dtype is not torch.float32 or state.shape[2] % 2:
            raise InvalidArgumentError(
                f"{name} is {tuple(state.shape)} of {state.dtype}, expected (blocks, rows, "
                "2 * row) of torch.float32"
            )
        require_resolved(name, state)
        require_whole(name, state)
    if src.shape[2] != dst.shape[2]:
        raise InvalidArgumentError(
            f"rows of src have {src.shape[2]} numbers, expected {dst.shape[2]} as those of dst"
        )
    places = []
    for name, given, state in (("src_rows", src_rows, src), ("dst_rows", dst_rows, dst)):
        places.append(_whole_numbers(name, given, state.shape[0] * state.shape[1]))
    at_src, at_dst = places
    positions = _whole_numbers("positions", positions, 2**31)
    if not len(at_src) == len(at_dst) == len(positions):
        raise InvalidArgumentError(
            f"src_rows, dst_rows and positions have {len(at_src)}, {len(at_dst)} and "
            f"{len(positions)} numbers, expected as many of each: one of each token"
        )
    if len(set(at_dst.tolist())) < len(at_dst):
        raise InvalidArgumentError(
            f"dst_rows is {at_dst.tolist()}, expected a row for each token: two would overwrite "
            "each other"
        )
    rows = src[at_src // src.shape[1], at_src % src.shape[1]]
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
        require_whole("ape", ape)
        bias = ape[positions % ape.shape[0]].float()
        rows[:, half:] += bias if dst_has_ape else -bias
    dst[at_dst // dst.shape[1], at_dst % dst.shape[1]] = rows


def _whole_numbers(name: str, given: Tensor, end: int) -> Tensor:
    """`given` if it is (n,) integers from 0 to `end` - 1: an index of torch takes others, too.

    Raises InvalidArgumentError, OutOfRangeError.
    """
    instance(name, given, Tensor, "a tensor")
    if given.dim() != 1 or given.dtype not in (torch.int64, torch.int32):
        raise InvalidArgumentError(
            f"{name} is {tuple(given.shape)} of {given.dtype}, expected (n,) of torch.int64"
        )
    require_whole(name, given)
    given = given.long()  # an int32 compares with 2^31 as with -2^31
    for i in torch.nonzero((given < 0) | (given >= end)).flatten().tolist():
        raise OutOfRangeError(f"{name}[{i}] is {int(given[i])}, expected 0 to {end - 1}")
    return given


def pending_to_tails(
    state: StateCache,
    slot: int,
    src: Tensor,
    src_rows: Tensor,
    num_tokens: int,
    *,
    src_has_ape: bool,
    ape: Tensor | None = None,
    indexer: bool = False,
) -> None:
    """Takes an engine's rows of a sequence's pending tokens into the tails of a request slot.

    state:      of a CSA or HCA layer; its tails are float32, scores without the bias
    src, src_rows, src_has_ape, ape: as for migrate_pending; a row for each of
                `pending_tokens(num_tokens, ratio, overlap=...)`, in this order, overlap of CSA
    num_tokens: tokens that the sequence has
    indexer:    the rows are of the indexer's compressor
    What the slot's tails had is lost; where a CSA sequence has no entry yet, kb and zb become those
    of a new request. Mutates the slot's tails and their length.
    Raises InvalidArgumentError; UnsupportedError without the ape, as migrate_pending.
    """
    tails = _tails(state, slot, indexer)
    positions = _positions(tails, num_tokens, "src_rows", src_rows)
    rows = torch.empty(len(positions), 1, 2 * tails.width)
    at = torch.arange(len(positions))
    migrate_pending(
        src, rows, src_rows, at, positions, src_has_ape=src_has_ape, dst_has_ape=False, ape=ape
    )
    values = rows[:, 0].to(tails.ka.device)
    k, z = values[:, : tails.width], values[:, tails.width :]
    waiting = num_tokens % tails.ratio
    before = len(positions) - waiting
    for current, previous, given, empty in (
        (tails.ka, tails.kb, k, 0.0),
        (tails.za, tails.zb, z, NO_SCORE),
    ):
        current[slot] = 0
        current[slot, :waiting] = given[before:]
        if previous is not None:
            previous[slot] = empty
            previous[slot, :before] = given[:before]
    tails.tail_len[slot] = waiting


def tails_to_pending(
    state: StateCache,
    slot: int,
    dst: Tensor,
    dst_rows: Tensor,
    num_tokens: int,
    *,
    dst_has_ape: bool,
    ape: Tensor | None = None,
    indexer: bool = False,
) -> None:
    """The other way: the slot's tails as an engine's rows. Arguments as for pending_to_tails.

    Mutates these rows of dst. Raises InvalidArgumentError, UnsupportedError.
    """
    tails = _tails(state, slot, indexer)
    positions = _positions(tails, num_tokens, "dst_rows", dst_rows)
    waiting = num_tokens % tails.ratio
    if int(tails.tail_len[slot]) != waiting:
        raise InvalidArgumentError(
            f"slot {slot} has {int(tails.tail_len[slot])} waiting tokens, expected {waiting}, "
            f"those of {num_tokens} tokens"
        )
    before = len(positions) - waiting
    halves = []
    for current, previous in ((tails.ka, tails.kb), (tails.za, tails.zb)):
        parts = [] if previous is None else [previous[slot, :before]]
        halves.append(torch.cat((*parts, current[slot, :waiting])))
    device = instance("dst", dst, Tensor, "a tensor").device
    rows = torch.cat(halves, 1)[:, None].to(device)
    at = torch.arange(len(positions))
    migrate_pending(
        rows, dst, at, dst_rows, positions, src_has_ape=False, dst_has_ape=dst_has_ape, ape=ape
    )


def _tails(state: StateCache, slot: int, indexer: bool) -> Tails:
    instance("state", state, StateCache, "a StateCache")
    integer("slot", slot, 0, state.max_requests - 1)
    tails = state.tails(indexer=flag("indexer", indexer))
    if tails.ka.dtype is not torch.float32:
        raise UnsupportedError(
            f"tails of layer {state.schema.layer_idx} are {tails.ka.dtype}, expected "
            "torch.float32: engines' rows are"
        )
    return tails


def _positions(tails: Tails, num_tokens: int, name: str, rows: Tensor) -> Tensor:
    """Positions of the tokens that wait. Raises InvalidArgumentError if `rows` has others."""
    found = pending_tokens(num_tokens, tails.ratio, overlap=tails.kb is not None)
    if len(instance(name, rows, Tensor, "a tensor")) != len(found):
        raise InvalidArgumentError(
            f"{name} has {len(rows)} rows, expected {len(found)}: positions {found.start} to "
            f"{found.stop - 1} of {num_tokens} tokens"
        )
    return torch.tensor(list(found), dtype=torch.int64)
