"""KVX's connector for the toy engine: all that another engine has to bring."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvx_core import BlockTable, CacheDesc, CacheFacts, CacheView, Layout, describe
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.counts import Counts
from kvx_core.connector.epochs import Epochs
from kvx_core.connector.loader import Loader
from kvx_core.connector.lookups import Lookups
from kvx_core.connector.plan import BlockIds, Plan
from kvx_core.connector.policy import Policy
from kvx_core.connector.saver import Saver
from kvx_core.connector.scoped import Scoped
from kvx_core.connector.settings import StoreSettings
from kvx_core.connector.spread import SaveBudget
from kvx_core.connector.weights import Report, Weights
from kvx_core.snapshot import Precision, Section
from tests.connector.toy_engine import BLOCK_SIZE, HEADS, LAYERS, Engine, Request


class ToyConnector:
    """Stores and loads what a toy engine computes. The engine's scheduler and worker are one."""

    def __init__(self, engine: Engine, settings: StoreSettings, store: Any = None) -> None:
        self.store = store or settings.store(
            fingerprint="toy",
            num_layers=LAYERS,
            total_kv_heads=HEADS,
            precision=Precision.of("float32"),
            new_chunk_tokens=16,
        )
        stores, self.counts = Scoped(self.store), Counts()
        self.weights = Weights()  # the engine's; a test may change them
        boundary = Boundary(logging.getLogger("toy").warning)
        self.view = view_of(engine)
        self.layers = tuple(range(LAYERS))
        self.policy = Policy(
            stores,
            boundary,
            Lookups(boundary, seconds=settings.lookup_seconds),
            self.store.chunk_tokens,
            min_tokens=settings.min_tokens,
            asynchronous=True,
            spread=SaveBudget(self.store.chunk_tokens),
            epochs=Epochs(self.weights),
        )
        self.saver = Saver(
            stores, settings, boundary, self.counts, self.sections, self.layers, (0, HEADS)
        )
        self.loader = Loader(stores, settings, boundary, self.counts, self.sections)
        self.plan = Plan()

    def lookup(self, request: Request) -> int | None:
        return self.policy.lookup(request, 0)

    def allocated(self, request: Request, num_loaded: int) -> None:
        self.policy.allocated(request, (request.block_ids,), num_loaded)

    def begin_step(self, running: Sequence[Request], stops: Mapping[str, int]) -> None:
        self.policy.look_at_weights()  # `step` does not
        for request in running:
            stop = stops[request.request_id]
            start = request.num_computed_tokens
            self.policy.step(request.request_id, start, stop, (), are_new=False)
        self.plan = self.policy.take_plan(is_idle=not running)
        for load in self.plan.loads:
            self.loader.start(load)
        if not running:
            self.loader.wait(0.01)

    def end_step(self) -> None:
        self.saver.save(self.plan, self.plan.saves)

    def reports(self) -> tuple[set[Any], dict[Any, int]]:
        """Requests whose end is saved; requests whose load is over, and how far it came."""
        weights = self.weights
        if weights.generation:
            changing, origin = weights.is_changing, weights.origin
            report = Report(self.plan.generation, weights.generation, changing, origin)
            self.policy.epochs.take({0: report})
        results = self.loader.take_results()
        loaded = dict.fromkeys(results.loaded, 1 << 30)
        for load, first in results.failed:
            loaded[load.request_id] = first
        failed = {load.request_id for load, _ in results.failed}
        self.policy.reported(failed, results.loaded, blocks=False)
        return self.saver.take_saved(), loaded

    def finished(self, request: Request) -> bool:
        return self.policy.finished(request, (request.block_ids,), request.num_computed_tokens)

    def aborted(self, request: Request) -> None:
        self.policy.finished(request, (request.block_ids,), 0)
        self.loader.cancel([request.request_id])

    def shutdown(self) -> None:
        self.policy.lookups.shutdown()
        self.loader.shutdown()
        self.saver.shutdown()

    def sections(self, block_ids: BlockIds, num_tokens: int) -> list[Section]:
        blocks = block_ids[0][: -(-num_tokens // BLOCK_SIZE)]
        return [Section(self.layers, self.view, BlockTable.packed([blocks]))]


def view_of(engine: Engine) -> CacheView:
    layers = tuple(
        CacheDesc.from_kv(describe(k, Layout.BLOCK_HND), describe(v, Layout.BLOCK_HND))
        for k, v in engine.decoder.caches
    )
    facts = CacheFacts(
        num_layers=LAYERS,
        total_kv_heads=HEADS,
        first_kv_head=0,
        window=0,
        rotary="none",
        rotary_dim=0,
        rope_applied=True,
    )
    return CacheView(layers=layers, facts=facts)
