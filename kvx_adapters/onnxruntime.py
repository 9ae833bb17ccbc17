"""ONNX Runtime: the caches of a decoder's session as KVX views. Imports no onnxruntime.

A decoder that onnxruntime-genai's builder or optimum exports has inputs past_key_values.I.key and
.value, and outputs present.I.key and .value, each (batch, num_kv_heads, num_tokens, head_dim). Past
and present of a layer bound to one buffer are a cache that stays where it is: GroupQueryAttention
appends in place. That is a paged cache with one block per sequence. Not bound to one buffer, the
session makes new arrays in every run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    TensorDesc,
    TensorLike,
    UnsupportedError,
    describe,
)
from kvx_core.argument_checks import flag, integer

# Source: onnxruntime 1.31.1 core/framework/data_types.cc
_DTYPES = {
    "tensor(float)": DType.F32,
    "tensor(float16)": DType.F16,
    "tensor(bfloat16)": DType.BF16,
}
_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")


def past_inputs(session: Any) -> dict[str, tuple[tuple[int | None, ...], DType]]:
    """Shape and dtype of each past input of a session, K and V of layer 0 first.

    session: an InferenceSession. Shapes are (batch, num_kv_heads, num_tokens, head_dim), None for
             what the run decides
    Raises UnsupportedError if there are none, or one is quantized.
    Source: onnxruntime-genai 0.18.0 models/builders/base.py, make_inputs_and_outputs
    """
    found: dict[str, tuple[tuple[int | None, ...], DType]] = {}
    for given in session.get_inputs():
        if _PAST.fullmatch(given.name) is None:
            continue
        if given.type not in _DTYPES:
            raise UnsupportedError(
                f"input {given.name} is a {given.type}, expected one of {', '.join(_DTYPES)}: the "
                "scales of a quantized cache are not in it. Export the model with a float cache"
            )
        if len(given.shape) != 4:
            raise UnsupportedError(
                f"input {given.name} has {len(given.shape)} axes, expected 4: (batch, "
                "num_kv_heads, num_tokens, head_dim)"
            )
        shape = tuple(extent if isinstance(extent, int) else None for extent in given.shape)
        found[given.name] = shape, _DTYPES[given.type]
    layers = len(found) // 2
    expected = [f"past_key_values.{i}.{kv}" for i in range(layers) for kv in ("key", "value")]
    if not found or found.keys() != set(expected):
        raise UnsupportedError(
            f"the session has the past inputs {sorted(found)}, expected past_key_values.I.key and "
            ".value for I from 0. Export the decoder with its cache (onnxruntime-genai's builder)"
        )
    return {name: found[name] for name in expected}


def reserve(session: Any, *, batch_size: int, num_tokens: int) -> dict[str, npt.NDArray[Any]]:
    """New buffers of zeros for each past input, by name: what `bind` and `cache_view` take.

    num_tokens: room of each sequence, prompt and continuation
    Raises InvalidArgumentError; UnsupportedError for BF16, which numpy has not: allocate tensors
    of torch then.
    """
    batch, tokens = integer("batch_size", batch_size, 1), integer("num_tokens", num_tokens, 1)
    found = {}
    for name, ((_, num_heads, _, head_dim), dtype) in past_inputs(session).items():
        if num_heads is None or head_dim is None:
            raise UnsupportedError(
                f"input {name} leaves its heads or head_dim to the run, expected numbers. Allocate "
                "the buffers"
            )
        if dtype is DType.BF16:
            raise UnsupportedError(
                f"input {name} is BF16, expected F32 or F16, which numpy has. Allocate tensors of "
                "torch, (batch, num_kv_heads, num_tokens, head_dim)"
            )
        found[name] = np.zeros((batch, num_heads, tokens, head_dim), dtype.array_name)
    return found


def bind(
    binding: Any, session: Any, buffers: Mapping[str, TensorLike], *, device: str = "cpu"
) -> None:
    """Binds past and present of each layer to one buffer.

    binding: session.io_binding(), whose other inputs and outputs the caller binds
    buffers: by the name of the past input, contiguous, all of the same batch and num_tokens. They
             must outlive the binding
    device:  of the buffers, as onnxruntime calls it
    Mutates the binding. A run appends its tokens in place, at attention_mask's length less their
    number.
    Raises InvalidArgumentError, UnsupportedError.
    Source: onnxruntime 1.31.1 contrib_ops/cpu/bert/group_query_attention.cc
    """
    for name, tensor in _described(session, buffers).items():
        if not tensor.is_contiguous:
            raise InvalidArgumentError(
                f"buffers[{name!r}].stride is {tensor.stride}, expected contiguous for shape "
                f"{tensor.shape}: onnxruntime knows no strides. Allocate it anew, see reserve"
            )
        element = {DType.F32: np.float32, DType.F16: np.float16}.get(tensor.dtype, _BFLOAT16)
        at = device, 0, element, list(tensor.shape), tensor.data
        binding.bind_input(name, *at)
        binding.bind_output(name.replace("past_key_values", "present"), *at)


_BFLOAT16 = 16  # Source: onnx 1.23 onnx.proto, TensorProto.DataType


def cache_desc(key: TensorLike, value: TensorLike) -> CacheDesc:
    """One layer, zero-copy: each sequence of the batch is a block.

    key, value: (batch, num_kv_heads, num_tokens, head_dim), the buffers of past and present
    Raises InvalidArgumentError, UnsupportedError.
    """
    return CacheDesc.from_kv(
        describe(key, Layout.BLOCK_HND, name="key"),
        describe(value, Layout.BLOCK_HND, name="value"),
    )


def cache_view(
    session: Any,
    buffers: Mapping[str, TensorLike],
    facts: CacheFacts,
    *,
    holds: Callable[[], int | Sequence[int]] | None,
) -> CacheView:
    """All layers, zero-copy. Sequence s is row s of the batch, its first token first.

    session: an InferenceSession: names, sizes and dtypes are checked against its inputs
    buffers: by the name of the past input: those that are bound. Copies that Generator.get_output
             or a run without bindings returns can be described too, to read from
    facts:   see `cache_facts`
    holds:   returns the tokens of each row, asked at each use, and more are refused: those that
             attention_mask counted in the last run, or token_count() of a Generator less the token
             that was appended last. A session does not say it. None: the arrays have no room to
             spare, as those of a run without bindings
    Tokens past that are what earlier runs left there. A run in another thread is not seen.
    Raises InvalidArgumentError, UnsupportedError.
    """
    tensors = list(_described(session, buffers).values())
    layers = tuple(
        CacheDesc.from_kv(k, v) for k, v in zip(tensors[0::2], tensors[1::2], strict=True)
    )
    return CacheView(layers, facts, dense=True, holds=holds)


def cache_facts(
    *,
    num_layers: int,
    num_kv_heads: int,
    do_rotary: bool,
    rotary_interleaved: bool,
    rotary_dim: int,
    local_window_size: int = -1,
    version: str | None = None,
    fingerprint: str | None = None,
) -> CacheFacts:
    """The facts of a decoder whose attention is GroupQueryAttention.

    A session does not show the attributes of its nodes: the model file has them.
    do_rotary, rotary_interleaved, local_window_size: attributes of GroupQueryAttention. do_rotary
                 False: rotated in front of it by RotaryEmbedding, whose `interleaved` is given as
                 rotary_interleaved, before keys are stored
    rotary_dim:  twice the last extent of the cos_cache input; 0: keys are not rotated
    version:     onnxruntime.__version__
    fingerprint: of the model as it is computed. Keys of a model with quantized weights are not
                 those of the original
    Raises InvalidArgumentError.
    Source: onnxruntime 1.31.1 docs/ContribOperators.md, com.microsoft.GroupQueryAttention
    """
    flag("do_rotary", do_rotary)
    dim = integer("rotary_dim", rotary_dim)
    rotary: Literal["half", "interleaved", "none"] = "none"
    if do_rotary and dim == 0:
        raise InvalidArgumentError(
            "rotary_dim is 0 and do_rotary is True, expected twice the last extent of cos_cache"
        )
    if dim:
        rotary = "interleaved" if flag("rotary_interleaved", rotary_interleaved) else "half"
    window = integer("local_window_size", local_window_size + 1) - 1
    return CacheFacts(
        engine=f"onnxruntime {version}" if version else "onnxruntime",
        fingerprint=fingerprint,
        rotary=rotary,
        rotary_dim=dim,
        rope_applied=True,
        hadamard=False,
        scale_convention="multiply",  # there are no scales
        num_layers=integer("num_layers", num_layers, 1),
        first_layer=0,
        window=max(window, 0),
        total_kv_heads=integer("num_kv_heads", num_kv_heads, 1),
        first_kv_head=0,
        negative_slots="undefined",
    )


def _described(session: Any, buffers: Mapping[str, TensorLike]) -> dict[str, TensorDesc]:
    """A descriptor of each buffer, checked against the session's inputs and each other."""
    inputs = past_inputs(session)
    if buffers.keys() != inputs.keys():
        missing, more = sorted(inputs.keys() - buffers), sorted(buffers.keys() - inputs.keys())
        raise InvalidArgumentError(
            f"buffers lacks {missing} and has {more} beside them, expected one for each past input "
            "of the session. See reserve"
        )
    found: dict[str, TensorDesc] = {}
    run: tuple[int, int] | None = None  # batch and num_tokens
    for name, (shape, dtype) in inputs.items():
        tensor = describe(buffers[name], Layout.BLOCK_HND, name=f"buffers[{name!r}]")
        fits = tensor.ndim == 4 and all(
            wanted in (None, extent) for wanted, extent in zip(shape, tensor.shape, strict=True)
        )
        if not fits or tensor.dtype is not dtype:
            words = tuple("any" if extent is None else extent for extent in shape)
            raise InvalidArgumentError(
                f"buffers[{name!r}] is {tensor.dtype.name} of shape {tensor.shape}, expected "
                f"{dtype.name} of {words} as the session's input is"
            )
        run = run or (tensor.shape[0], tensor.shape[2])
        if run != (tensor.shape[0], tensor.shape[2]):
            raise InvalidArgumentError(
                f"buffers[{name!r}] has {tensor.shape[0]} rows of {tensor.shape[2]} tokens, "
                f"expected {run[0]} of {run[1]} as the first buffer has"
            )
        found[name] = tensor
    return found
