"""Walk: a lookup of a prompt that goes from chunk to chunk, and can stop and go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvx_core.stores.finder import Finder
from kvx_core.stores.match import Match, StoredSpan
from kvx_core.stores.names import Ids
from kvx_core.stores.token_chain import TokenChain

_CLOSE = 16  # prefixes that end with the last tokens found, of which all are asked for states
_NEAR = 64  # chunks, in which states are asked for inside of chunks too
_SHORTER = 16  # chunks in which a lookup asks for shorter entries with all layers


@dataclass(slots=True)
class Walk:
    """The longest stored prefix of the first `num_tokens` tokens of a chain, as far as it is known.

    It goes over the chunks of tokens, and if the model has states from the furthest token back to
    the first prefix that has them.

    at_least: shorter matches need not be found
    """

    chain: TokenChain
    num_tokens: int
    at_least: int = 1
    has_states: bool = False
    is_over: bool = False
    _goes_on: bool = True  # over tokens
    _is_cut: bool = False  # a corrupt file ended it
    _at: int = 0
    _spans: list[StoredSpan] = field(default_factory=list)
    # Of each: prefixes that end in it have to be as long, for all that their reader needs.
    _floors: list[int] = field(default_factory=list)
    _left: int = 0  # of the spans, those in which a state may be
    _found: Match = field(default_factory=lambda: Match(0, ()))  # that the way back has found

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
        if self.has_states or self._found.num_tokens:
            return self._found
        count = len(self._spans)
        while count and self._spans[count - 1].stop < self._floors[count - 1]:
            count -= 1
        spans = tuple(self._spans[:count])
        return Match(spans[-1].stop if spans else 0, spans)

    def go_on(self, finder: Finder, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Walks on to the end, or until `is_enough` after a chunk.

        Raises what the finder raises: Unknown if it has only what memory knows. It can then go on
        with another one.
        """
        while not self.is_over:
            if self._goes_on:
                self._goes_on = self._take(finder)
                self._left = len(self._spans) if self.has_states else 0
            elif self._left:
                self._look_back(finder)
            if not (self._goes_on or self.has_states):
                self._look_for_shorter(finder)
            self.is_over = not (self._goes_on or self._left)
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
            floor = at + shared + found.lacking if found.lacking else 0
            self._floors.append(max(floor, *self._floors[-1:], 0))
            self._at += shared
        self._is_cut = shared < len(rest) and finder.num_corrupt > num_corrupt
        return shared == step and self._at < self.num_tokens

    def _look_back(self, finder: Finder) -> None:
        """Asks for the states of prefixes that end in the last of the spans that are left."""
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
        """Asks for shorter entries with all layers where the match ends before chunks that lack
        some.
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
