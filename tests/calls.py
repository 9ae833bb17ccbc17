"""libkvx called through its C structs, from the caches and tables of the tests.

The Python API has tests of its own; here a test sets every field of a call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvx_core import CacheDesc, CacheSpan, Plane, ScaleDesc, SeqLens
from kvx_core._c import abi
from kvx_core.types import BlockTableFormat, DType, Layout, Memory, Transfer
from tests import native
from tests.caches import Cache
from tests.reference import Dense, End, Half, KvOffsets, Layer, Packed, Ragged, Slots

DTYPE = {
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.F32,
    torch.float8_e4m3fn: DType.F8_E4M3,
    torch.float8_e5m2: DType.F8_E5M2,
    torch.int8: DType.S8,
    torch.int32: DType.S32,
    torch.int64: DType.S64,
    torch.uint8: DType.U8,
}


def host_memory(address: int, num_bytes: int) -> Tensor:
    """(num_bytes,), uint8, uncopied; whoever owns the memory keeps it alive."""
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


class Mirror:
    """Copies of whole host allocations in other memory, in which a call runs.

    A copy is aligned as the original is, so that a call takes the path that it would take here.
    """

    alignment = 256

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}  # by address: all bytes here and there
        self.stream = torch.cuda.Stream().cuda_stream if self.device.type == "cuda" else None

    def address(self, tensor: Tensor) -> int:
        """Where the tensor's first element lies in the copy."""
        storage = tensor.untyped_storage()
        here = storage.data_ptr()
        if tensor.is_cuda or not here:  # made there, or nothing
            return tensor.data_ptr()
        if here not in self.copies:
            original = torch.empty(0, dtype=torch.uint8).set_(storage)
            size = storage.nbytes() + self.alignment
            room = torch.empty(size, dtype=torch.uint8, device=self.device)
            shift = (here - room.data_ptr()) % self.alignment
            self.copies[here] = original, room[shift : shift + storage.nbytes()]
        return self.copies[here][1].data_ptr() + tensor.data_ptr() - here

    def at(self, address: int, num_bytes: int) -> int:
        """Where host memory lies in a copy; it is made unless one holds the address already."""
        for here, there in self.copies.values():
            if 0 <= address - here.data_ptr() < here.numel():
                return there.data_ptr() + address - here.data_ptr()
        return self.address(host_memory(address, num_bytes))

    def upload(self) -> None:
        for here, there in self.copies.values():
            there.copy_(here)
        self.wait()

    def download(self) -> None:
        self.wait()
        for here, there in self.copies.values():
            here.copy_(there)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Backend:
    """Where calls run: a library, and the memory that descriptors name.

    The tensors of the tests lie in host memory. Without a mirror, the call reaches it there.
    """

    name: str
    memory: Memory
    library: Callable[[], Any] = abi.library
    mirror: Mirror | None = None
    stream: int | None = None  # without a mirror, which has its own

    @property
    def looks_first(self) -> bool:
        """A call looks at all of its data before it writes; a device skips what is out of range."""
        return self.memory == Memory.HOST

    def has_kernels(self) -> bool:
        info = abi.kvx_backend_info_t()
        abi.check(self.library().kvx_backend_info(info))
        return bool(info.has_cuda)

    def address(self, tensor: Tensor) -> int:
        return tensor.data_ptr() if self.mirror is None else self.mirror.address(tensor)

    # Descriptors. Those of caches and of keys and values borrow: keep the tensors alive until the
    # call has returned. Those of a lookup keep what they were made of.

    def tensor(self, tensor: Tensor | None, layout: Layout = Layout.BLOCK_CUSTOM) -> Any:
        if tensor is None:
            return abi.kvx_tensor_desc_t()
        return abi.kvx_tensor_desc_t(
            dtype=DTYPE[tensor.dtype],
            layout=layout,
            memory=self.memory,
            ndim=tensor.ndim,
            shape=abi.dims(tensor.shape),
            stride=abi.dims(tensor.stride()),
            data=self.address(tensor),
        )

    def layer(self, layer: Layer, bytes_per_block: int = 0) -> Any:
        k, v = layer.k, layer.v
        desc = abi.kvx_cache_desc_t(
            num_blocks=k.num_blocks,
            block_size=k.block_size,
            num_kv_heads=k.num_kv_heads,
            head_dim=k.head_dim,
            k=self.tensor(k.tensor, k.layout),
            v=self.tensor(None) if v is None else self.tensor(v.tensor, v.layout),
        )
        if bytes_per_block:
            desc.pool = abi.kvx_pool_desc_t(
                memory=self.memory,
                bytes_per_block=bytes_per_block,
                primary=self.address(k.tensor),
                secondary=None if k.secondary is None else self.address(k.secondary),
            )
        return desc

    def slots(self, slots: Tensor, invalid_slot: int = -1) -> Any:
        desc = abi.kvx_slot_mapping_t(
            dtype=DTYPE[slots.dtype],
            token_count=slots.numel(),
            invalid_slot=invalid_slot,
            slots=self.address(slots),
        )
        desc.made_of = slots
        return desc

    def seq_lens(self, lengths: Tensor) -> Any:
        desc = abi.kvx_seq_lens_t(
            dtype=DTYPE[lengths.dtype],
            seq_count=lengths.numel(),
            lengths=self.address(lengths),
        )
        desc.made_of = lengths
        return desc

    def scale(self, half: Half | None) -> Any:
        """The half's scales; a descriptor without data if it has none."""
        if half is None or half.scale is None:
            return abi.kvx_scale_desc_t()
        return abi.kvx_scale_desc_t(
            dtype=DTYPE[half.scale.dtype],
            granularity=half.granularity,
            ndim=half.scale.ndim,
            shape=abi.dims(half.scale.shape),
            stride=abi.dims(half.scale.stride()),
            data=self.address(half.scale),
        )

    def block_table(self, end: Packed | Ragged | KvOffsets) -> Any:
        desc = abi.kvx_block_table_t(
            index_dtype=DTYPE[end.indices.dtype],
            seq_count=end.indices.shape[0],
            beam_width=1,
            indices=self.address(end.indices),
            indices_count=end.indices.numel(),
        )
        desc.made_of = end
        if isinstance(end, Packed):
            desc.format = BlockTableFormat.PACKED
            desc.max_blocks_per_seq = end.indices.shape[1]
        elif isinstance(end, Ragged):
            desc.format = BlockTableFormat.RAGGED
            desc.seq_count = end.indptr.numel() - 1
            desc.indptr_dtype = DTYPE[end.indptr.dtype]
            desc.indptr = self.address(end.indptr)
            desc.indptr_count = end.indptr.numel()
        else:
            desc.format = BlockTableFormat.KV_OFFSETS
            desc.beam_width = end.indices.shape[1]
            desc.max_blocks_per_seq = end.indices.shape[3]
            desc.flags = abi.FLAG_KVCACHEINDEX
        desc.flags |= abi.FLAG_HOLES  # null entries are some of what these tables are for
        return desc

    def io(self, key: Tensor, value: Tensor | None, num_tokens: int) -> Any:
        return abi.kvx_kv_io_desc_t(
            key=self.tensor(key),
            value=self.tensor(value),
            num_tokens=num_tokens,
            num_kv_heads=key.shape[-2],
            head_dim=key.shape[-1],
        )

    # Descriptors of kvx_core for the same in this backend's memory.

    def moved(self, desc: Any, **num_bytes: int) -> Any:
        """One of them.

        num_bytes: of what lies at each of its addresses, if anything does; 0: part of an allocation
                   that has its address here already
        """
        fields = {name: getattr(desc, name) for name in num_bytes}
        if self.mirror is not None:
            for name, address in fields.items():
                fields[name] = address and self.mirror.at(address, num_bytes[name])
        return replace(desc, memory=self.memory, **fields)

    def moved_span(self, span: CacheSpan) -> CacheSpan:
        """One end of a migration."""
        view, table, slots, starts = span.view, span.block_table, span.slots, span.starts
        view = replace(
            view,
            layers=tuple(map(self.moved_layer, view.layers)),
            planes=tuple(map(self.moved_plane, view.planes)),
            k_scales=view.k_scales and tuple(map(self.moved_scale, view.k_scales)),
            v_scales=view.v_scales and tuple(map(self.moved_scale, view.v_scales)),
            k_zeros=view.k_zeros and tuple(map(self.moved_scale, view.k_zeros)),
            v_zeros=view.v_zeros and tuple(map(self.moved_scale, view.v_zeros)),
        )
        return replace(
            span,
            view=view,
            block_table=table
            and self.moved(
                table,
                indices=table.indices_count * table.index_dtype.itemsize,
                indptr=table.indptr_count * table.indptr_dtype.itemsize,
            ),
            slots=slots and self.moved(slots, slots=slots.token_count * slots.dtype.itemsize),
            starts=starts and self.moved_lens(starts),
        )

    def moved_layer(self, layer: CacheDesc) -> CacheDesc:
        return replace(
            layer,
            k=self.moved(layer.k, data=0),
            v=layer.v and self.moved(layer.v, data=0),
            pool=layer.pool and self.moved(layer.pool, primary=0, secondary=0),
        )

    def moved_plane(self, plane: Plane) -> Plane:
        scale, zero = self.moved_scale(plane.scale), self.moved_scale(plane.zero)
        return replace(
            self.moved(replace(plane, scale=None, zero=None), data=0), scale=scale, zero=zero
        )

    def moved_scale(self, scale: ScaleDesc | None) -> ScaleDesc | None:
        if scale is None:
            return None
        last = sum((n - 1) * step for n, step in zip(scale.shape, scale.stride, strict=True))
        return self.moved(scale, data=(last + 1) * scale.dtype.itemsize)

    def moved_lens(self, lens: SeqLens) -> SeqLens:
        return self.moved(lens, lengths=lens.seq_count * lens.dtype.itemsize)

    # Calls. They raise KvxError with libkvx's sentence, and with what a device has skipped.

    def call(self, function: str, *structs: Any) -> None:
        """Makes the call of libkvx and waits for it. Descriptors may be used for more calls."""
        stream = self.launch(function, *structs)
        if self.memory != Memory.HOST:
            library = self.library()
            abi.check(library.kvx_device_status(ctypes.c_void_p(stream)), library)

    def launch(self, function: str, *structs: Any) -> int | None:
        """The same without what a device has skipped; returns the stream."""
        library, mirror = self.library(), self.mirror
        stream = self.stream if mirror is None else mirror.stream
        arguments = [ctypes.byref(s) if isinstance(s, ctypes.Structure) else s for s in structs]
        if mirror is not None:
            mirror.upload()
        status = getattr(library, function)(*arguments, stream)
        if mirror is not None:
            mirror.download()
        abi.check(status, library)
        return stream

    def reader(self, flags: int) -> Backend:
        """Who describes slots, tables, lengths and starts: the copy engines' lie in host memory."""
        return replace(self, mirror=None) if flags & abi.FLAG_COPY_ENGINE else self

    def forget(self) -> None:
        """Drops the copies of the calls' memory; their descriptors must not be used any more."""
        if self.mirror is not None:
            self.mirror.copies.clear()

    def write(
        self,
        layer: Layer,
        key: Tensor,
        value: Tensor | None,
        slots: Tensor,
        invalid_slot: int = -1,
        *,
        flags: int = 0,
    ) -> None:
        desc = abi.kvx_write_desc_t(
            io=self.io(key, value, slots.numel()),
            slots=self.reader(flags).slots(slots, invalid_slot),
            k_scale_desc=self.scale(layer.k),
            v_scale_desc=self.scale(layer.v),
        )
        if flags:
            options = abi.kvx_write_options_t(flags=flags)
            self.call("kvx_write_kv_ext", self.layer(layer), desc, options)
        else:
            self.call("kvx_write_kv", self.layer(layer), desc)
        self.forget()

    def gather(
        self,
        layer: Layer,
        end: Packed | Ragged | KvOffsets,
        seq_lens: Tensor,
        key: Tensor,
        value: Tensor | None,
        *,
        max_seq_len: int,
        zero_fill: bool = False,
        bytes_per_block: int = 0,
        secondary_num_blocks: int = 0,
        null_block_id: int = -1,
        flags: int = 0,
    ) -> None:
        reader = self.reader(flags)
        table = reader.block_table(end)
        desc = abi.kvx_gather_desc_t(
            io=self.io(key, value, table.seq_count * table.beam_width * max_seq_len),
            block_table=table,
            seq_lens=reader.seq_lens(seq_lens),
            max_seq_len=max_seq_len,
        )
        k_scale, v_scale = self.scale(layer.k), self.scale(layer.v)
        options = abi.kvx_gather_options_t(
            flags=flags | (abi.FLAG_ZERO_FILL if zero_fill else 0),
            null_block_plus_1=null_block_id + 1,
            secondary_num_blocks=secondary_num_blocks,
            k_scale=ctypes.pointer(k_scale),
            v_scale=ctypes.pointer(v_scale),
        )
        self.call("kvx_gather_kv_ext", self.layer(layer, bytes_per_block), desc, options)
        self.forget()

    def migrate(
        self,
        src: Cache,
        src_end: End,
        dst: Cache,
        dst_end: End,
        seq_lens: Tensor,
        *,
        src_starts: Tensor | None = None,
        dst_starts: Tensor | None = None,
        src_head: int = 0,
        dst_head: int = 0,
        num_heads: int = 0,
        zero_fill: bool = False,
        flags: int = 0,
    ) -> None:
        reader = self.reader(flags)
        views = [
            View(self, cache, end, starts, head, reader)
            for cache, end, starts, head in (
                (src, src_end, src_starts, src_head),
                (dst, dst_end, dst_starts, dst_head),
            )
        ]
        lens = reader.seq_lens(seq_lens)
        desc = abi.kvx_migrate_desc_t(
            flags=flags | (abi.FLAG_ZERO_FILL if zero_fill else 0),
            num_heads=num_heads,
            seq_lens=ctypes.pointer(lens),
            src=ctypes.pointer(views[0].desc),
            dst=ctypes.pointer(views[1].desc),
        )
        self.call("kvx_migrate_kv", desc)
        self.forget()

    def migrate_spans(
        self,
        src: CacheSpan,
        dst: CacheSpan,
        seq_lens: Sequence[int],
        allocations: Iterable[Tensor],
        *,
        num_heads: int | None = None,
        find_scales: bool = False,
        zero_fill: bool = False,
        requantize: bool = False,
        hadamard: tuple[int, int] = (0, 0),
        transfer: Transfer = Transfer.KERNEL,
    ) -> None:
        """What kvx_core.migrate does, with everything in this backend's memory.

        allocations: those in which the two caches lie, which hold several layers or pools each
        hadamard: numbers of K and of V that are rotated together
        """
        for raw in allocations:
            self.address(raw)
        lens, ends = self.moved_lens(SeqLens.of(seq_lens)), [*map(self.moved_span, (src, dst))]
        desc = abi.kvx_migrate_desc_t(
            flags=abi.flags(zero_fill, find_scales, requantize)
            | abi.rotation_flags(*hadamard)
            | transfer,
            num_heads=num_heads or 0,
            max_seq_len=max(seq_lens),
            seq_lens=abi.pointer_to(lens),
            src=abi.pointer_to(ends[0]),
            dst=abi.pointer_to(ends[1]),
        )
        self.call("kvx_migrate_kv", desc)
        self.forget()


