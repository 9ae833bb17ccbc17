"""A layer's cache as one forward pass uses it: what it writes, and views that attention reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvx_core.errors import InvalidArgumentError
from kvx_core.hybrid import ops
from kvx_core.hybrid.forward_step import ForwardStep
from kvx_core.hybrid.paged_cache import IndexKeys, IndexRounding, PagedCache
from kvx_core.hybrid.schema import LayerCacheSchema
from kvx_core.hybrid.state_cache import StateCache


@dataclass(frozen=True, slots=True)
class SWAView:
    """The windows of all request slots. See StateCache for the tensors."""

    fp8: Tensor  # (R, window, nope_dim) uint8, E4M3
    rope: Tensor  # (R, window, rope_dim) bfloat16
    inv_scale: Tensor | None  # (R, window) float32; None: 1 for all
    positions: Tensor  # (R, window) int32, -1: empty
    head: Tensor  # (R,) int32
    request_slots: Tensor  # (B,) int32: the slots of this step's requests

    def in_order(self, slot: int) -> Tensor:
        """Places of a slot's tokens, those with the lowest positions first: (tokens,) int64.

        Allocates; not for captured graphs.
        """
        positions = self.positions[slot]
        order = positions.argsort()
        return order[positions[order] >= 0]


@dataclass(frozen=True, slots=True)
class ClassicalView:
    """The compressed entries of all request slots. Entry e of a slot is at place
    e % entries_per_block of block block_table[slot, e // entries_per_block].

    Entries from valid_lens on hold nothing, though their block may be there.
    """

    entries_fp8: Tensor  # (nb, epb, nope_dim) uint8, E4M3
    entries_rope: Tensor  # (nb, epb, rope_dim) bfloat16
    inv_scale: Tensor | None  # (nb, epb) float32; None: 1 for all
    block_table: Tensor  # (R, max_blocks) int32, -1 after the last block
    block_lens: Tensor  # (R,) int32, blocks of each slot
    valid_lens: Tensor  # (R,) int32, complete entries after the step of each slot in it; 0: others
    request_slots: Tensor  # (B,) int32


@dataclass(frozen=True, slots=True)
class IndexerView:
    """The indexer keys of all request slots; blocks and places are those of the entries."""

    keys: Tensor  # (nb, epb, indexer_head_dim / 2) uint8, E2M1; see PagedCache for other forms
    scales: Tensor  # (nb, epb, indexer_head_dim / 16) uint8, E4M3
    block_table: Tensor  # (R, max_blocks) int32
    valid_lens: Tensor  # (R,) int32, as of ClassicalView
    request_slots: Tensor  # (B,) int32
    form: IndexKeys
    rounding: IndexRounding  # of new keys


@dataclass(frozen=True, slots=True, repr=False)
class LayerCacheHandle:
    """A layer's cache in the current step of its manager. See KVCacheManager.acquire.

    Views share the memory of the cache. None of them is a copy.
    """

    layer_idx: int
    schema: LayerCacheSchema
    state: StateCache
    paged: PagedCache | None
    block_table: Tensor | None
    block_lens: Tensor | None
    step: ForwardStep
    entry: Tensor  # (R, head_dim) bfloat16, scratch that layers take turns at
    index_key: Tensor  # (R, indexer_head_dim) bfloat16

    def __repr__(self) -> str:
        return (
            f"LayerCacheHandle({self.schema.attn_type.name} layer {self.layer_idx}, "
            f"{len(self.request_slots)} requests)"
        )

    @property
    def request_slots(self) -> Tensor:
        """(B,) int32: the slots of the step's requests."""
        return self.step.request_slots

    @property
    def positions(self) -> Tensor:
        """(tokens,) int32: positions of the step's tokens in their sequences."""
        return self.step.positions

    @property
    def request_ids(self) -> Tensor:
        """(tokens,) int32: the request of each token, an index into request_slots."""
        return self.step.request_ids

    def write_swa(self, x: Tensor) -> None:
        """Appends the step's tokens to the windows of their requests.

        x: (tokens, head_dim) bfloat16, in the order of `positions`
        Mutates the windows. Tails are not touched: see flush.compress_csa.
        """
        state = self.state
        step = self.step
        ops.append_swa(
            x=x,
            positions=step.positions,
            slots=step.token_slots,
            swa_fp8=state.swa_fp8,
            swa_rope=state.swa_rope,
            swa_inv=state.swa_inv,
            swa_pos=state.swa_pos,
            swa_head=state.swa_head,
            one_each=step.one_each,
            spans=step.token_spans,
        )

    def read_swa_view(self) -> SWAView:
        """The windows."""
        state = self.state
        return SWAView(
            fp8=state.swa_fp8,
            rope=state.swa_rope,
            inv_scale=state.swa_inv,
            positions=state.swa_pos,
            head=state.swa_head,
            request_slots=self.request_slots,
        )

    def read_classical_view(self) -> ClassicalView:
        """The compressed entries. Raises InvalidArgumentError for a layer that has none."""
        if self.paged is None or self.block_table is None or self.block_lens is None:
            raise InvalidArgumentError(
                f"layer {self.layer_idx} is of type {self.schema.attn_type.name}, which has no "
                "compressed entries"
            )
        return ClassicalView(
            entries_fp8=self.paged.entries_fp8,
            entries_rope=self.paged.entries_rope,
            inv_scale=self.paged.inv_scale,
            block_table=self.block_table,
            block_lens=self.block_lens,
            valid_lens=self.step.compression[self.schema.compression_ratio].valid_lens,
            request_slots=self.request_slots,
        )

    def read_indexer_view(self) -> IndexerView:
        """The indexer keys. Raises InvalidArgumentError for a layer that has none."""
        pool = self.paged
        keys, scales = (pool.indexer_keys, pool.indexer_scales) if pool else (None, None)
        if pool is None or keys is None or scales is None or self.block_table is None:
            raise InvalidArgumentError(
                f"layer {self.layer_idx} is of type {self.schema.attn_type.name}, which has no "
                "indexer"
            )
        return IndexerView(
            form=pool.index_keys,
            rounding=pool.index_rounding,
            keys=keys,
            scales=scales,
            block_table=self.block_table,
            valid_lens=self.step.compression[self.schema.compression_ratio].valid_lens,
            request_slots=self.request_slots,
        )
