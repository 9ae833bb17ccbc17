"""Requests with the same ids, and other adapters, images, salts and weights: none gets keys and
values of another, though they share a store, and adapters change their names and numbers.

A cell says what it was computed for: the weights, the content of the adapter, and tokens and images
up to its own. Two engines without numbers run random requests, and the store keeps the cells.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvx_core import PrefixStore
from kvx_core.connector.adapters import LoadedAdapters
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.epochs import Epochs
from kvx_core.connector.items import Item, RequestItems
from kvx_core.connector.lookups import Lookups
from kvx_core.connector.plan import Load, Save
from kvx_core.connector.policy import Policy
from kvx_core.connector.scoped import Scoped
from kvx_core.connector.weights import Report, Unknown
from kvx_core.model.items import item_digest
from kvx_core.model.record import ModelRecord
from kvx_core.snapshot import Precision
from tests.connector import toy_engine
from tests.connector.random_cache import CHUNK, Stored
from tests.stores_memory import InMemory

Cell = tuple[Any, ...]
IMAGE_TOKENS = 5
PLACEHOLDER = 8


@dataclass(eq=False)
class Request:
    request_id: str
    all_token_ids: list[int]
    answer: list[int]
    salt: str
    adapter: tuple[int, str] | None  # number and name
    images: list[tuple[int, int]]  # where, and which
    num_prompt_tokens: int
    cells: list[Cell] = field(default_factory=list)
    load: Load | None = None
    has_failed: bool = False

    def seen(self, stop: int) -> tuple[Any, ...]:
        """Tokens and images of the first `stop` positions."""
        found: list[Any] = self.all_token_ids[:stop]
        for start, image in self.images:
            for i in range(start, min(start + IMAGE_TOKENS, stop)):
                found[i] = f"image {image}, {i - start}"
        return tuple(found)


class MixedPolicy(Policy):
    """A Policy of these requests, as an engine's adapter makes one."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.items = RequestItems(seconds=60)

    def salt_of(self, request: Any) -> str | None:
        return None if self.ids_of(request) is None else request.salt

    def ids_of(self, request: Any) -> Any:
        if not request.images:
            return request.all_token_ids
        return self.items.of(
            request,
            len(request.images),
            lambda: [
                Item(
                    start, IMAGE_TOKENS, lambda image=image: item_digest("image", {"which": image})
                )
                for start, image in request.images
            ],
        )

    def is_pending(self, request: Any) -> bool:
        return bool(request.images) and self.items.are_pending(request.request_id)

    def adapter_of(self, request: Any) -> tuple[int, Hashable]:
        return (0, None) if request.adapter is None else request.adapter