class View:
    """A kvx_span_t and everything that it points to."""

    def __init__(
        self,
        backend: Backend,
        cache: Cache,
        end: End,
        starts: Tensor | None,
        head_start: int,
        reader: Backend | None = None,
    ) -> None:
        reader = reader or backend
        self.kept = cache, end, starts  # structs have addresses alone
        self.layers = [backend.layer(layer, cache.bytes_per_block) for layer in cache.layers]
        self.scales = [
            [backend.scale(half) for half in (layer.k, layer.v)] for layer in cache.layers
        ]
        self.desc = abi.kvx_span_t(
            num_layers=len(self.layers),
            layers=abi.pointer_array(self.layers, abi.kvx_cache_desc_t),
            head_start=head_start,
            null_block_plus_1=getattr(end, "null_block_id", -1) + 1,
            k_scales=abi.pointer_array([k for k, _ in self.scales], abi.kvx_scale_desc_t),
            v_scales=abi.pointer_array([v for _, v in self.scales], abi.kvx_scale_desc_t),
        )
        secondary = cache.layers[0].k.secondary
        if secondary is not None:
            self.desc.secondary_num_blocks = secondary.shape[0]
        if isinstance(end, Slots):
            self.slots = reader.slots(end.slots, end.invalid_slot)
            self.desc.slots = ctypes.pointer(self.slots)
        elif not isinstance(end, Dense):
            assert isinstance(end, Packed | Ragged | KvOffsets)
            self.block_table = reader.block_table(end)
            self.desc.block_table = ctypes.pointer(self.block_table)
        if starts is not None:
            self.starts = reader.seq_lens(starts)
            self.desc.starts = ctypes.pointer(self.starts)


@cache
def hostgrid_library() -> Any:
    """The CUDA kernels built for the CPU: tests/hostgrid, or what $KVX_HOSTGRID_LIBRARY names."""
    named = os.environ.get("KVX_HOSTGRID_LIBRARY")
    return abi.load(Path(named) if named else native.hostgrid_library())


CPU = Backend("cpu", Memory.HOST)
# Any stream but the default one, which takes no batches of copies.
HOSTGRID = Backend("hostgrid", Memory.DEVICE, hostgrid_library, stream=2)

# Every backend that this machine can run.
BACKENDS = [CPU, HOSTGRID]
if CPU.has_kernels() and torch.cuda.is_available():
    BACKENDS.append(Backend("cuda", Memory.DEVICE, mirror=Mirror("cuda")))
