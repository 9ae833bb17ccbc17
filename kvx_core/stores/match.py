"""Match: the part of a prompt that a prefix store has.

It is plain data, which may be sent to another process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """Tokens of a prompt that one entry holds."""

    start: int
    stop: int
    num_entry_tokens: int  # tokens of the entry, which may go on with other tokens than the prompt
    names: tuple[str, ...]  # files that together hold all layers and heads that are needed


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a prompt that is stored. It may be sent to another process."""

    num_tokens: int
    spans: tuple[StoredSpan, ...]  # one after the other, from token 0
    states: tuple[str, ...] = ()  # files that together hold the states of these tokens

    def span_of_states(self, chunk_tokens: int) -> StoredSpan:
        """Returns the span of the last chunk, with the files of states as its names."""
        first = max(self.num_tokens - 1, 0) // chunk_tokens * chunk_tokens
        return StoredSpan(first, self.num_tokens, self.num_tokens - first, self.states)

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return [*(name for span in self.spans for name in span.names), *self.states]
