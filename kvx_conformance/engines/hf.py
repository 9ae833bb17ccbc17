"""HF transformers, on a GPU if torch sees one: DynamicCache, StaticCache, windows, pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper

from kvx_adapters import transformers as adapter
from kvx_adapters.cli.engines import Model
from kvx_conformance.engine import Floats, Table
from kvx_conformance.engines import tiny
from kvx_conformance.engines.tiny import DEVICE
from kvx_core import CacheFacts, CacheSpan, CacheView


@cache
def placed(make: Callable[[], Model]) -> Model:
    """A model where this engine runs: others have the same one on the CPU."""
    model = make()
    return replace(model, llama=deepcopy(model.llama).to(DEVICE))


llama, mistral = partial(placed, tiny.llama), partial(placed, tiny.mistral)


class Dynamic:
    """DynamicCache: each step makes new tensors."""

    computes, num_sequences, max_tokens = True, 1, 40

    def __init__(self) -> None:
        self.cache = self.new()

    def model(self) -> Model:
        return llama()

    def new(self) -> Any:
        return transformers.DynamicCache(config=self.model().config)

    def describe(self) -> CacheView:
        return adapter.cache_view(self.cache, self.facts())

    @torch.inference_mode()
    def write(self, sequence: int, tokens: Sequence[int], keys: None, values: None) -> None:
        ids = torch.tensor([list(tokens)], device=DEVICE)
        self.model().llama(input_ids=ids, past_key_values=self.cache)

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats]:
        table = self.table(0)
        at = position - table.first
        if not 0 <= at < table.length:
            raise LookupError(position)
        k, v = (
            np.stack([getattr(one, name)[0, :, at].cpu().numpy() for one in self.cache.layers])
            for name in ("keys", "values")
        )
        return k, v

    def table(self, sequence: int) -> Table:
        return Table(int(self.cache.get_seq_length()))

    def facts(self) -> CacheFacts:
        return adapter.cache_facts(self.model().llama, fingerprint=self.model().fingerprint)

    def reserve(self, sequence: int, count: int) -> None:
        adapter.reserve(self.cache, self.model().llama, batch_size=1, num_tokens=count)


class Cropped(Dynamic):
    """The same, with crop."""

    def keep(self, sequence: int, count: int) -> None:
        surplus = int(self.cache.get_seq_length()) - count
        if surplus:
            self.cache.crop(-surplus)


class Static(Dynamic):
    """StaticCache with room for 48 tokens."""

    def new(self) -> Any:
        return transformers.StaticCache(config=self.model().config, max_cache_len=48)


class Windowed(Dynamic):
    """DynamicCache whose layers keep the last 8 tokens of a window of 9."""

    def model(self) -> Model:
        return mistral()

    def group(self) -> Any:
        (group,) = adapter.layer_groups(self.cache, super().facts(), self.model().llama)
        return group

    def describe(self) -> CacheView:
        view: CacheView = self.group().view
        return view

    def span(self, sequences: Sequence[int]) -> CacheSpan:
        span: CacheSpan = self.group().span()
        return span

    def table(self, sequence: int) -> Table:
        count = int(self.cache.get_seq_length())
        if not count:
            return Table(0)
        held = min(count, self.cache.layers[0].keys.shape[2])
        return Table(held, first=count - held)

    def facts(self) -> CacheFacts:
        return replace(super().facts(), window=mistral().config.sliding_window)


class Pages:
    """PagedAttentionCache: pages of 4 tokens in one tensor. Its own indices write and read."""

    num_sequences, max_tokens = 3, 40

    def __init__(self) -> None:
        chosen = transformers.ContinuousBatchingConfig(
            page_size=4, num_blocks=40, max_batch_tokens=64, max_memory_percent=0.5
        )
        helper = DistributedHelper(None, None)
        config = llama().config
        self.cache = PagedAttentionCache(config, chosen, DEVICE, helper, torch.float32)
        self.lengths: dict[int, int] = {}
        (self.allocator,) = self.cache.cache_allocators.values()

    def describe(self) -> CacheView:
        view: CacheView = self.group().view
        return view

    def group(self) -> Any:
        facts = adapter.cache_facts(llama().llama, fingerprint=llama().fingerprint)
        (group,) = adapter.paged_groups(self.cache, facts)
        return group

    def span(self, sequences: Sequence[int]) -> CacheSpan:
        states = [
            SimpleNamespace(request_id=str(one), position_offset=self.lengths[one])
            for one in sequences
        ]
        lengths = [self.lengths[one] for one in sequences]
        span: CacheSpan = self.group().span(states, [0] * len(states), lengths)
        return span

    def write(self, sequence: int, tokens: Sequence[int], keys: Floats, values: Floats) -> None:
        self._update(sequence, len(tokens), keys, values)

    def _update(self, sequence: int, count: int, keys: Floats, values: Floats) -> list[Any]:
        past = self.lengths.get(sequence, 0)
        if count:
            state: Any = SimpleNamespace(request_id=str(sequence), current_len=lambda: past)
            assert self.cache.can_store_request_tokens(state, count)
        self.lengths[sequence] = past + count
        read: list[list[int]] = [[]]
        write: list[list[int]] = [[]]
        self.cache.extend_read_and_write_indices(str(sequence), past, count, read, write)
        kinds = self.cache.cache_allocators
        index = {
            "read_index": [torch.tensor(one, dtype=torch.int64, device=DEVICE) for one in read],
            "write_index": [torch.tensor(one, dtype=torch.int64, device=DEVICE) for one in write],
            "cu_seq_lens_k": dict.fromkeys(kinds, torch.zeros(2)),
            "max_length_k": dict.fromkeys(kinds, 0),
        }
        found = []
        for layer, pair in enumerate(zip(keys, values, strict=True)):
            k, v = (torch.from_numpy(one.swapaxes(0, 1)[None].copy()).to(DEVICE) for one in pair)
            found.append(self.cache.update(k, v, layer, dict(index)))
        return found

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats]:
        """What `update` gives attention, of a step of no tokens."""
        if not 0 <= position < self.lengths.get(sequence, 0):
            raise LookupError(position)
        none = np.zeros((3, 0, 2, 32), np.float32)
        found = self._update(sequence, 0, none, none)
        k, v = (np.stack([one[i][0][:, position].cpu().numpy() for one in found]) for i in (0, 1))
        return k, v

    def table(self, sequence: int) -> Table:
        blocks = self.allocator.block_table.get(str(sequence), [])
        return Table(self.lengths.get(sequence, 0), blocks=[*blocks])

    def facts(self) -> CacheFacts:
        found: CacheFacts = self.describe().facts
        return found

    def free(self, sequence: int) -> None:
        self.cache.free_blocks(str(sequence))
        self.lengths.pop(sequence)


ENGINES = (Cropped, Static, Windowed, Pages)
