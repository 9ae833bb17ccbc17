"""The worker's half of the connector with caches of its own, without an engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvx_adapters import vllm
from kvx_core import CacheFacts
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.weights import Weights
from kvx_core.snapshot import Precision
from kvx_core.stores.blobs import Directory
from kvx_core.stores.prefix import Match, PrefixStore
from tests.fakes.vllm import H, L, N, by_permutation, make_spec
from tests.vllm_plugin.models import prompt

CHUNK = 32


TOKENS = prompt(40, seed=1)  # a chunk and a part of one; three blocks of 16


class _OfAnyScope(dict[Any, PrefixStore]):
    """A store for all scopes: what is refused is not asked for."""

    def __init__(self, store: PrefixStore) -> None:
        super().__init__()
        self._store = store

    def __missing__(self, scope: Any) -> PrefixStore:
        return self._store


class Worker:
    """A worker's half that holds some heads of every layer, and its caches."""

    def __init__(
        self,
        blobs: Directory,
        heads: tuple[int, int] = (0, H),
        block_size: int = N,
        by_request: bool = True,
        **settings: Any,
    ) -> None:
        from kvx_adapters.vllm_plugin.settings import Settings
        from kvx_adapters.vllm_plugin.worker import Held, WorkerHalf

        first, last = heads
        spec = make_spec("LBHNC", num_kv_heads=last - first, block_size=block_size)
        self.raw, self.kv_caches = by_permutation(spec)
        facts = CacheFacts(
            engine="vllm",
            fingerprint="f",
            num_layers=L,
            window=0,
            total_kv_heads=H,
            first_kv_head=first,
        )
        names = tuple(f"model.layers.{i}" for i in range(L))
        group = vllm.LayerGroup(names, tuple(range(L)), (spec,) * L, 0)
        self.store = store_in(blobs)
        self.half = WorkerHalf(
            _OfAnyScope(self.store),
            Settings(path=blobs.root, **settings),
            [Held(0, group, vllm.cache_view(self.kv_caches, spec, facts), 1)],
            torch.device("cpu"),
            Boundary(logging.getLogger("kvx").warning),
            by_request=by_request,
            weights=Weights(),
        )

    def fill(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for kv_cache in self.kv_caches:
            kv_cache.copy_(torch.randn(kv_cache.shape, generator=generator))

    def tokens(self, blocks: list[int], num_tokens: int) -> Tensor:
        """(layers, heads, num_tokens, K and V), as vLLM reads them."""
        rows = [kv_cache[blocks].transpose(0, 1).flatten(1, 2) for kv_cache in self.kv_caches]
        return torch.stack(rows)[:, :, :num_tokens]

    def save(
        self,
        blocks: list[int],
        *,
        final: bool = False,
        layerwise: bool = False,
        tokens: list[int] = TOKENS,
    ) -> None:
        from kvx_adapters.vllm_plugin.steps import Save, Scope, StepPlan

        node = self.store.nodes([])[0]
        step = StepPlan(saves=[Save("a", Scope(), node, 0, np.array(tokens), (blocks,), final)])
        if layerwise:
            for layer in range(L):
                self.half.save_layer(step, f"model.layers.{layer}")
                self.kv_caches[layer] += 1  # too late
        self.half.save(step)

    def load(self, blocks: list[int], start: int, stop: int, match: Match, wait: bool) -> None:
        from kvx_adapters.vllm_plugin.steps import Load, Scope, StepPlan

        load = Load("a", Scope(), match, start, stop, (blocks,), wait)
        self.half.load(StepPlan(loads=[load]))

    def stats(self) -> dict[str, float]:
        found = self.half.take_stats()
        return {} if found is None else found.data


def store_in(blobs: Directory) -> PrefixStore:
    return PrefixStore(
        blobs,
        fingerprint="f",
        num_layers=L,
        total_kv_heads=H,
        precision=Precision.of(make_spec("LBHNC").dtype),
        chunk_tokens=CHUNK,
    )


def filled(path: Path) -> Worker:
    """A worker that has saved TOKENS from blocks 3, 1 and 5."""
    worker = Worker(Directory(path))
    worker.fill()
    worker.save([3, 1, 5])
    worker.half.shutdown()
    return worker
