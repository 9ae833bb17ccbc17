"""The pages that engines keep DeepSeek-V4's entries, windows and indexer keys in, as planes.

A page has the data of all of its entries and then their scales, so that no entry lies in one piece.
A plane over the data and one over the scales say so, and a migration moves entries between pages
of any number of entries and any distance. Bytes are copied. What must be quantized anew has
functions of its own, requantize_*, and is lossy. Spec: E.11
Source: vllm 0.32 models/deepseek_v4/{attention,compressor}.py, v1/attention/backends/mla/
{sparse_swa,indexer}.py; sglang 0.5.23 srt/mem_cache/deepseek_v4_memory_pool.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvx_core.argument_checks import bad_argument, coerce_fields, flag, instance, integer, one_of
from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.planes import Plane
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.tensors import require_whole
from kvx_core.desc.view import CacheView
from kvx_core.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from kvx_core.hybrid import ops
from kvx_core.hybrid.page_records import read_v4_page, write_v4_page
from kvx_core.hybrid.paged_cache import PagedCache
from kvx_core.ops.migrate import migrate
from kvx_core.types import Role

# A record: 448 numbers in E4M3 and 64 in BF16; then 7 scales in E8M0 and an unused byte.
NOPE_DIM, ROPE_DIM, SCALE_GROUP = 448, 64, 64
DATA_BYTES, SCALE_BYTES = NOPE_DIM + 2 * ROPE_DIM, NOPE_DIM // SCALE_GROUP + 1
RECORD_BYTES = DATA_BYTES + SCALE_BYTES
INDEX_DIM = 128  # numbers of an indexer key

# Roles of planes that kvx_core.Role has no name for.
WINDOW_SCALE, COMPRESSED_SCALE = 64, 65

# Bytes of an indexer key's numbers, and of its scales.
_INDEX_BYTES = {"fp8": (INDEX_DIM, 4), "mxfp4": (INDEX_DIM // 2, 4)}


def page_bytes(entries: int, entry_bytes: int = RECORD_BYTES, alignment: int = 576) -> int:
    """Bytes of a page of `entries` entries, rounded up to a multiple of `alignment`."""
    raw = integer("entries", entries, 1) * integer("entry_bytes", entry_bytes, 1)
    return -(-raw // integer("alignment", alignment, 1)) * alignment


def byte_pages(tensor: Tensor, num_bytes: int) -> Tensor:
    """Pages of bytes, (num_pages, num_bytes), over an engine's tensor, zero-copy.

    tensor:    (num_pages, ...), as an engine binds it: its first axis steps from page to page, what
               its other axes say is not used
    num_bytes: of a page, without padding; see page_bytes
    Raises InvalidArgumentError if the pages would overlap or pass the end of the memory.
    """
    size = instance("tensor", tensor, Tensor, "a tensor").element_size()
    step, first = tensor.stride(0) * size, tensor.storage_offset() * size
    pages, num_bytes = tensor.shape[0], integer("num_bytes", num_bytes, 1)
    if pages > 1 and step < num_bytes:
        raise InvalidArgumentError(
            f"pages of tensor are {step} bytes apart, expected at least {num_bytes}, a page"
        )
    last = first + (pages - 1) * step + num_bytes
    if pages and last > tensor.untyped_storage().nbytes():
        raise InvalidArgumentError(
            f"pages of tensor end at byte {last} of memory of {tensor.untyped_storage().nbytes()}"
        )
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), first, (pages, num_bytes), (step, 1))


@dataclass(frozen=True, slots=True)
class RecordPages:
    """Entries of a CSA or HCA layer, or its window, in records of 584 bytes.

    Raises InvalidArgumentError.
    """

    pages: Tensor  # (num_pages, at least 584 * entries) uint8
    layer: int
    entries: int  # of a page
    tokens_per_entry: int  # 4, 128; 1: a window

    def __post_init__(self) -> None:
        coerce_fields(self, layer=integer, entries=integer, tokens_per_entry=integer)
        _check_pages(self.pages, self.entries, RECORD_BYTES)

    @property
    def stores(self) -> str:
        """What the bytes are, for errors: both ends of a migration store the same."""
        return f"records of {RECORD_BYTES} bytes for {self.tokens_per_entry} tokens"

    @property
    def data(self) -> Tensor:
        """(num_pages, entries, 576) uint8: 448 E4M3 and then 64 BF16."""
        return _rows(self.pages, 0, DATA_BYTES * self.entries, DATA_BYTES)

    @property
    def scales(self) -> Tensor:
        """(num_pages, entries, 8) uint8: 7 E8M0, one for 64 numbers, and an unused byte."""
        first, last = DATA_BYTES * self.entries, RECORD_BYTES * self.entries
        return _rows(self.pages, first, last, SCALE_BYTES)

    def planes(self) -> tuple[Plane, ...]:
        """Both, as planes of bytes."""
        axes = ("block", "token", "dim")
        window = self.tokens_per_entry == 1
        shared: Any = {"tokens_per_entry": self.tokens_per_entry, "replicated": True}
        return (
            Plane.of(
                self.data, axes, Role.LATENT if window else Role.COMPRESSED, self.layer, **shared
            ),
            Plane.of(
                self.scales,
                axes,
                WINDOW_SCALE if window else COMPRESSED_SCALE,
                self.layer,
                **shared,
            ),
        )

    def read(self, slots: Tensor) -> Tensor:
        """The values of records: (n, 512) float32. slots: (n,) int64, page * entries + entry."""
        values = torch.empty(len(slots), NOPE_DIM + ROPE_DIM, device=self.pages.device)
        slots = slots.to(self.pages.device)
        read_v4_page(self.pages, slots, values, entries_per_page=self.entries)
        return values

    def write(self, values: Tensor, slots: Tensor) -> None:
        """Quantizes values, (n, 512) float32 or bfloat16, into records: see write_v4_page."""
        values, slots = values.to(self.pages.device), slots.to(self.pages.device)
        write_v4_page(values, slots, self.pages, entries_per_page=self.entries)


@dataclass(frozen=True, slots=True)
class IndexerPages:
    """Indexer keys: 128 numbers each, of all entries of a page, and then their scales.

    Raises InvalidArgumentError.
    """

    pages: Tensor  # (num_pages, at least 132 or 68 * entries) uint8
    layer: int
    entries: int  # of a page
    encoding: Literal["fp8", "mxfp4"]  # E4M3 with a float32 scale; E2M1 with E8M0 for 32 numbers
    hadamard: bool  # keys were rotated before they were quantized, as queries must be
    tokens_per_entry: int = 4  # 1: of DeepSeek-V3.2

    def __post_init__(self) -> None:
        coerce_fields(self, layer=integer, entries=integer, tokens_per_entry=integer, hadamard=flag)
        one_of("encoding", self.encoding, *_INDEX_BYTES)
        _check_pages(self.pages, self.entries, sum(_INDEX_BYTES[self.encoding]))

    @property
    def stores(self) -> str:
        """The encoding and the tokens of a key: keys of two ends that differ are no copies."""
        return f"indexer keys in {self.encoding} for {self.tokens_per_entry} tokens"

    def _parts(self) -> tuple[Tensor, Tensor]:
        data, scales = _INDEX_BYTES[self.encoding]
        first, last = data * self.entries, (data + scales) * self.entries
        return _rows(self.pages, 0, first, data), _rows(self.pages, first, last, scales)

    def planes(self) -> tuple[Plane, ...]:
        """Keys and scales, as planes of bytes."""
        axes = ("block", "token", "dim")
        shared: Any = {"tokens_per_entry": self.tokens_per_entry, "replicated": True}
        data, scales = self._parts()
        return (
            Plane.of(data, axes, Role.INDEX_K, self.layer, **shared),
            Plane.of(scales, axes, Role.INDEX_K_SCALE, self.layer, **shared),
        )


Pages = RecordPages | IndexerPages


def migrate_pages(
    src: Sequence[Pages],
    dst: Sequence[Pages],
    src_table: Any,
    dst_table: Any,
    seq_lens: Sequence[int],
    *,
    starts: Sequence[int] | None = None,
    null_block_id: int | None = None,
) -> int:
    """Moves sequences between the pages of two engines that serve the same model.

    src, dst:  pages of the same layers, which share the table of their end. Windows have a table of
               their own: they move in a call of their own
    src_table, dst_table: (seq_count, max_pages) page ids, -1 or null_block_id where there is none
    seq_lens:  tokens of each sequence that move; complete entries of them do
    starts:    first token of each sequence at both ends, None: 0. Of windows: the oldest that lives
    Bytes move as they are. Mutates these entries of the destination, padding excepted. Returns the
    bytes of tokens as `migrate` does.
    Raises UnsupportedError for ends that store something else, or keys that are rotated at one end
    only; otherwise what `migrate` raises.
    """
    for name, end in (("src", src), ("dst", dst)):
        if not isinstance(end, (list, tuple)):
            raise bad_argument(name, end, "a list or tuple of RecordPages and IndexerPages")
    if len(src) != len(dst):
        raise InvalidArgumentError(f"src has {len(src)} pages, expected {len(dst)}, as dst has")
    for i, (a, b) in enumerate(zip(src, dst, strict=True)):
        for name, pages in (("src", a), ("dst", b)):
            instance(f"{name}[{i}]", pages, Pages, "RecordPages or IndexerPages")  # type: ignore[arg-type]
        if isinstance(a, IndexerPages) and isinstance(b, IndexerPages) and a.hadamard != b.hadamard:
            raise UnsupportedError(
                f"src[{i}].hadamard is {a.hadamard} and dst[{i}].hadamard is {b.hadamard}: queries "
                "of the destination would not fit these keys. Compute the keys anew"
            )
        if a.stores != b.stores:
            raise UnsupportedError(
                f"src[{i}] stores {a.stores}, expected {b.stores} as dst[{i}] does. "
                "requantize_keys copies keys into another encoding, with a loss"
            )
    fields: Any = {} if null_block_id is None else {"null_block_id": null_block_id}
    ends = []
    for end, table in ((src, src_table), (dst, dst_table)):
        planes = tuple(plane for one in end for plane in one.planes())
        view = CacheView((), CacheFacts(), planes=planes, **fields)
        ends.append(view.at(block_table=table, starts=starts))
    return migrate(ends[0], ends[1], seq_lens, same_model=True)


def requantize_entries(
    src: RecordPages | PagedCache,
    dst: RecordPages | PagedCache,
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
    num_entries: int,
) -> None:
    """Copies a sequence's entries between an engine's pages and a PagedCache; lossy.

    Both have FP8 numbers, but with a scale for 64 of them or for an entry: numbers are decoded and
    quantized anew. RoPE dims are copied as they are. Indexer keys are not copied.
    src_blocks, dst_blocks: page or block ids of the sequence, in the order of its entries
    Mutates these entries of dst. Raises InvalidArgumentError, OutOfRangeError.
    """
    num_entries = integer("num_entries", num_entries)
    ends = []
    for name, end, blocks in (("src", src, src_blocks), ("dst", dst, dst_blocks)):
        kinds = RecordPages | PagedCache
        instance(name, end, kinds, "RecordPages or a PagedCache")  # type: ignore[arg-type]
        if isinstance(end, RecordPages):
            num_blocks, per = len(end.pages), end.entries
        else:
            num_blocks, per = end.num_blocks, end.schema.entries_per_block
        writes = name == "dst"
        ends.append(_slots(f"{name}_blocks", blocks, num_blocks, per, num_entries, writes=writes))
    values = src.read(ends[0]) if isinstance(src, RecordPages) else _read(src, ends[0])
    if isinstance(dst, RecordPages):
        dst.write(values, ends[1])
    else:
        _write(dst, values, ends[1])


def requantize_keys(
    src: IndexerPages | PagedCache,
    dst: IndexerPages | PagedCache,
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
    num_entries: int,
) -> None:
    """Copies a sequence's indexer keys into another encoding; lossy.

    A PagedCache has NVFP4 keys (E4M3 scales for 16 numbers) or those of its index_keys, an engine
    MXFP4 or FP8 keys: numbers are decoded and quantized anew. Both ends must rotate keys alike
    (IndexerPages.hadamard); a PagedCache holds what it was given. FP8 keys get the scale that
    engines give them, the power of two at or above the largest magnitude / 448; those that were FP8
    keep their values.
    src_blocks, dst_blocks: page or block ids of the sequence, in the order of its entries
    Mutates these keys of dst. Raises UnsupportedError for keys that are rotated at one end only;
    InvalidArgumentError, OutOfRangeError.
    """
    for name, one in (("src", src), ("dst", dst)):
        kinds = IndexerPages | PagedCache
        instance(name, one, kinds, "IndexerPages or a PagedCache")  # type: ignore[arg-type]
    rotated = {end.hadamard for end in (src, dst) if isinstance(end, IndexerPages)}
    if len(rotated) > 1:
        raise UnsupportedError(
            "src.hadamard and dst.hadamard differ: queries of the destination would not fit these "
            "keys. Compute the keys anew"
        )
    ours, theirs = (_KeyParts.of(end) for end in (src, dst))
    count = integer("num_entries", num_entries)
    places = []
    for name, end, blocks in (("src", ours, src_blocks), ("dst", theirs, dst_blocks)):
        num_blocks, per = end.codes.shape[:2]
        writes = name == "dst"
        places.append(_slots(f"{name}_blocks", blocks, num_blocks, per, count, writes=writes))
    if count == 0:
        return
    if theirs.form != "fp8":
        _migrate_keys(ours.plane(), src_blocks, theirs.plane(), dst_blocks, count)
        return
    # Scales are computed from the keys, which a migration does not do.
    values = torch.empty(1, count, 1, theirs.codes.shape[2])
    whole = Plane.of(
        values, _KEY_AXES, Role.INDEX_K, tokens_per_entry=ours.tokens_per_entry, replicated=True
    )
    _migrate_keys(ours.plane(), src_blocks, whole, [0], count)
    values = values[0, :, 0].to(theirs.codes.device)
    largest = values.abs().amax(-1).clamp(min=1e-4) / 448
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - (mantissa == 0.5).int()  # the power of two at or above
    codes = torch.ldexp(values, -exponent[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    per = theirs.codes.shape[1]
    at = places[1] // per, places[1] % per
    theirs.codes[at] = codes.view(torch.uint8)
    theirs.scales[at] = torch.ldexp(torch.ones_like(largest), exponent)


def _migrate_keys(
    src: Plane, src_blocks: Sequence[int], dst: Plane, dst_blocks: Sequence[int], count: int
) -> None:
    ends = []
    for plane, blocks in ((src, src_blocks), (dst, dst_blocks)):
        view = CacheView((), CacheFacts(), planes=(plane,))
        ends.append(view.at(block_table=[list(blocks)]))
    tokens = count * max(src.tokens_per_entry, dst.tokens_per_entry)
    migrate(ends[0], ends[1], [tokens], same_model=True)


_KEY_AXES = ("block", "token", "head", "dim")
_SCALES = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}


@dataclass(frozen=True, slots=True)
class _KeyParts:
    """Indexer keys as numbers with scales, of layer 0."""

    codes: Tensor  # (blocks, entries, bytes of a key) uint8
    scales: Tensor  # (blocks, entries, groups) uint8; fp8: (blocks, entries) float32
    form: str  # nvfp4, mxfp4 or fp8
    tokens_per_entry: int

    @staticmethod
    def of(end: IndexerPages | PagedCache) -> _KeyParts:
        if isinstance(end, IndexerPages):
            codes, scales = end._parts()
            if end.encoding == "fp8":
                scales = scales.view(torch.float32)[..., 0]
            return _KeyParts(codes, scales, end.encoding, end.tokens_per_entry)
        keys, of_keys, schema = end.indexer_keys, end.indexer_scales, end.schema
        if keys is None or of_keys is None:
            raise InvalidArgumentError(
                f"layer {schema.layer_idx} is of type {schema.attn_type.name}, which has no indexer"
            )
        return _KeyParts(keys, of_keys, end.index_keys, schema.compression_ratio)

    def plane(self) -> Plane:
        scales = self.scales.unsqueeze(2)
        if self.form == "fp8":
            scale = ScaleDesc.of(scales, "PER_TOKEN_HEAD")
        else:
            scale = ScaleDesc.of(scales.view(_SCALES[self.form]), "PER_GROUP")
        return Plane.of(
            self.codes.unsqueeze(2),
            _KEY_AXES,
            Role.INDEX_K,
            dtype="F8_E4M3" if self.form == "fp8" else "F4_E2M1",
            tokens_per_entry=self.tokens_per_entry,
            replicated=True,
            scale=scale,
        )


def _read(pool: PagedCache, slots: Tensor) -> Tensor:
    per = pool.schema.entries_per_block
    at = slots // per, slots % per
    nope = pool.entries_fp8[at].view(torch.float8_e4m3fn).float()
    if pool.inv_scale is not None:
        nope = nope * pool.inv_scale[at][:, None]
    return torch.cat((nope, pool.entries_rope[at].float()), 1)


def _write(pool: PagedCache, values: Tensor, slots: Tensor) -> None:
    per, device = pool.schema.entries_per_block, pool.entries_fp8.device
    blocks, places = ((slots // per).int()[:, None], (slots % per).int())
    ops.flush_write_hca(
        entry=values.to(device),
        slots=None,
        entry_ids=places.to(device),
        mask=None,
        block_table=blocks.to(device),
        entries_fp8=pool.entries_fp8,
        entries_rope=pool.entries_rope,
        inv_scale=pool.inv_scale,
    )


def _rows(pages: Tensor, first: int, last: int, size: int) -> Tensor:
    """Bytes `first` to `last` of each page as (n, rows, size), zero-copy."""
    require_whole("pages", pages)
    return pages[:, first:last].view(pages.shape[0], -1, size)


def _slots(
    name: str, blocks: Sequence[int], num_blocks: int, per: int, count: int, *, writes: bool
) -> Tensor:
    """Where the first `count` entries of a sequence lie: block * per + place.

    writes: entries go there, so that no two may have one place
    Raises InvalidArgumentError; OutOfRangeError for a block that is not there.
    """
    if not isinstance(blocks, (list, tuple)):
        raise bad_argument(name, blocks, "a list of the sequence's block ids")
    if len(blocks) * per < count:
        raise InvalidArgumentError(
            f"{name} has {len(blocks)} blocks of {per} entries, expected room for {count}"
        )
    ids = [integer(f"{name}[{i}]", block, -(2**63)) for i, block in enumerate(blocks)]
    ids = ids[: -(-count // per)]
    seen: dict[int, int] = {}
    for i, block in enumerate(ids):
        if not 0 <= block < num_blocks:
            raise OutOfRangeError(
                f"{name}[{i}] is {block}, expected 0 to {num_blocks - 1}: entries of the sequence "
                "are there"
            )
        if writes and seen.setdefault(block, i) < i:
            raise InvalidArgumentError(
                f"{name}[{i}] is {block}, as {name}[{seen[block]}] is, expected a block for each: "
                "their entries would overwrite each other"
            )
    e = torch.arange(count)
    return torch.tensor(ids, dtype=torch.int64)[e // per] * per + e % per


def _check_pages(pages: Tensor, entries: int, entry_bytes: int) -> None:
    instance("pages", pages, Tensor, "a tensor of bytes, see byte_pages")
    needed = entries * entry_bytes
    fits = pages.dim() == 2 and pages.dtype is torch.uint8 and pages.shape[1] >= needed
    if not fits or (pages.stride(1) != 1 and needed > 1):
        raise InvalidArgumentError(
            f"pages is {tuple(pages.shape)} of {pages.dtype}, expected (num_pages, {needed} or "
            f"more) of torch.uint8, for {entries} entries of {entry_bytes} bytes: see byte_pages"
        )
