"""llama.cpp's cache tensors -> descriptors, zero-copy.

There are no blocks. A layer has one tensor for K and one for V, each with room for `cells` tokens
in each of `streams` streams; a stream is one block here. A batch takes the first free cells, so
those of a sequence are neither in order nor adjacent: attn_inp_k_idxs says which.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_adapters.llama_cpp.ggml_types import dtype_of, is_quantized, row_bytes
from kvx_adapters.llama_cpp.held import positions_held
from kvx_adapters.llama_cpp.memory import Memory
from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    SlotMapping,
    TensorDesc,
    UnsupportedError,
    describe,
)
from kvx_core.argument_checks import flag, integer
from kvx_core.desc.tensors import TensorLike

# numpy has no bfloat16: its bytes are borrowed as another type of two bytes.
_ARRAY = {DType.F32: np.float32, DType.F16: np.float16, DType.BF16: np.float16}


def cache_desc(
    k: Any, v: Any, *, num_kv_heads: int, v_transposed: bool, owner: object = None
) -> CacheDesc:
    """One layer of llama.cpp's cache in host memory, zero-copy: a stream is a block.

    k, v:         the ggml_tensor of cache_k_l{i} and cache_v_l{i} as a ctypes structure, or any
                  object with its fields `type`, `ne`, `nb` and `data`. `ne` is
                  [num_kv_heads * head_dim, cells, streams]
    num_kv_heads: of this layer, llama_model_n_head_kv
    v_transposed: whether the context was made without flash attention: V then is [num_kv_heads *
                  head_dim, cells] in memory, though its `ne` does not change. See `v_transposed`
    owner:        what must live as long as the descriptor, since the context owns the memory
    Raises InvalidArgumentError, UnsupportedError.
    Source: llama.cpp v0.5.0 src/llama-kv-cache.cpp, llama_kv_cache, cpy_k, cpy_v
    """
    heads = integer("num_kv_heads", num_kv_heads, 1)
    transposed = flag("v_transposed", v_transposed)
    key = _described("k", k, heads, False, owner)
    value = _described("v", v, heads, transposed, owner)
    return CacheDesc.from_kv(key, value)


def cache_view(
    tensors: Sequence[tuple[Any, Any]],
    facts: CacheFacts,
    *,
    num_kv_heads: int | Sequence[int],
    v_transposed: bool,
    memory: Memory | None,
    owner: object = None,
    outdated: Callable[[], str | None] | None = None,
) -> CacheView:
    """All layers of one cache of a context, zero-copy. See `span` for the tokens.

    tensors:  (k, v) of each layer, as `cache_desc` takes them. A model with sliding windows has two
              caches with cells of their own: one view for each
    facts:    see `cache_facts`
    num_kv_heads: of all layers, or where they differ a list of each one's: llama_model_n_head_kv
              is that of layer 0
    memory:   of the context: before each use of the view, it settles what waits for the next
              llama_decode. None only for tensors that no context uses
    outdated: called before the view is used, and before `memory` is; returns why its memory is
              gone, or None. Memory of a context stays where it is until llama_free
    The other arguments: as in `cache_desc`. Raises InvalidArgumentError, UnsupportedError.
    """
    heads = num_kv_heads if isinstance(num_kv_heads, Sequence) else [num_kv_heads] * len(tensors)
    if len(heads) != len(tensors):
        raise InvalidArgumentError(
            f"num_kv_heads has {len(heads)} numbers, expected {len(tensors)}, one per layer"
        )
    layers = tuple(
        cache_desc(k, v, num_kv_heads=n, v_transposed=v_transposed, owner=owner)
        for (k, v), n in zip(tensors, heads, strict=True)
    )
    if heads is not num_kv_heads:
        require_same_head_dim(layers)
    asked = outdated if memory is None else partial(_unsettled, memory, outdated)
    return CacheView(layers, facts, outdated=asked)


def require_same_head_dim(layers: Sequence[CacheDesc]) -> None:
    """Raises InvalidArgumentError where one number of heads gives layers vectors of several sizes.

    Layers of one cache have heads of one size; where their numbers of heads differ, one number
    would cut the vectors of others wrongly.
    """
    dims = sorted({(layer.head_dim, layer.v_head_dim) for layer in layers})
    if len(dims) > 1:
        raise InvalidArgumentError(
            f"num_kv_heads gives layers a head_dim of {' and '.join(str(dim) for dim, _ in dims)}, "
            "expected one: the layers have different numbers of heads. Give num_kv_heads of each "
            "layer to cache_view; a state of such a model has no way in"
        )


def _unsettled(memory: Memory, outdated: Callable[[], str | None] | None) -> str | None:
    """Why a view cannot be used, after what waits in the context was done; None if it can."""
    gone = None if outdated is None else outdated()
    if gone is not None:
        return gone
    try:
        memory.settle()
    except InvalidArgumentError as error:
        return str(error)
    return None


def span(view: CacheView, cells: Mapping[int, npt.ArrayLike], *, memory: Memory) -> CacheSpan:
    """The tokens of sequences, one after the other: one end of a migration.

    view:   as `cache_view` returns it
    cells:  of each sequence, by its number in the context: integers, see `slot_mapping`
    memory: of the context, which settles what waits. More tokens than it holds of a sequence are
            refused at each use, as after llama_memory_seq_rm; so is a sequence without some of the
            tokens in its middle, and a span whose tokens have been shifted or copied since, if KVX
            was what settled it. Make a new one after each. Tokens that were removed and computed
            anew at the same positions are not seen: they may be in other cells
    With all cells of each sequence, the span says at which positions they begin.
    Mutates the context's cache as Memory.settle. Raises InvalidArgumentError.
    """
    memory.settle()
    positions = {sequence: positions_held(memory, view, sequence) for sequence in cells}
    begins = {sequence: found.start for sequence, found in positions.items() if found}
    held = replace(
        view,
        outdated=partial(_moved, memory, memory.num_settled, begins, view.outdated),
        holds=partial(_num_held, memory, view, tuple(cells)),
    )
    slots = {sequence: np.asarray(of_one) for sequence, of_one in cells.items()}
    every = [found for found in slots.values() if len(found)]
    # Of some cells of a sequence it is not known which ones they are.
    whole = all(len(slots[sequence]) == len(found) for sequence, found in positions.items())
    return held.at(
        slots=np.concatenate(every) if every else [],
        first_positions=[found.start for found in positions.values()] if whole and every else None,
    )


def _moved(
    memory: Memory,
    num_settled: int,
    begins: Mapping[int, int],
    outdated: Callable[[], str | None] | None,
) -> str | None:
    """Why a span is out of date, or None."""
    gone = None if outdated is None else outdated()
    if gone is not None:
        return gone
    if memory.num_settled != num_settled:
        return (
            "positions were shifted, or sequences copied, since the span was made, expected "
            "neither: its cells may have other tokens. Make a new span, of the cells that are left"
        )
    for sequence, begin in begins.items():
        now = memory.positions(sequence)
        if now and now.start != begin:
            return (
                f"sequence {sequence} began at position {begin} when the span was made, and now "
                f"begins at {now.start}: its first cells are gone. Make a new span, of the cells "
                "that are left"
            )
    return None


def _num_held(memory: Memory, view: CacheView, sequences: Sequence[int]) -> list[int]:
    """The tokens of each sequence."""
    return [len(positions_held(memory, view, sequence)) for sequence in sequences]


def slot_mapping(cells: TensorLike | Sequence[int]) -> SlotMapping:
    """The cells of tokens, the sequences one after the other.

    cells: (num_tokens,), the entries of attn_inp_k_idxs for each batch that stored the tokens, in
           the order of positions: stream * cells + cell
    """
    return SlotMapping.of(cells)


def v_transposed(num_k_indices: int, num_v_indices: int) -> bool:
    """Whether V is transposed, from the inputs of a graph that writes it.

    num_k_indices, num_v_indices: entries of attn_inp_k_idxs and attn_inp_v_idxs of one graph. A
    transposed V has an index for every number, otherwise one for every token
    Raises InvalidArgumentError.
    Source: llama.cpp v0.5.0 src/llama-kv-cache.cpp, build_input_v_idxs
    """
    keys = integer("num_k_indices", num_k_indices, 1)
    values = integer("num_v_indices", num_v_indices, 1)
    if values % keys:
        raise InvalidArgumentError(
            f"num_v_indices is {values}, expected a multiple of num_k_indices, {keys}. Take both "
            "from the same graph"
        )
    return values != keys


def _described(name: str, tensor: Any, heads: int, transposed: bool, owner: object) -> TensorDesc:
    """K or V of one layer: [stream, cell, head, dim]."""
    dtype = dtype_of(tensor.type, f"{name}.type")
    numbers, cells, streams = (integer(f"{name}.ne[{i}]", tensor.ne[i], 1) for i in range(3))
    size = row_bytes(dtype, numbers)
    for axis, expected in ((1, size), (2, size * cells)):
        if tensor.nb[axis] != expected:
            raise InvalidArgumentError(
                f"{name}.nb[{axis}] is {tensor.nb[axis]} bytes, expected {expected} as "
                f"{name}.ne gives them: pass the cache's own tensor, not a view of it (view_src)"
            )
    if not tensor.data:
        raise InvalidArgumentError(
            f"{name}.data is null, expected the address of the cache. Take the tensor from a "
            "context that allocates: llama_model_params.no_alloc is false"
        )
    memory = (ctypes.c_uint8 * (streams * cells * size)).from_address(tensor.data)
    memory.owner = owner  # type: ignore[attr-defined]  # ctypes arrays take attributes
    flat = np.ctypeslib.as_array(memory)
    return shaped(name, flat, dtype, (streams, cells, heads, numbers), transposed)


def shaped(
    name: str,
    flat: npt.NDArray[np.uint8],
    dtype: DType,
    shape: tuple[int, int, int, int],
    transposed: bool,
) -> TensorDesc:
    """Bytes of K or V as [stream, cell, head, dim].

    shape: (streams, cells, heads, numbers of all heads)
    Raises InvalidArgumentError, UnsupportedError.
    """
    streams, cells, heads, numbers = shape
    if numbers % (heads * dtype.numbers):
        raise InvalidArgumentError(
            f"{name}.ne[0] is {numbers}, expected num_kv_heads, {heads}, times a head_dim"
            + (f" of whole units of {dtype.numbers} numbers" if dtype.numbers > 1 else "")
        )
    if transposed and is_quantized(dtype):
        raise UnsupportedError(
            f"v_transposed is True and {name}.type is {dtype.name.lower()}, expected f32, f16 or "
            "bf16: make the context with flash attention, which a quantized V needs"
        )
    if is_quantized(dtype):
        units = flat.reshape(streams, cells, heads, row_bytes(dtype, numbers // heads))
        return describe(units, Layout.BLOCK_NHD, dtype=dtype, name=name)
    array = flat.view(_ARRAY[dtype])
    if transposed:
        array = array.reshape(streams, heads, numbers // heads, cells).transpose(0, 3, 1, 2)
    else:
        array = array.reshape(streams, cells, heads, numbers // heads)
    return describe(array, Layout.BLOCK_NHD, dtype=dtype, name=name)
