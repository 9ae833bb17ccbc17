"""Walk: a lookup of a prompt that goes from chunk to chunk, and can stop and go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvx_core.stores.finder import Finder
from kvx_core.stores.match import Match, StoredSpan
from kvx_core.stores.names import Ids
from kvx_core.stores.token_chain import TokenChain


@dataclass(slots=True)
class Walk:
    """The longest stored prefix of the first `num_tokens` tokens of a chain, as far as it is known.

    at_least: shorter matches need not be found
    """

    chain: TokenChain
    num_tokens: int
    at_least: int = 1
    is_over: bool = False
    _is_cut: bool = False  # a corrupt file ended it
    _at: int = 0
    _spans: list[StoredSpan] = field(default_factory=list)
    _lacking: list[int] = field(default_factory=list)  # of each: see Found

    @property
    def num_found(self) -> int:
        """Tokens that have been found so far."""
        return self._at

    @property
    def match(self) -> Match:
        """The longest prefix of what has been found so far that has all that its reader needs.

        Layers with a window are needed in the last chunks alone: where they lack in one that the
        window reaches, the prefix ends before it.
        """
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
        step = self.chain.chunk_tokens
        while not self.is_over:
            at = self._at
            node = self.chain.node(at // step)
            rest = self.chain.ids(at, min(at + step, self.num_tokens))
            if not len(rest):
                self.is_over = True
                return
            num_corrupt = finder.num_corrupt
            found = finder.longest(node, rest, 1 if at else self.at_least, self._key(at, rest))
            shared = found.shared
            if shared:
                self._spans.append(StoredSpan(at, at + shared, found.num_tokens, found.names))
                self._lacking.append(found.lacking)
                self._at += shared
            self.is_over = shared < step or self._at == self.num_tokens
            self._is_cut = shared < len(rest) and finder.num_corrupt > num_corrupt
            if is_enough():
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