class Engine:
    """A Policy, and what it plans for."""

    def __init__(self, name: str, stores: Scoped, stored: Stored, draw: random.Random) -> None:
        self.name, self.stores, self.stored, self.random = name, stores, stored, draw
        boundary = Boundary(pytest.fail)
        self.policy = MixedPolicy(
            *(stores, boundary, Lookups(boundary, seconds=60), CHUNK),
            asynchronous=True,
            min_tokens=1,
            epochs=Epochs(boundary=boundary),
            adapters=LoadedAdapters(),
            adapted=stores.adapted,
        )
        self.weights = 0
        self.loaded: dict[int, int] = {}  # content by number
        self.kept: dict[Any, Cell] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.count = 0
        self.seen = Counter[str]()

    def right(self, request: Request, position: int) -> Cell:
        adapter = self.loaded.get(request.adapter[0]) if request.adapter else None
        return self.weights, adapter, request.seen(position + 1)

    def add(self) -> None:
        self.count += 1
        draw = self.random
        ids = [draw.randrange(2), 7, 7] + [7] * draw.randrange(4, 20)
        images = []
        if draw.random() < 0.4:
            at = draw.choice((2, 6))
            ids[at:at] = [PLACEHOLDER] * IMAGE_TOKENS
            images = [(at, draw.randrange(3))] if draw.random() < 0.7 else []
        adapter = None
        if draw.random() < 0.6:
            number = draw.randrange(1, 4)
            adapter = number, draw.choice(("first", "second"))
        salt = draw.choice(("", "", "", "tenant"))
        name = f"{self.name}{self.count}"
        answer = [draw.randrange(3) for _ in range(draw.randrange(1, 6))]
        self.waiting.append(Request(name, ids, answer, salt, adapter, images, len(ids)))

    def happens(self) -> None:
        """What users do between steps."""
        draw, weights = self.random, self.policy.epochs.weights
        if draw.random() < 0.03:  # new content under a number, in place
            self.load_adapter(draw.randrange(1, 4), draw.randrange(3))
        if draw.random() < 0.001:
            with weights.change():
                self.weights = draw.randrange(100, 1 << 30)
        if draw.random() < 0.5 and not self.running:
            self.kept.clear()
            weights.num_resets += 1
        if self.running and draw.random() < 0.1:  # preempted
            request = self.running.pop(draw.randrange(len(self.running)))
            request.cells.clear()
            self.waiting.append(request)
        if self.running and draw.random() < 0.05:
            request = self.running.pop(draw.randrange(len(self.running)))
            self.policy.finished(request, ([1],), 0)
            self.policy.items.forget(request.request_id)

    def load_adapter(self, number: int, content: int) -> None:
        self.loaded[number] = content
        adapters = self.policy.epochs.weights.adapters
        adapters.loaded(number, ("files", content), lambda: f"adapter {content}")

    def step(self) -> None:
        self.happens()
        for request in tuple(self.waiting):
            self.admit(request)
        policy = self.policy
        policy.look_at_weights()
        if self.running:
            policy.epochs.step_computes()
        steps = []
        for request in self.running:
            start = len(request.cells)
            stop = min(start + self.random.randrange(1, 12), len(request.all_token_ids))
            policy.step(request.request_id, start, stop, (), are_new=False)
            steps.append((request, stop))
        plan = policy.take_plan(is_idle=not steps)
        for request, _ in steps:  # vLLM loads in this step what it has not loaded yet
            if request.adapter and request.adapter[0] not in self.loaded:
                self.load_adapter(request.adapter[0], self.random.randrange(3))
        for request, stop in steps:
            for position in range(len(request.cells), stop):
                request.cells.append(self.right(request, position))
        weights = policy.epochs.weights
        is_current = (
            plan.stamp is not None
            and plan.stamp.ranks == weights.generation
            and plan.stamp.scheduler == plan.generation
        )
        for save in plan.saves:
            if is_current and weights.adapters.has(save.scope.adapter):
                self.save(save, next(r for r, _ in steps if r.request_id == save.request_id))
        for request, stop in steps:
            self.keep(request)
            if stop == len(request.all_token_ids) and request.answer:
                request.all_token_ids.append(request.answer.pop(0))
            elif stop == len(request.all_token_ids):
                self.running.remove(request)
                self.policy.ended(request.request_id)
                self.policy.items.forget(request.request_id)
        told = weights.adapters.report(plan.asks)
        report = Report(plan.generation, weights.generation, False, Unknown(), told)
        policy.epochs.take({0: report})
        policy.adapters.take({0: told})

    def admit(self, request: Request) -> None:
        start = 0
        while start < len(request.all_token_ids) - 1 and self.key(request, start + 1) in self.kept:
            start += 1
        count = self.policy.lookup(request, start)
        if count is None:
            return
        self.waiting.remove(request)
        request.cells = [self.kept[self.key(request, i + 1)] for i in range(start)]
        before = self.policy._next.loads[:]
        self.policy.allocated(request, ([1],), count)
        for load in self.policy._next.loads[len(before) :]:
            self.load(load, request)
        self.policy._next.loads = before
        self.policy.reported((), [request.request_id], blocks=False)
        self.running.append(request)

    def load(self, load: Load, request: Request) -> None:
        """Cells that the store has under a name are those that the request would compute now."""
        adapters = self.policy.epochs.weights.adapters
        if not load.match.num_tokens or not adapters.has(load.scope.adapter):
            self.policy.reported([request.request_id], (), blocks=False)
            return
        for span in load.match.spans:
            (name,) = span.names
            cells = self.stored.entries[name]
            for position in range(max(span.start, load.start), min(span.stop, load.stop)):
                cell = cells[position - span.start]
                assert cell == self.right(request, position)
                request.cells.append(cell)
        self.seen["loads"] += 1
        self.seen["with an adapter"] += request.adapter is not None
        self.seen["with an image"] += any(at < load.stop for at, _ in request.images)

    def save(self, save: Save, request: Request) -> None:
        store = self.stores[save.scope]
        ids: Sequence[int] = self.policy.ids_of(request)[: save.stop]
        for start, stop in store.spans(save.stop, save.start):
            chunk = store.capture(ids[:stop], start, stop, self.stored.sections)
            assert chunk is not None
            name = store.name_of(chunk)
            cells = tuple(request.cells[start:stop])
            assert self.stored.entries.setdefault(name, cells) == cells
            for position, cell in enumerate(cells, start):
                assert cell[2] == request.seen(position + 1)
            store.commit(chunk)
        self.seen["saves"] += 1

    def keep(self, request: Request) -> None:
        """Its own blocks, by the name of the adapter: the content may be another one later."""
        for position, cell in enumerate(request.cells):
            self.kept.setdefault(self.key(request, position + 1), cell)

    def key(self, request: Request, stop: int) -> Any:
        name = request.adapter[1] if request.adapter else None
        return name, request.salt, request.seen(stop)


def run(seed: int, num_requests: int) -> Counter[str]:
    blobs = InMemory()
    record = ModelRecord(files="f" * 64, architecture="toy", rope={})
    store = PrefixStore(
        blobs,
        fingerprint=record,
        num_layers=toy_engine.LAYERS,
        total_kv_heads=toy_engine.HEADS,
        precision=Precision.of("float32"),
        chunk_tokens=CHUNK,
    )
    stores, draw = Scoped(store, record), random.Random(seed)
    stored: Any = Stored(store, blobs)
    engines = [Engine(name, stores, stored, draw) for name in ("a", "b")]
    while any(each.count < num_requests // 2 or each.waiting or each.running for each in engines):
        for engine in engines:
            if engine.count < num_requests // 2 and len(engine.waiting) + len(engine.running) < 3:
                engine.add()
            engine.step()
    for engine in engines:
        engine.policy.lookups.shutdown()
    return engines[0].seen + engines[1].seen


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_none_gets_what_another_has_computed(seed: int) -> None:
    seen = run(seed, 300)
    assert min(seen[what] for what in ("saves", "loads", "with an adapter", "with an image")) > 0


@pytest.mark.slow
def test_many_requests() -> None:
    """10,000 have passed too, in a minute."""
    seen = run(3, 3000)
    assert min(seen[what] for what in ("saves", "loads", "with an adapter", "with an image")) > 100
