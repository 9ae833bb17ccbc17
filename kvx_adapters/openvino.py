"""OpenVINO: the paged attention caches of a compiled model as KVX views. Imports no openvino.

A model after paged_attention_transformation has inputs key_cache.I and value_cache.I, pools of
blocks that the caller allocates, and block_indices, block_indices_begins, past_lens and
subsequence_begins, which say where sequences lie. On CPU a block is 32 tokens. K is stored after
the rotation.

| KV_CACHE_PRECISION | key_cache.I | value_cache.I |
| --- | --- | --- |
| f32, f16, bf16 | (num_blocks, num_kv_heads, 32, head_dim) | the same |
| u8, the default | (num_blocks, num_kv_heads, 8 + 32, head_dim) | (..., 32, 8 + head_dim) |

Of u8, a block and head of K begins with its scales and zero points, float32 each, one per channel
for all tokens of the block; each token of V begins with its own two. Spec E.14 has the format.
Source: OpenVINO 2026.4.1, CPU plugin, as measured
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    ScaleDesc,
    SeqLens,
    TensorDesc,
    TensorLike,
    UnsupportedError,
    describe,
)
from kvx_core.argument_checks import integer
from kvx_core.desc.tensors import borrow

_DTYPES = {
    "f32": DType.F32,
    "f16": DType.F16,
    "bf16": DType.BF16,
    "u8": DType.U8_ZERO,
}
_CACHE = re.compile(r"(key|value)_cache\.(\d+)")
_BESIDE = 8  # bytes of a scale and a zero point
HND = Layout.BLOCK_HND


class Input(NamedTuple):
    """A cache input of a compiled model."""

    dtype: DType  # U8_ZERO for u8
    shape: tuple[int, int, int]  # behind the blocks, as OpenVINO has it
    num_kv_heads: int
    block_size: int
    head_dim: int


def cache_inputs(compiled: Any) -> dict[str, Input]:
    """The cache inputs of a CompiledModel by name, K and V of layer 0 first.

    Raises UnsupportedError if there are none, or their precision or sizes are unknown here.
    """
    found = {}
    for given in compiled.inputs:
        for name in given.get_names():
            if _CACHE.fullmatch(name):
                found[name] = given
    names = [f"{kv}_cache.{i}" for i in range(len(found) // 2) for kv in ("key", "value")]
    if not found or found.keys() != set(names):
        raise UnsupportedError(
            f"the model has the cache inputs {sorted(found)}, expected key_cache.I and "
            "value_cache.I for I from 0. Apply paged_attention_transformation before compile_model"
        )
    inputs = {name: _input(name, found[name]) for name in names}
    values = [found for name, found in inputs.items() if name.startswith("value")]
    rounded = {found.head_dim for found in values if found.dtype is DType.U8_ZERO}
    if rounded:
        _require_a_scale_per_vector(compiled, rounded)
    return inputs


def _require_a_scale_per_vector(compiled: Any, head_dims: set[int]) -> None:
    """The shape of a pool does not tell groups from a larger head_dim; the model does.

    head_dims: of layers with u8, as their shapes have them

    Source: OpenVINO 2026.4.1, CompiledModel.get_property
    """
    size = int(compiled.get_property("VALUE_CACHE_GROUP_SIZE"))
    if size and head_dims != {size}:
        raise UnsupportedError(
            f"VALUE_CACHE_GROUP_SIZE is {size}, expected 0: scales and zero points of the groups "
            "of a vector lie between its numbers. Compile the model without it"
        )


def _input(name: str, given: Any) -> Input:
    """Sizes of one input. Source: OpenVINO 2026.4.1, shapes of the compiled model's inputs"""
    kind = given.get_element_type().get_type_name()
    if kind not in _DTYPES:
        raise UnsupportedError(
            f"input {name} is {kind}, expected one of {', '.join(_DTYPES)}. Compile the model with "
            "such a KV_CACHE_PRECISION"
        )
    extents = list(given.get_partial_shape())
    if len(extents) != 4 or any(extent.is_dynamic for extent in extents[1:]):
        raise UnsupportedError(
            f"input {name} has shape {given.get_partial_shape()}, expected four axes of which only "
            "the first, the blocks, is open"
        )
    heads, tokens, dims = (extent.get_length() for extent in extents[1:])
    dtype, beside = _DTYPES[kind], (0, 0)
    if dtype is DType.U8_ZERO:
        beside = (_BESIDE, 0) if name.startswith("key") else (0, _BESIDE)
    block_size, head_dim = tokens - beside[0], dims - beside[1]
    if block_size != 32 or head_dim < 1:
        raise UnsupportedError(
            f"input {name} is {kind} with {tokens} x {dims} elements in a block and head, expected "
            f"{32 + beside[0]} x (head_dim + {beside[1]}): 32 tokens. The CPU plugin has these; "
            "leave KEY_CACHE_GROUP_SIZE and VALUE_CACHE_GROUP_SIZE at 0"
        )
    return Input(dtype, (heads, tokens, dims), heads, block_size, head_dim)


