"""What the engine writes stands where the description says, and nothing else is touched."""

from __future__ import annotations

import numpy as np

from kvx_conformance import memory
from kvx_conformance.case import Lost, Wrong
from kvx_conformance.engine_probe import SENTINEL, Probe, engine_case
from kvx_core import KvxError, migrate


@engine_case("LMCache #2308, #2291: wrong offsets where a layout was guessed; docs/layouts.md")
def tokens_stand_where_described(probe: Probe) -> None:
    """Each number of each token, head, dim and layer that the engine has written is read by the
    description where the engine reads it."""
    probe.filled().require_as_described()
    lengths = probe.lengths()
    for sequence, length in enumerate(lengths):
        if probe.table(sequence).first + probe.table(sequence).length != length:
            raise Lost(f"sequence {sequence} has {probe.table(sequence)}, expected {length} tokens")


@engine_case("docs/describe.md, 4: lengths that fill no block, heads and tokens that differ")
def odd_lengths(probe: Probe) -> None:
    """Tokens stand right in a sequence of one token, and before, at and behind a block's end."""
    probe.write(0, 1)
    probe.require_as_described()
    size = probe.view().layers[0].block_size
    for length in sorted({2, size - 1, size, size + 1, 2 * size + 1}):
        count = length - len(probe.ids[0])
        if count > 0 and length <= probe.room:
            probe.write(0, count)
            probe.require_as_described()


@engine_case("engines write a prompt and a single token by code of their own: MLX RotatingKVCache")
def each_step(probe: Probe) -> None:
    """After a prompt and after each single token, the last token stands where the table says."""
    probe.write(0, 3)
    for _ in range(9):
        probe.write(0, 1)
        view = probe.view()
        position, block, offset = [*probe.places(view, 0)][-1]
        found = probe.described(view, block, offset)
        del view
        if position != len(probe.ids[0]) - 1:
            raise Lost(f"the last token held is {position}, expected {len(probe.ids[0]) - 1}")
        key, _ = probe.read(0, position)
        if not np.allclose(found[0], key, rtol=1e-6, atol=0):
            raise Wrong(f"K of position {position} is not where the table says")


@engine_case("docs/spec.md 7.1: what can be checked without reading a cache")
def descriptors_are_valid(probe: Probe) -> None:
    """Shapes, strides, dtypes and alignment of each layer pass `validate`."""
    for i, layer in enumerate(probe.filled().view().layers):
        try:
            layer.validate()
        except KvxError as error:
            raise Wrong(f"layer {i}: {error}") from error


@engine_case("vLLM: groups of layers share a first address; what is told apart by it alone is not")
def no_two_share_memory(probe: Probe) -> None:
    """K and V of all layers are memory of their own: what one is filled with shows in no other."""
    view = probe.filled().view()
    found = memory.tensors(view)
    for i, tensor in enumerate(found.values()):
        memory.elements(tensor)[...] = i + 1
    for i, ((layer, kv), tensor) in enumerate(found.items()):
        others = set(np.unique(memory.elements(tensor)).tolist()) - {i + 1}
        if others:
            layer_, kv_ = [*found][others.pop() - 1]
            raise Wrong(f"{kv} of layer {layer} shares memory with {kv_} of layer {layer_}")


@engine_case("docs/spec.md 7.1: the caller promises that the memory is there")
def described_bytes_are_the_engines(probe: Probe) -> None:
    """Every byte that is described lies in memory that the engine has allocated for its cache."""
    allocated = probe.part("memory")
    probe.filled()
    ranges = [(one.ctypes.data, one.ctypes.data + one.nbytes) for one in allocated()]
    for (layer, kv), tensor in memory.tensors(probe.view()).items():
        found = memory.elements(tensor)
        last = sum((n - 1) * step for n, step in zip(found.shape, found.strides, strict=True))
        begin, end = tensor.data, tensor.data + last + 1
        if not any(first <= begin and end <= stop for first, stop in ranges):
            raise Wrong(f"{kv} of layer {layer} is described beyond what was allocated")


