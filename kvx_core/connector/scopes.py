"""RequestScopes: what the keys of an engine's requests depend on besides their tokens.

It is asked again whenever something is planned: an engine may change a request, its adapters or its
weights while the request runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from kvx_core.connector.adapters import NO_ADAPTER, Adapter, LoadedAdapters
from kvx_core.connector.epochs import FIRST, Epoch, Epochs
from kvx_core.connector.plan import RequestId, Scope
from kvx_core.connector.requests import Request, Tracked

# Returns the name of weights that an adapter is added to: the names of both are given.
Adapted = Callable[[str, str], str]


@dataclass(slots=True, kw_only=True)
class RequestScopes:
    """Maps each request to its scope, or to None: it is not shared. Engines override `salt_of`, and
    `adapter_of` if their requests may have adapters.
    """

    epochs: Epochs = field(default_factory=Epochs)
    adapters: LoadedAdapters = field(default_factory=LoadedAdapters)
    adapted: Adapted | None = None  # None: requests with an adapter are not shared
    _now: Epoch | None = FIRST  # None: the weights change or have no name
    _unnamed_since: float = 0.0
    _unproven: set[RequestId] = field(default_factory=set)  # others may have computed its blocks

    def salt_of(self, request: Request) -> str | None:
        """Returns a request's current salt; None: its keys and values depend on more than tokens,
        a salt, an adapter and the weights.
        """
        return ""

    def ids_of(self, request: Request) -> Sequence[int]:
        """Returns the ids that keys are made of: of tokens, and of items in the place of those that
        stand for them. The same object as long as those that it had stay the same. Engines may
        override it; it is asked for a request with a salt only.
        """
        return request.all_token_ids

    def is_pending(self, request: Request) -> bool:
        """True if a request without a salt may soon have one. Engines may override it."""
        return False

    def adapter_of(self, request: Request) -> tuple[int, Hashable]:
        """Returns the number of a request's adapter, 0 if it has none, and what the engine calls
        the blocks that it computes: it gives them to later requests with the same.
        """
        return 0, None

    def scope_of(self, request: Request) -> Scope | None:
        """Returns what the keys of a request currently depend on besides its tokens; None: the
        request is neither loaded nor saved.
        """
        if self._now is None or request.request_id in self._unproven:
            return None
        salt, adapter = self.salt_of(request), self.loaded_adapter(request)
        if salt is None or adapter is None:
            return None
        weights = self._now.name
        if adapter.number:
            assert self.adapted is not None  # there is an adapter
            weights = self.adapted(weights, adapter.name)
        return Scope(salt, weights, adapter)

    def loaded_adapter(self, request: Request) -> Adapter | None:
        """Returns the adapter of a request, or NO_ADAPTER; None: it is not known."""
        number, _ = self.adapter_of(request)
        if not number:
            return NO_ADAPTER
        return None if self.adapted is None else self.adapters.get(number)

    def look_at_weights(self) -> None:
        """Notices changed weights. An engine calls this before the first `step` of a step; the
        methods of Policy that plan something else call it themselves.
        """
        before, self._now = self._now, self.epochs.current()
        if self._now is not before:
            if self._now is None:
                self._unnamed_since = time.monotonic()
            self.weights_changed()

    def weights_changed(self) -> None:
        """Called when the weights begin to change, and when they have a new name."""

    def look_at_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Finds out if older weights or another adapter may have computed the tokens that the
        engine has in its own blocks: the request is not shared then.
        """
        request_id = request.request_id
        if not num_computed_tokens or self._has_own_blocks(request):
            self._unproven.discard(request_id)
        else:
            self._unproven.add(request_id)

    def note_blocks(self, request: Request) -> None:
        """Notes that a request gets blocks, which its adapter is going to compute."""
        number, key = self.adapter_of(request)
        if number:
            self.adapters.computes(number, key, self.epochs.weights.num_resets)

    def may_get_scope(self, request: Request, seconds: float) -> bool:
        """True if a request without a scope may soon have one: its engine asks again.

        seconds: requests wait no longer for new weights or an adapter to get a name
        """
        is_pending = self.is_pending(request)  # asked first: it may end now
        if self.salt_of(request) is None:
            return is_pending
        if self.scope_of(request) is not None:
            return True  # since now
        if self._now is None:
            return time.monotonic() - self._unnamed_since <= seconds
        number, _ = self.adapter_of(request)
        if not number or self.adapted is None or self.adapters.get(number) is not None:
            return False
        return self.adapters.may_be_told(number, seconds)

    def _has_own_blocks(self, request: Request) -> bool:
        if not self.epochs.has_current_blocks():
            return False
        number, key = self.adapter_of(request)
        adapter = self.loaded_adapter(request)
        if not number or adapter is None:
            return True
        return self.adapters.has_computed(adapter, key, self.epochs.weights.num_resets)

    def _is_shared(self, tracked: Tracked) -> bool:
        """True if a request's salt, adapter and weights are the same as when it got its blocks."""
        request, scope = tracked.request, tracked.scope
        return (
            tracked.epoch is self._now
            and self.salt_of(request) == scope.salt
            and self.loaded_adapter(request) == scope.adapter
            and request.request_id not in self._unproven
        )
