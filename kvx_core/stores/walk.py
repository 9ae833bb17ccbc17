"""Walk: a lookup of a prompt that goes from chunk to chunk, and can stop and go on later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvx_core.stores.finder import Finder
from kvx_core.stores.match import Match, StoredSpan
from kvx_core.stores.names import Ids
from kvx_core.stores.token_chain import TokenChain

_CLOSE = 16  # a lookup asks for the states of each of so many longest prefixes
_NEAR = 64  # last chunks in which it also asks for states inside of a chunk
_SHORTER = 16  # last chunks in which it asks for shorter entries with all layers


@dataclass(slots=True)
class Walk:
    """A lookup of the longest stored prefix of the first `num_tokens` tokens of a chain.

    It goes forward over the chunks. If the model has states, it then goes back from the last token
    that it has found, to the first prefix that has states.

    at_least: shorter matches need not be found
    """

    chain: TokenChain
    num_tokens: int
    at_least: int = 1
    has_states: bool = False
    is_over: bool = False
    _goes_on: bool = True  # the way forward is not over
    _is_cut: bool = False  # a corrupt file ended the way forward
    _at: int = 0
    _spans: list[StoredSpan] = field(default_factory=list)
    # For each span: the least length of a prefix that ends in it and has all its reader needs.
    _floors: list[int] = field(default_factory=list)
    _left: int = 0  # so many first spans may still have a state
    # The match, where states or a shorter entry decide it.
    _found: Match = field(default_factory=lambda: Match(0, ()))

    @property
    def num_found(self) -> int:
        """The number of tokens that have been found so far."""
        return self._at

    @property
    def match(self) -> Match:
        """The longest prefix found so far that has all that its reader needs.

        The reader needs layers with a window in the last chunks alone. If a chunk that the window
        reaches lacks such layers, the prefix ends before it, or with a shorter entry that lacks
        nothing.
        """
        if self.has_states or self._found.num_tokens:
            return self._found
        count = len(self._spans)
        while count and self._spans[count - 1].stop < self._floors[count - 1]:
            count -= 1
        spans = tuple(self._spans[:count])
        return Match(spans[-1].stop if spans else 0, spans)

    def resume(self, finder: Finder, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Walks on to the end, or until `is_enough` returns True after a chunk.

        Raises what the finder raises: NotCached if the finder asks memory alone. The walk can then
        go on with another finder.
        """
        if self._goes_on:
            finder.look_ahead(self.chain, self._at, self.num_tokens)
        while not self.is_over:
            if self._goes_on:
                self._goes_on = self._take(finder)
                self._left = len(self._spans) if self.has_states else 0
                if self._left and not self._goes_on:
                    finder.look_back(self.chain, self._at // self.chain.chunk_tokens)
            elif self._left:
                self._look_back(finder)
            if not (self._goes_on or self.has_states):
                self._look_for_shorter(finder)
            self.is_over = not (self._goes_on or self._left)
            if is_enough():
                return

    def _take(self, finder: Finder) -> bool:
        """Takes the next chunk. True if another chunk may follow it."""
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
            floor = at + shared + found.lacking if found.lacking else 0
            self._floors.append(max(floor, *self._floors[-1:], 0))
            self._at += shared
        self._is_cut = shared < len(rest) and finder.num_corrupt > num_corrupt
        return shared == step and self._at < self.num_tokens

    def _look_back(self, finder: Finder) -> None:
        """Asks for the states of prefixes that end in the last span that may still have one."""
        i = self._left - 1
        span, least = self._spans[i], max(self._floors[i], self.at_least)
        node, ids = self.chain.node(i), self.chain.ids(span.start, span.stop)
        is_near = len(self._spans) - i <= _NEAR
        since = self._at - _CLOSE - span.start + 1
        for count in finder.ends(node, ids, is_near=is_near, since=since):
            stop, mine = span.start + count, ids[:count]
            if stop < least:
                break
            names = finder.states(node, mine, self._key(span.start, mine))
            if names:
                spans = *self._spans[:i], replace(span, stop=stop)
                self._found, self._left = Match(stop, spans, names), 0
                return
        self._left = i

    def _look_for_shorter(self, finder: Finder) -> None:
        """Asks for shorter entries with all layers in the chunks behind the match: the entries
        that were found there lack some layers.
        """
        count = len(self.match.spans)
        for i in range(len(self._spans) - 1, max(count, len(self._spans) - _SHORTER) - 1, -1):
            span = self._spans[i]
            ids, least = self.chain.ids(span.start, span.stop), 1 if i else self.at_least
            found = finder.longest(self.chain.node(i), ids, least, is_whole=True)
            stop = span.start + found.shared
            if found.shared and stop >= (self._floors[i - 1] if i else 0):
                last = StoredSpan(span.start, stop, found.num_tokens, found.names)
                self._found = Match(stop, (*self._spans[:i], last))
                return

    def check_rest(self, finder: Finder, is_enough: Callable[[], bool] = lambda: False) -> None:
        """If a corrupt file ended the walk, opens the files that are stored behind it.

        So all corrupt files of the prompt are deleted at once, not one at each lookup. It ends at
        the first chunk of which nothing is stored, or when `is_enough` returns True. The match
        stays as it is.
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
        """Returns the key of a full chunk, the next node; None if the chunk is not full."""
        step = self.chain.chunk_tokens
        return self.chain.node(at // step + 1) if len(ids) == step else None