def reserve(compiled: Any, num_blocks: int) -> dict[str, npt.NDArray[Any]]:
    """New pools of zeros for each cache input, by name. BF16 is in elements of float16.

    For the engine: request.set_tensor(name, openvino.Tensor(pool, shared_memory=True)), and of BF16
    openvino.Tensor(pool, openvino.Shape(pool.shape), openvino.Type.bf16). Keep pools and tensors.
    Raises InvalidArgumentError, UnsupportedError.
    """
    blocks = integer("num_blocks", num_blocks, 1)
    kinds = {DType.F32: np.float32, DType.U8_ZERO: np.uint8}
    return {
        name: np.zeros((blocks, *found.shape), kinds.get(found.dtype, np.float16))
        for name, found in cache_inputs(compiled).items()
    }


def cache_view(
    compiled: Any,
    pools: Mapping[str, TensorLike],
    facts: CacheFacts,
    *,
    requests: Sequence[Any],
) -> CacheView:
    """All layers, zero-copy, with the scales and zero points of u8.

    compiled: a CompiledModel: names, sizes and dtypes are checked against its inputs
    pools:    by the name of the cache input: the memory of the engine's tensors, contiguous
    facts:    see `cache_facts`
    requests: the InferRequests that run on these pools. The view is refused while one of them runs
              (start_async before wait), and once one has other tensors. (): none runs yet
    A block of u8 whose last tokens are not yet there has the scales of its tokens, all of which
    change when one is added: a migration that does not begin at the start of a block is refused
    without requantize=True.
    Raises InvalidArgumentError, UnsupportedError.
    """
    inputs = cache_inputs(compiled)
    if pools.keys() != inputs.keys():
        missing, more = sorted(inputs.keys() - pools), sorted(pools.keys() - inputs.keys())
        raise InvalidArgumentError(
            f"pools lacks {missing} and has {more} beside them, expected one for each cache input "
            "of the model. See reserve"
        )
    parts = [_described(name, pools[name], found) for name, found in inputs.items()]
    keys, values = parts[0::2], parts[1::2]
    return CacheView(
        tuple(CacheDesc.from_kv(k.data, v.data) for k, v in zip(keys, values, strict=True)),
        facts,
        k_scales=_all(part.scales for part in keys),
        v_scales=_all(part.scales for part in values),
        k_zeros=_all(part.zeros for part in keys),
        v_zeros=_all(part.zeros for part in values),
        outdated=partial(
            _outdated,
            tuple(requests),
            {name: borrow(pools[name], name=f"pools[{name!r}]").data for name in inputs},
        ),
    )


