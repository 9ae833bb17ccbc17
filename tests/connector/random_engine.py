"""An engine without numbers, whose scheduler does at random whatever engines may do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from kvx_core.connector.plan import Load, Plan, Save, Scope
from kvx_core.connector.policy import Policy
from kvx_core.connector.weights import Report, Unknown
from tests.connector.random_cache import BLOCK, CHUNK, CONVERSATIONS, Cache, Request, Stored


@dataclass(eq=False)
class RandomEngine:
    """Steps of requests that begin alike. `check` of each plan is what the pages promise.

    others: another connector fills blocks, too
    ahead:  a step is planned before the tokens of the one before it are known
    drafts: a step computes tokens that may be rejected
    """

    policy: Policy
    stored: Stored
    random: random.Random
    others: bool = False
    ahead: bool = False
    drafts: bool = False
    cache: Cache = field(default_factory=Cache)
    names: dict[str, int] = field(default_factory=lambda: {"": 0})  # of weights
    is_stale: bool = False  # blocks that the engine may use again may be of older weights
    is_empty: bool = True  # there are none
    num_requests: int = 0
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    loading: dict[str, tuple[Request, Load | None]] = field(default_factory=dict)
    ended: dict[str, Request] = field(default_factory=dict)  # blocks stay until they are saved
    wrong: set[int] = field(default_factory=set)  # blocks that others have filled wrongly
    seen: Counter[str] = field(default_factory=Counter)  # what has happened

    # ---- between steps ----

    def step(self) -> None:
        live = [*self.waiting, *self.running, *(r for r, _ in self.loading.values())]
        if self.num_requests < 14 and self._happens(0.5):
            self._add()
        if self.running and self._happens(0.1):
            self._preempt(self.random.choice(self.running))
        if live and self._happens(0.05):
            self._abort(self.random.choice(live))
        if self._happens(0.04):
            self._change_weights()
        if self._happens(0.05):
            self._reset_blocks()
        if self._happens(0.03):
            self.policy.reset()
            for request in self.waiting:
                request.truths.clear()
        if live and self._happens(0.05):
            self._change(self.random.choice(live))
        if self.running and self._happens(0.15):
            self._hand_over(self.random.choice(self.running))
        for request in self.random.sample(self.waiting, len(self.waiting)):
            if self._happens(0.8):
                self._admit(request)
        self._compute(self._schedule())

    def finish_all(self) -> None:
        """Nothing happens any more."""
        if self.policy.epochs.weights.is_changing:
            self._change_weights()
        for _ in range(300):
            for request in tuple(self.waiting):
                self._admit(request)
            self._compute(self._schedule())
        assert [*self.waiting, *self.running, *self.loading, *self.ended] == []
        assert self.policy._tracked == self.policy._chains == self.policy._loading == {}

    def _happens(self, chance: float) -> bool:
        return self.random.random() < chance

    def _add(self) -> None:
        self.num_requests += 1
        stem = self.random.choice(CONVERSATIONS)
        cut = self.random.randrange(1, 50)
        own = [self.random.randrange(9) for _ in range(self.random.choice((0, 0, 3)))]
        request = Request(f"r{self.num_requests}", stem[:cut] + own, [])
        request.answer = stem[len(request.all_token_ids) :][: self.random.randrange(1, 20)]
        request.salt = self.random.choice(("", "", "", "a"))
        self.waiting.append(request)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._learn(request)
        self._free(request)
        request.num_computed_tokens = 0
        self.waiting.append(request)

    def _abort(self, request: Request) -> None:
        assert not self.policy.finished(request, (list(request.block_ids),), 0)
        for held in (self.waiting, self.running):
            if request in held:
                held.remove(request)
        self.loading.pop(request.request_id, None)
        self._free(request)

    def _change_weights(self) -> None:
        """All at once, or in two calls with steps between them."""
        weights = self.policy.epochs.weights
        is_held = not weights.is_changing and self._happens(0.4)
        with weights.change():
            weights.hold(is_held)
            self.cache.weights += 1
        self.is_stale |= not self.is_empty
        for request in self._with_blocks():
            request.is_owed, request.must_fail = False, True

    def _reset_blocks(self) -> None:
        """vLLM does so if no request has blocks, or takes those of all that run."""
        if self.loading or self.ended:
            return
        for request in tuple(self.running):
            self._preempt(request)
        self.cache.kept.clear()
        self.policy.epochs.weights.num_resets += 1
        self.is_stale, self.is_empty = False, True

    def _change(self, request: Request) -> None:
        """It gets an image, or another salt."""
        self._learn(request)
        if request.image is None and self._happens(0.3):
            request.salt, request.image = None, request.request_id
            request.image_at = len(request.all_token_ids)
        elif request.image is None:
            request.salt = "b"
        request.is_owed = False

    def _hand_over(self, request: Request) -> None:
        self._learn(request)
        save = self.policy.handed_over(request.request_id, request.num_computed_tokens)
        is_held = len(request.all_token_ids) <= request.hold
        if save is None:
            assert is_held or not (request.is_owed and self.policy.produces) or self.policy.window
            return
        assert not is_held
        stop = min(request.num_computed_tokens, len(request.all_token_ids) - 1)
        assert save.stop == stop
        if len(save.tokens):
            self._save(save, request)
        self.seen["handed over"] += 1
        if request.is_owed:
            assert self.stored.longest(save.scope, request.ids[:stop]) == stop

    # ---- blocks ----

    def _admit(self, request: Request) -> None:
        """Looks a request up, and gives it blocks."""
        ids, held = request.all_token_ids, self.cache.found(request)
        start = len(held) * BLOCK
        count = self._lookup(request, start)
        if count is None or self._happens(0.1):  # the engine has no room
            return
        scope = self._scope(request)
        if self._happens(0.03):
            self._change(request)
        if self._happens(0.03):
            self._change_weights()
        self.waiting.remove(request)
        stop = start + count
        request.block_ids = held + [self.cache.block() for _ in range(start, len(ids) + 1, BLOCK)]
        request.num_computed_tokens, request.told = stop, None
        request.must_fail, request.was_given_up = self._scope(request) != scope, False
        request.got = self._scope(request)
        self._allocated(request, start, count)
        if count and self.policy.asynchronous:
            self.loading[request.request_id] = request, None
            return
        if self.others and not count and self._happens(0.3):
            stop = self.random.randrange(start, len(ids))
            is_wrong = self._happens(0.4) and not self.policy.window
            for position in range(start, stop):
                cell = None if is_wrong else self.cache.right(request, position)
                self.cache.put(request, position, cell)
            if is_wrong:
                self.wrong |= set(request.block_ids[start // BLOCK : -(-stop // BLOCK)])
            request.num_computed_tokens = stop
        self._keep(request)
        self.running.append(request)

    def _lookup(self, request: Request, start: int) -> int | None:
        """What the policy says, which is what the store has."""
        scope, ids = self._scope(request), request.all_token_ids
        if request.asked != (scope, len(ids)):
            request.asked, request.truths = (scope, len(ids)), set()
        may_load = self._happens(0.95)
        if scope is not None and self.policy.consumes and may_load and request.may_load:
            request.truths.add(self.stored.longest(scope, ids))
        while True:
            found = self.policy.lookup(request, start, may_load=may_load)
            if found is not None or scope is None:
                break
            self.policy.lookups.wait(0.01)
        if not (self.policy.consumes and may_load) or request.image or (start and self.is_stale):
            assert not found
        elif scope is None:
            assert found is None or not request.may_load
        else:
            counts = {min(truth, len(ids) - 1) - start for truth in request.truths}
            expected = {count if count >= self.policy.min_tokens else 0 for count in counts}
            assert found in (expected if request.may_load else {0})
        return found

    def _allocated(self, request: Request, start: int, count: int) -> None:
        self.policy.allocated(request, (list(request.block_ids),), count)
        scope, ids = self._scope(request), request.all_token_ids
        if start and (self.is_stale or request.was_given_up):  # its blocks may be of before
            scope = None
        if scope is None or (count and request.must_fail):  # nothing of it is saved
            request.scope, request.stored, request.is_owed = None, 0, False
            request.was_given_up = True
        elif request.scope is None:
            request.scope = request.got = scope
            request.is_owed, request.stored = True, 0
        if max(request.truths, default=0) > self.stored.longest(scope or Scope(), ids):
            request.is_owed = False  # a file has gone since it was looked up
        request.is_old |= bool(start and self.is_stale)
        request.is_owed &= request.scope == scope and not request.is_old
        request.hold = 0
        if self.others or (self.policy.consumes and not self.policy.asynchronous):
            request.hold = len(ids)
        request.load = start, start + count
        if count:
            request.has_loaded = True
            request.stored = 0 if request.must_fail else max(request.stored, start + count)
        if scope is not None and request.truths and request.asked == (scope, len(ids)):
            # What a lookup has found is not saved. It may have been the first or the last one.
            least, most = min(request.truths), max(request.truths)
            if least >= self.policy.min_tokens:
                request.stored = max(request.stored, least)
            request.found = max(request.stored, most)
        request.truths.clear()

    def _keep(self, request: Request) -> None:
        if not self.policy.window:  # which leaves its blocks
            self.cache.keep(request, request.num_computed_tokens)

    def _free(self, request: Request) -> None:
        own, request.block_ids = set(request.block_ids), []
        self.cache.free(own.difference(*(each.block_ids for each in self._with_blocks())))

    def _with_blocks(self) -> list[Request]:
        return [*self.running, *self.ended.values(), *(each for each, _ in self.loading.values())]

    def _scope(self, request: Request) -> Scope | None:
        epoch = self.policy.epochs.current()
        if epoch is None or request.salt is None:
            return None
        if self.names.setdefault(epoch.name, self.cache.weights) != self.cache.weights:
            raise AssertionError(f"weights {self.cache.weights} are called {epoch.name!r}")
        return Scope(request.salt, epoch.name)

    # ---- a step ----

    def _schedule(self) -> tuple[Plan, list[tuple[Request, int, int]]]:
        """The plan of a step, and what it computes: of which request, from where to where."""
        policy, steps = self.policy, list[tuple[Request, int, int]]()
        for request in self.running:
            if request.told is None or self._happens(0.9):
                start, known = request.num_computed_tokens, len(request.ids)
                stop = min(start + self.random.randrange(1, 24), known)
                if self.drafts and stop == known:
                    stop += self.random.randrange(4)
                steps.append((request, start, stop))
        policy.look_at_weights()
        if steps:
            policy.epochs.step_computes()
            self.is_stale |= policy.epochs.current() is None
            self.is_empty = False
        for request, start, stop in steps:
            while len(request.block_ids) * BLOCK < stop:
                request.block_ids.append(self.cache.block())
            if policy.window:
                for i in range((start - policy.window + 1) // BLOCK):
                    self.cache.free([request.block_ids[i]])
                    request.block_ids[i] = 0
            are_new = request.told is None
            more = request.block_ids[request.told or 0 :]
            request.told = len(request.block_ids)
            policy.step(request.request_id, start, stop, (more,) if more else (), are_new=are_new)
        return policy.take_plan(is_idle=not steps), steps

    def _compute(self, planned: tuple[Plan, list[tuple[Request, int, int]]]) -> None:
        """The worker's step, and what the scheduler learns from it."""
        plan, steps = planned
        known = {request: len(request.all_token_ids) for request in self.running}
        for request in tuple(known):
            self._learn(request)
        failed = self._load_now(plan)
        is_failed = bool(failed or self.wrong)
        for request, start, stop in steps:
            self._run(request, start, stop)
        self._save_all(plan)
        for request, start, stop in steps:
            self._check_saved(request, start, stop, known[request])
        for request, start, stop in steps:
            bad = [i for i, block in enumerate(request.block_ids) if block in failed | self.wrong]
            if bad:
                request.num_computed_tokens = min(start, bad[0] * BLOCK)
            else:
                self._accept(request, stop)
        if is_failed:
            self.policy.reported((), (), blocks=True)
            self._distrust()
        self.wrong.clear()
        self._load_beside()
        weights = self.policy.epochs.weights
        report = Report(plan.generation, weights.generation, weights.is_changing, Unknown())
        self.policy.epochs.take({0: report})
        self.cache.drop_wrong()
        for request in [request for request in self.running if request.is_over]:
            self._finish(request)

    def _run(self, request: Request, start: int, stop: int) -> None:
        """Computes tokens; what a draft has left is wrong, if it was not accepted."""
        for position in range(start, stop):
            is_right = position < len(request.ids) and self._is_right(request, position - 1)
            cell = self.cache.right(request, position) if is_right else None
            self.cache.put(request, position, cell)

    def _is_right(self, request: Request, position: int) -> bool:
        right = self.cache.right(request, position) if position >= 0 else None
        return right is None or self.cache.get(request, position) == right

    def _accept(self, request: Request, stop: int) -> None:
        """Takes the tokens of a step: one more than it had, and the drafts that were right."""
        request.num_computed_tokens = min(stop, count := len(request.ids))
        self._keep(request)
        if stop < count:
            return
        right = self.random.randrange(stop - count + 1)
        request.late += request.answer[count - request.num_prompt_tokens :][: right + 1]
        for position in range(count, len(request.ids) - 1):
            if self._is_right(request, count - 1):
                self.cache.put(request, position, self.cache.right(request, position))
        request.num_computed_tokens = len(request.ids) - 1
        if not self.ahead:
            self._learn(request)

    def _learn(self, request: Request) -> None:
        request.all_token_ids += request.late
        request.late = []

    def _finish(self, request: Request) -> None:
        self._learn(request)
        self.running.remove(request)
        if self.policy.finished(request, (list(request.block_ids),), request.num_computed_tokens):
            self.ended[request.request_id] = request
            return
        self._free(request)
        self._check_end(request, self.policy.min_tokens - 1)

    # ---- loads ----

    def _load_now(self, plan: Plan) -> set[int]:
        """Loads that a step waits for; the blocks of those that fail."""
        failed = set[int]()
        for load in plan.loads:
            beside = self.loading.get(str(load.request_id))
            if beside is not None:
                self.loading[str(load.request_id)] = beside[0], load
            if not load.wait:
                continue
            (request,) = (each for each in self.running if each.request_id == load.request_id)
            first = self._read(request, load)
            if first is not None:
                failed |= set(request.block_ids[first // BLOCK : -(-load.stop // BLOCK)])
        return failed

    def _read(self, request: Request, load: Load) -> int | None:
        """The first token that cannot be loaded."""
        assert (load.start, load.stop) == request.load
        num_blocks = -(-load.stop // BLOCK)
        assert load.block_ids[0][:num_blocks] == request.block_ids[:num_blocks]
        if request.must_fail:
            return load.start
        assert load.match.num_tokens >= load.stop
        assert load.scope == request.got
        for span in load.match.spans:
            span_start, span_stop = max(span.start, load.start), min(span.stop, load.stop)
            for name in span.names if span_start < span_stop else ():
                if name not in self.stored.entries or self._happens(0.08):
                    self._lose(name, request)
                    return span_start
                scope, held, first = self.stored.entries[name]
                assert (scope, first) == (load.scope, span.start)
                for position in range(span_start, span_stop):
                    cell = self.names[scope.weights], None, held[: position + 1]
                    assert cell == self.cache.right(request, position)
                    self.cache.put(request, position, cell)
        self.seen["loads"] += 1
        return None

    def _lose(self, name: str, reader: Request) -> None:
        """A file is corrupt: others may have relied on it."""
        self.seen["failed loads"] += 1
        self.stored.lose(name)
        for request in (*self.waiting, *self._with_blocks()):
            if request is not reader:
                request.is_owed = False

    def _load_beside(self) -> None:
        """Loads that run beside steps: some of them end."""
        for request_id, (request, load) in tuple(self.loading.items()):
            if load is None or not self._happens(0.5):
                continue
            first = self._read(request, load)
            request.num_computed_tokens = load.stop
            of_blocks = self._happens(0.5)  # else vLLM has been told of the request alone
            failed = [] if first is None or of_blocks else [request_id]
            if first is not None:
                request.num_computed_tokens = first // BLOCK * BLOCK if of_blocks else load.start
                request.stored, request.may_load = 0, False
                if of_blocks:
                    self._distrust()
            self.policy.reported(failed, [request_id], blocks=of_blocks and first is not None)
            del self.loading[request_id]
            if not request.num_computed_tokens:
                assert self._lookup(request, 0) == 0
            self._allocated(request, load.start, 0)
            request.told = None
            self._keep(request)
            self.running.append(request)

    def _distrust(self) -> None:
        """Blocks of any request may be wrong, and any load may have failed."""
        for request in (*self.waiting, *self._with_blocks()):
            request.stored = 0
            if request.request_id in self.loading or not self.policy.asynchronous:
                request.may_load &= not request.has_loaded

    # ---- saves ----

    def _save_all(self, plan: Plan) -> None:
        for save in plan.saves:
            own = (*self.running, *self.ended.values())
            (request,) = (each for each in own if each.request_id == save.request_id)
            if not self.policy.window:
                assert save.start <= max(request.stored, request.found)  # no gap
                assert save.stop > request.stored  # nothing twice
            request.stored = save.stop
            self._save(save, request)
            if save.final:
                del self.ended[request.request_id]
                self._free(request)
                self._check_end(request, 0)

    def _save(self, save: Save, request: Request) -> None:
        """Checks that cells are what a save calls them."""
        ids, store = request.all_token_ids, self.policy.stores[save.scope]
        assert save.scope == request.got
        assert request in self.ended.values() or save.scope == self._scope(request)
        assert save.tokens.tolist() == ids[save.start : save.stop]
        assert save.node == store.nodes(ids)[save.start // CHUNK]
        (blocks,) = save.block_ids
        for start, stop in store.spans(save.stop, save.start):
            if 0 in blocks[start // BLOCK : -(-stop // BLOCK)]:
                continue  # a window has left it, as the worker sees
            for position in range(start, stop):
                cell = self.cache.cells.get((blocks[position // BLOCK], position % BLOCK))
                assert cell == (self.names[save.scope.weights], None, tuple(ids[: position + 1]))
            if not self.stored.has(save.scope, ids[:stop], start):
                self.stored.save(store, save.scope, ids[:stop], start)
        self.seen["saves"] += 1

    def _check_saved(self, request: Request, start: int, stop: int, known: int) -> None:
        """Full chunks are stored as they are computed, and a prompt when its end is."""
        policy = self.policy
        if not (policy.produces and request.is_owed) or policy.spread or known <= request.hold:
            return
        assert request.scope is not None
        stop, prompt = min(stop, known), request.num_prompt_tokens
        full = stop - stop % CHUNK
        if stop >= prompt:
            full = max(full, prompt) if policy.save_generated else prompt
        left = start - policy.window + 1 if policy.window else 0
        for first, last in policy.stores[request.scope].spans(full):
            if first >= left:
                assert self.stored.has(request.scope, request.ids[:last], first)

    def _check_end(self, request: Request, missing: int) -> None:
        """All of a request is stored at its end, but for a few tokens that are not worth it."""
        prompt = request.num_prompt_tokens
        if not (self.policy.produces and request.is_owed) or self.policy.window:
            return
        assert request.scope is not None
        stop = len(request.ids) - 1 if self.policy.save_generated else prompt
        found = self.stored.longest(request.scope, request.ids[:stop])
        assert found >= max(min(stop, prompt), stop - missing)
        self.seen["stored to the end"] += 1
