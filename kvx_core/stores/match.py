"""Match: the part of a prompt that a prefix store has. Progress: of the load of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock


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
    is_far: bool = False  # files have to come over a network

    def span_of_states(self, chunk_tokens: int) -> StoredSpan:
        """Returns the span of the last chunk, with the files of states as its names."""
        first = max(self.num_tokens - 1, 0) // chunk_tokens * chunk_tokens
        return StoredSpan(first, self.num_tokens, self.num_tokens - first, self.states)

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return [*(name for span in self.spans for name in span.names), *self.states]


@dataclass(slots=True)
class Progress:
    """The progress of a load, for a thread that watches or cancels it."""

    stop: int = 0  # all tokens before this position are loaded, or lie before the load's start
    is_cancelled: bool = False  # set to True, it ends the load with a StoreError after a chunk
    lock: Lock = field(default_factory=Lock)  # held while the load writes to caches
    _others: list[Progress] = field(default_factory=list)  # see `beside`

    def cancel(self) -> None:
        """Ends the load. When this returns, the load writes nothing more to caches."""
        with self.lock:
            for each in (self, *self._others):
                each.is_cancelled = True

    def beside(self) -> Progress:
        """Returns one that `cancel` cancels too: for what is loaded before the tokens."""
        with self.lock:
            other = Progress(is_cancelled=self.is_cancelled, lock=self.lock)
            self._others.append(other)
        return other
