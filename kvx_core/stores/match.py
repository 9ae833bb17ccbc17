"""Match: what of a prompt a prefix store has. Plain data that may go to another process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """Tokens of a prompt that one entry holds."""

    start: int
    stop: int
    num_entry_tokens: int  # of the entry, which may continue with other tokens than the prompt
    names: tuple[str, ...]  # of files that together hold all layers and heads that are needed


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a prompt that is stored. Plain data: it may go to another process."""

    num_tokens: int
    spans: tuple[StoredSpan, ...]  # one after the other, from token 0
    states: tuple[str, ...] = ()  # files that together hold the states of these tokens

    def span_of_states(self, chunk_tokens: int) -> StoredSpan:
        """The last tokens as the files of states have them."""
        first = max(self.num_tokens - 1, 0) // chunk_tokens * chunk_tokens
        return StoredSpan(first, self.num_tokens, self.num_tokens - first, self.states)

    @property
    def names(self) -> list[str]:
        """All files."""
        return [*(name for span in self.spans for name in span.names), *self.states]