def _outdated(requests: Sequence[Any], described: Mapping[str, int]) -> str | None:
    """Why the pools are not those of idle requests; None if they are.

    Source: OpenVINO 2026.4.1, InferRequest.get_tensor, which a request that runs refuses
    """
    for i, request in enumerate(requests):
        for name, address in described.items():
            try:
                now = request.get_tensor(name).data.ctypes.data
            except RuntimeError as error:
                return (
                    f"requests[{i}] runs or has no {name} ({str(error).strip()}), expected an idle "
                    "InferRequest of this model: call its wait() first"
                )
            if now != address:
                return (
                    f"requests[{i}] has another tensor as {name}, expected the pool that was "
                    "described. Call cache_view with the memory of its tensors"
                )
    return None


_RUN = ("block_indices", "block_indices_begins", "past_lens", "subsequence_begins")


def span(view: CacheView, request: Any) -> CacheSpan:
    """The sequences of a request's last run, from its inputs: one end of a migration.

    view:    see `cache_view`
    request: an InferRequest whose run has ended
    At each use more tokens than the run has left are refused, and inputs of another run.
    `seq_lens(past_lens, subsequence_begins)` of the same run says how many there are.
    Raises InvalidArgumentError.
    """
    run = _inputs(request)
    held = replace(
        view, outdated=partial(_changed, view, request, run), holds=partial(_held, request)
    )
    return held.at(block_table(run[0], run[1]))


def _inputs(request: Any) -> list[list[int]]:
    try:
        return [request.get_tensor(name).data.tolist() for name in _RUN]
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"request runs or lacks one of {', '.join(_RUN)} ({str(error).strip()}), expected an "
            "idle InferRequest of paged attention: call its wait() first"
        ) from None


def _changed(view: CacheView, request: Any, run: list[list[int]]) -> str | None:
    """Why the sequences lie no longer where they did; None if they do."""
    gone = None if view.outdated is None else view.outdated()
    if gone is not None:
        return gone
    for name, now, then in zip(_RUN, _inputs(request), run, strict=True):
        if now != then:
            return (
                f"request has {name} {now}, expected {then} as when the span was made: it has run "
                "again, or will. Make a span after the run"
            )
    return None


def _held(request: Any) -> list[int]:
    _, _, past, begins = _inputs(request)
    return [int(length) for length in seq_lens(past, begins).to_numpy()]


def block_table(block_indices: Any, block_indices_begins: Any) -> BlockTable:
    """The blocks of each sequence, from the model's inputs. A copy.

    block_indices:        (begins[-1],), int32: block ids, the sequences one after the other
    block_indices_begins: (seq_count + 1,), int32: where each sequence's blocks begin
    Raises InvalidArgumentError.
    """
    ids = np.asarray(block_indices).tolist()
    begins = np.asarray(block_indices_begins).tolist()
    if not begins or begins[0] != 0 or begins[-1] != len(ids) or begins != sorted(begins):
        raise InvalidArgumentError(
            f"block_indices_begins is {begins}, expected to rise from 0 to {len(ids)}, the number "
            "of block_indices"
        )
    return BlockTable.packed([ids[a:b] for a, b in pairwise(begins)])


def seq_lens(past_lens: Any, subsequence_begins: Any) -> SeqLens:
    """Tokens that each sequence has after a run with these inputs.

    past_lens:          (seq_count,), int32: tokens before the run
    subsequence_begins: (seq_count + 1,), int32: where each sequence's new tokens begin
    Raises InvalidArgumentError.
    """
    past, begins = np.asarray(past_lens), np.asarray(subsequence_begins)
    if begins.shape != (past.size + 1,):
        raise InvalidArgumentError(
            f"subsequence_begins has shape {begins.shape}, expected ({past.size + 1},): one more "
            "than past_lens"
        )
    new = np.diff(begins)
    if begins[0] != 0 or (new < 0).any() or (past < 0).any():
        raise InvalidArgumentError(
            f"subsequence_begins is {begins.tolist()} and past_lens {past.tolist()}, expected to "
            "rise from 0, and counts of at least 0"
        )
    return SeqLens.of((past + new).astype(np.int64))


