"""Walk: a lookup of a prompt that goes from chunk to chunk, and can stop and go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvx_core.stores.finder import Finder
from kvx_core.stores.match import Match, StoredSpan
from kvx_core.stores.names import Ids
from kvx_core.stores.token_chain import TokenChain

_SHORTER = 16  # chunks in which a lookup asks for shorter entries with all layers


@dataclass(slots=True)
class Walk:
    """The longest stored prefix of the first `num_tokens` tokens of a chain, as far as it is known.

    at_least: shorter matches need not be found
    """

    chain: TokenChain
    num_tokens: int
    at_least: int = 1
    is_over: bool = False
    _goes_on: bool = True
    _is_cut: bool = False  # a corrupt file ended it
    _at: int = 0
    _spans: list[StoredSpan] = field(default_factory=list)
    _lacking: list[int] = field(default_factory=list)  # of each: see Found
    _shorter: Match | None = None  # that ends in one of the spans which lack something

    @property
    def num_found(self) -> int:
        """Tokens that have been found so far."""
        return self._at

    @property
    def match(self) -> Match:
        """The longest prefix of what has been found so far that has all that its reader needs.

        Layers with a window are needed in the last chunks alone: where they lack in one that the
        window reaches, the prefix ends before it, or with a shorter entry that lacks nothing.
        """
        if self._shorter is not None:
            return self._shorter
        stop, count = self._at, len(self._spans)
        if any(self._lacking):
            for i in range(len(self._spans) - 1, -1, -1):
                if stop - self._lacking[i] < self._spans[i].stop:
                    stop, count = self._spans[i].start, i
        return Match(stop, tuple(self._spans[:count]))

    def go_on(self, finder: Finder, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Walks on to the end, or until `is_enough` after a chunk.

        Raises what the finder raises: Unknown if it has only what memory knows. It can then go on
        with another one.
        """
        while not self.is_over:
            if self._goes_on:
                self._goes_on = self._take(finder)
            if not self._goes_on:
                self._look_for_shorter(finder)
                self.is_over = True
            if is_enough():
                return

    def _take(self, finder: Finder) -> bool:
        """Takes the next chunk; whether there may be one behind it."""
        step, at = self.chain.chunk_tokens, self._at
        node = self.chain.node(at // step)
        rest = self.chain.ids(at, min(at + step, self.num_tokens))
        if not len(rest):
            return False
        num_corrupt = finder.num_corrupt
        found = finder.longest(node, rest, 1 if at else self.at_least, self._key(at, rest))
        shared = found.shared
        if shared:
            self._spans.append(StoredSpan(at, at + shared, found.num_tokens, found.names))
            self._lacking.append(found.lacking)
            self._at += shared
        self._is_cut = shared < len(rest) and finder.num_corrupt > num_corrupt
        return shared == step and self._at < self.num_tokens

    def _look_for_shorter(self, finder: Finder) -> None:
        """Asks for shorter entries where the match ends before chunks that lack layers."""
        step, count = self.chain.chunk_tokens, len(self.match.spans)
        for i in list(range(count, len(self._spans)))[: -_SHORTER - 1 : -1]:
            span = self._spans[i]
            if not self._lacking[i]:
                continue
            ids, least = self.chain.ids(span.start, span.stop), 1 if i else self.at_least
            found = finder.longest(self.chain.node(span.start // step), ids, least, is_whole=True)
            stop = span.start + found.shared
            before = zip(self._spans[:i], self._lacking[:i], strict=True)
            if found.shared and all(not n or stop - n >= one.stop for one, n in before):
                last = StoredSpan(span.start, stop, found.num_tokens, found.names)
                self._shorter = Match(stop, (*self._spans[:i], last))
                return

    def check_rest(self, finder: Finder, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Opens what is stored behind a corrupt file that ended the walk, if one did.

        The corrupt files among it are deleted at once, and not one at each lookup of the prompt. It
        ends at the first chunk of which nothing is stored. The match stays as it is.
        """
        step = self.chain.chunk_tokens
        at = self._at - self._at % step + step
        while self._is_cut and at < self.num_tokens and not is_enough():
            num_corrupt = finder.num_corrupt
            ids = self.chain.ids(at, min(at + step, self.num_tokens))
            found = finder.longest(self.chain.node(at // step), ids)
            self._is_cut = found.shared > 0 or finder.num_corrupt > num_corrupt
            at += step

    def _key(self, at: int, ids: Ids) -> str | None:
        """The key of a full chunk, which is the next node."""
        step = self.chain.chunk_tokens
        return self.chain.node(at // step + 1) if len(ids) == step else None
