"""migrate: sequences from one engine's cache into another's, in one pass. Spec: E.3"""

from __future__ import annotations

from collections.abc import Sequence

from kvx_core import _abi, facts
from kvx_core.errors import FactsMismatchError
from kvx_core.memory_checks import check_index_memory
from kvx_core.reorder import reordered
from kvx_core.streams import current_stream
from kvx_core.tables import SeqLens
from kvx_core.tensors import TensorLike
from kvx_core.types import Transfer
from kvx_core.view import CacheSpan, CacheView
from kvx_core.words import address, flag, integer


def migrate(
    src: CacheView | CacheSpan,
    dst: CacheView | CacheSpan,
    seq_lens: SeqLens | TensorLike | Sequence[int],
    *,
    num_heads: int | None = None,
    zero_fill: bool = False,
    find_scales: bool = False,
    same_model: bool = False,
    transfer: Transfer | str = Transfer.KERNEL,
    stream: int | None = None,
) -> int:
    """Moves sequences from one cache into another: all layers, K and V, in one call and one pass.

    Token src.starts[s] + i of sequence s goes to dst.starts[s] + i, for i < seq_lens[s], heads
    src.head_start + h to dst.head_start + h, for h < num_heads. Layout, strides, block size, dtype,
    scales and table of the two ends may differ, and so may the order of K's rotary dims, where the
    facts of both ends say what it is: K is reordered on the way.

    src, dst:  CacheView.at(block_table=...) or .at(slots=...), or a dense CacheView, in which
               sequence s is block s
    seq_lens:  (seq_count,), int32 or int64, or a list of int: the tokens to move; lengths on a
               device are read back
    num_heads: None: all heads, of which both ends hold the same number
    zero_fill: zero the destination tokens whose source block is null; they keep what they held
               otherwise
    find_scales: into FP8: find the scales on the way and store them in those of `dst`, which are
               per token and head
    same_model: both ends serve the same model and store it alike, where their facts do not say
    transfer:  how a device moves the bytes: a Transfer or its name
    stream:    CUDA stream; None: torch's current one if a tensor is torch's, else the
               default stream. Ignored for HOST memory
    Mutates the destination tokens named above, nothing else.
    Returns the bytes of those tokens as the destination stores them.
    Raises FactsMismatchError if a copy would not mean the same, else InvalidArgumentError,
    UnsupportedError, OutOfRangeError; then nothing was written.
    Spec: E.3
    """
    src, dst = CacheSpan.of(src, name="src"), CacheSpan.of(dst, name="dst")
    lens = SeqLens.of(seq_lens)
    if num_heads is not None:
        num_heads = integer("num_heads", num_heads)
    found = facts.compare(
        src.view.facts,
        dst.view.facts,
        src_head_start=src.head_start,
        dst_head_start=dst.head_start,
        same_model=flag("same_model", same_model),
    )
    if found.reasons:
        raise FactsMismatchError(found.reasons)
    bytes_per_token = dst.view.bytes_per_token(num_heads)
    for transform in found.transforms:
        src, dst = reordered(src, dst, transform, find_scales=flag("find_scales", find_scales))
    lengths = lens.to_numpy()
    num_tokens = int(lengths.sum()) * rows_per_sequence(src, dst, lens)
    copy_tokens(
        src,
        dst,
        lens,
        num_heads=num_heads,
        zero_fill=zero_fill,
        find_scales=find_scales,
        transfer=transfer,
        max_seq_len=int(lengths.max(initial=0)),
        stream=stream,
    )
    return num_tokens * bytes_per_token


def copy_tokens(
    src: CacheSpan,
    dst: CacheSpan,
    lens: SeqLens,
    *,
    num_heads: int | None = None,
    zero_fill: bool = False,
    find_scales: bool = False,
    transfer: Transfer | str = Transfer.KERNEL,
    max_seq_len: int = 0,
    stream: int | None = None,
) -> None:
    """What migrate does after it has compared facts. Waits for no device.

    max_seq_len: the tokens of a sequence that move at most; 0: all
    """
    transfer = Transfer.of(transfer, "transfer")
    zero_fill, find_scales = flag("zero_fill", zero_fill), flag("find_scales", find_scales)
    if stream is not None:
        stream = address("stream", stream)
    src.view.require_in_place("src")
    dst.view.require_in_place("dst")
    for name, tensor in dst.view.read_only.items():
        tensor.require_writable(f"dst.{name}")
    if find_scales:
        for name, scales in (("k_scales", dst.view.k_scales), ("v_scales", dst.view.v_scales)):
            for i, scale in enumerate(scales or ()):
                if scale is not None:
                    scale.require_writable(f"dst.{name}[{i}]")
    if src.view.layers and dst.view.layers:
        tensors = {"src.layers[0].k": src.view.layers[0].k, "dst.layers[0].k": dst.view.layers[0].k}
        indices = {
            f"{end}.{name}": getattr(span, name)
            for end, span in (("src", src), ("dst", dst))
            for name in ("block_table", "slots", "starts")
        }
        if lens.seq_count:
            indices["seq_lens"] = lens
        check_index_memory(indices, tensors, transfer)
        if stream is None:
            stream = _abi.stream_now(current_stream(*(t.owner for t in tensors.values())))
    struct = _abi.kvx_migrate_desc_t(
        flags=_abi.flags(zero_fill, find_scales) | transfer,
        num_heads=num_heads or 0,
        max_seq_len=min(max(max_seq_len, 0), 2**32 - 1),
        seq_lens=_abi.pointer_to(lens),
        src=_abi.pointer_to(src),
        dst=_abi.pointer_to(dst),
    )
    _abi.check(_abi.library().kvx_migrate_kv(struct, stream))


def rows_per_sequence(src: CacheSpan, dst: CacheSpan, lens: SeqLens) -> int:
    """Rows that share one length: the beams of a KV_OFFSETS table, else 1."""
    rows = [end.block_table.num_rows for end in (src, dst) if end.block_table is not None]
    return max(rows, default=lens.seq_count) // max(lens.seq_count, 1) or 1