def cache_facts(
    compiled: Any,
    *,
    rotary: Literal["half", "interleaved", "none"],
    rotary_dim: int,
    window: int = 0,
    version: str | None = None,
    fingerprint: str | None = None,
) -> CacheFacts:
    """The facts of a compiled model's cache.

    rotary, rotary_dim: as the model was before its conversion: its graph rotates, not OpenVINO
    window:      sliding window of all layers, 0 for none
    version:     openvino.__version__
    fingerprint: of the model as it is computed. With INFERENCE_PRECISION_HINT bf16 a traced graph
                 may compute the angles in bf16, and keys drift with their position: use f32
    Raises InvalidArgumentError, UnsupportedError.
    """
    inputs = cache_inputs(compiled)
    heads = {found.num_kv_heads for found in inputs.values()}
    rounded = {found.dtype for found in inputs.values()} & {DType.U8_ZERO}
    return CacheFacts(
        engine=f"openvino {version}" if version else "openvino",
        fingerprint=fingerprint,
        rotary=rotary,
        rotary_dim=integer("rotary_dim", rotary_dim),
        rope_applied=True,
        hadamard=False,
        scale_convention="multiply",
        num_layers=len(inputs) // 2,
        first_layer=0,
        window=integer("window", window),
        total_kv_heads=heads.pop() if len(heads) == 1 else None,
        first_kv_head=0,
        negative_slots="undefined",
        lossy="u8_zero" if rounded else None,
    )


class _Parts(NamedTuple):
    data: TensorDesc
    scales: ScaleDesc | None = None
    zeros: ScaleDesc | None = None


def _all(found: Any) -> tuple[ScaleDesc | None, ...] | None:
    scales = tuple(found)
    return scales if any(scales) else None


def _described(name: str, pool: TensorLike, wanted: Input) -> _Parts:
    """A pool as numbers and, of u8, the scales and zero points between them."""
    given = borrow(pool, name=f"pools[{name!r}]")
    stored = {DType.U8_ZERO: (DType.U8,), DType.BF16: (DType.BF16, DType.F16)}.get(
        wanted.dtype, (wanted.dtype,)
    )
    if given.shape[1:] != wanted.shape or given.dtype not in stored or not given.is_contiguous:
        raise InvalidArgumentError(
            f"pools[{name!r}] is {given.dtype.name} of shape {given.shape}, expected "
            f"{stored[0].name} of (num_blocks, {', '.join(map(str, wanted.shape))}), contiguous, "
            "as the model's input is"
        )
    if wanted.dtype is not DType.U8_ZERO:
        return _Parts(describe(pool, HND, dtype=wanted.dtype, name=f"pools[{name!r}]"))
    raw: npt.NDArray[np.uint8] = np.asarray(pool)
    blocks, heads, dim = raw.shape[0], wanted.num_kv_heads, wanted.head_dim
    if name.startswith("key"):
        head = raw.reshape(blocks, heads, -1)[:, :, : _BESIDE * dim].view(np.float32)
        beside = head.reshape(blocks, heads, 2, dim)
        numbers, granularity = raw[:, :, _BESIDE:], "PER_CHANNEL"
        scales, zeros = beside[:, :, 0], beside[:, :, 1]
    else:
        pair = raw[..., :_BESIDE].view(np.float32).transpose(0, 2, 1, 3)
        numbers, granularity = raw[..., _BESIDE:], "PER_GROUP"
        scales, zeros = pair[..., :1], pair[..., 1:]
    return _Parts(
        describe(numbers, HND, dtype=DType.U8_ZERO, name=f"pools[{name!r}]"),
        ScaleDesc.of(scales, granularity),
        ScaleDesc.of(zeros, granularity),
    )