@engine_case("a scatter's worst fault is the write that should not happen")
def a_step_writes_its_tokens_only(probe: Probe) -> None:
    """A step changes no byte of other tokens, of other sequences, or of room that is not used, but
    that it may clear what is behind its last token in a block."""
    probe.filled()
    before = {
        sequence: [probe.read(sequence, p) for p in _positions(probe, sequence)]
        for sequence in probe.ids
    }
    view = probe.view()
    marked = _mark_spare(probe)
    addresses = [tensor.data for tensor in memory.tensors(view).values()]
    rescales = view.layers[0].k.dtype.format.affine
    del view
    probe.write(0, 2)  # two, so that one of them is not the last of its block
    for sequence, tokens in before.items():
        held = _positions(probe, sequence)
        for position, (key, value) in zip(_old(probe, sequence, len(tokens)), tokens, strict=True):
            if position not in held or rescales:
                continue
            k, v = probe.read(sequence, position)
            if not np.array_equal(k, key) or (
                v is not None and value is not None and not np.array_equal(v, value)
            ):
                raise Wrong(f"a token of sequence 0 changed position {position} of {sequence}")
    view = probe.view()
    if [tensor.data for tensor in memory.tensors(view).values()] != addresses:
        return  # the engine has moved its cache, and spare room is new
    used = {place[1:] for sequence in probe.ids for place in probe.places(view, sequence)}
    *_, (_, last_block, last) = probe.places(view, 0)
    for (layer, kv), tensor in memory.tensors(view).items():
        found = memory.elements(tensor)
        for block, offset in marked - used:
            byte = found[block, offset]
            if block == last_block and offset > last and not byte.any():
                continue
            if not (byte == SENTINEL).all():
                raise Wrong(
                    f"a step wrote into block {block}, offset {offset} of layer {layer} {kv}, "
                    "where no token stands"
                )


@engine_case("docs/llama_cpp.md: cells that were freed keep their numbers")
def room_is_not_read(probe: Probe) -> None:
    """What stands where no token is does not show in the tokens that migrate, whatever it is."""
    probe.filled()
    found = []
    for byte in (SENTINEL, 0x21):
        view = probe.view()
        used = {place[1:] for sequence in probe.ids for place in probe.places(view, sequence)}
        for tensor in memory.tensors(view).values():
            kept = {place: memory.elements(tensor)[place].copy() for place in used}
            memory.elements(tensor)[...] = byte
            for place, was in kept.items():
                memory.elements(tensor)[place] = was
        del view
        plain = probe.plain()
        migrate(probe.span(), plain.span, probe.held())
        found.append(memory.contents(plain.view))
        probe.require_as_described()
    for here, there in zip(*found, strict=True):
        if not np.array_equal(here, there):
            raise Wrong("what stands where no token is came along with the tokens")


def _positions(probe: Probe, sequence: int) -> range:
    table = probe.table(sequence)
    return range(table.first, table.first + table.length)


def _old(probe: Probe, sequence: int, count: int) -> range:
    """The positions of the last `count` tokens before the step."""
    last = len(probe.ids[sequence]) - 2 * (sequence == 0)
    return range(last - count, last)


def _mark_spare(probe: Probe) -> set[tuple[int, int]]:
    """Fills with the sentinel what holds no token; its places."""
    view = probe.view()
    used = {place[1:] for sequence in probe.ids for place in probe.places(view, sequence)}
    size = view.layers[0].block_size
    spare = {
        (block, offset) for block in range(view.layers[0].num_blocks) for offset in range(size)
    } - used
    if view.null_block_id >= 0:
        spare = {place for place in spare if place[0] != view.null_block_id}
    for tensor in memory.tensors(view).values():
        found = memory.elements(tensor)
        for place in spare:
            found[place] = SENTINEL
    return spare
