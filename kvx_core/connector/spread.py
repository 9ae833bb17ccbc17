"""SaveBudget: spreads saves over steps, so that no step copies much more than it computes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvx_core.connector.plan import RequestId, Save
from kvx_core.stores.token_chain import TokenChain


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The last tokens of a finished request, whose blocks stay until they are saved."""

    save: Save
    chain: TokenChain  # already has the keys of all chunks of the save


@dataclass(slots=True)
class SaveBudget:
    """Lets a step save one chunk, or as many tokens as it computes. Other saves wait.

    If four sequences complete a chunk in the same decode step, each of four steps copies one chunk.
    Saves never fall behind, because sequences complete no more tokens than steps compute. A step
    that saves fewer tokens than it computes leaves the difference, less than a chunk, to the next
    step. So a long prompt is saved while it is computed, wherever its steps end.
    """

    chunk_tokens: int
    _computed: int = 0  # tokens of the planned step so far, and tokens left by earlier steps
    _saved: int = 0  # tokens that the planned step saves
    _waiting: list[_Waiting] = field(default_factory=list)  # oldest first

    def computes(self, num_tokens: int) -> None:
        """Adds to the number of tokens that the planned step computes."""
        self._computed += num_tokens

    def saves(self, num_tokens: int) -> None:
        """Adds to the number of tokens that the planned step saves."""
        self._saved += num_tokens

    def cut(self, start: int, stop: int) -> int:
        """Returns how far a step may save tokens [start, stop): to `stop`, or to a chunk's end.

        start: the beginning of a chunk
        """
        room = max(self.chunk_tokens, self._computed) - self._saved
        if stop - start <= room:
            return stop
        return start + max(0, room) // self.chunk_tokens * self.chunk_tokens

    def wait(self, save: Save, chain: TokenChain) -> None:
        """Queues the final save of a request for later steps. Raises InvalidArgumentError."""
        chain.node(save.stop // self.chunk_tokens)  # computes all keys: an error is raised now
        self._waiting.append(_Waiting(save, chain))

    def forget(self, request_id: RequestId) -> None:
        """Drops the waiting saves of a request."""
        self._waiting = [each for each in self._waiting if each.save.request_id != request_id]

    def next_step(self) -> list[Save]:
        """Begins the plan of the next step; returns the saves that `take` returns for it."""
        left = min(max(0, self._computed - self._saved), self.chunk_tokens - 1)
        self._computed, self._saved = left, 0
        return self.take()

    def take(self) -> list[Save]:
        """Removes and returns the waiting saves that the planned step has room for."""
        return self._take(everything=False)

    def take_all(self) -> list[Save]:
        """Removes and returns all waiting saves, for a step that computes nothing."""
        return self._take(everything=True)

    def _take(self, *, everything: bool) -> list[Save]:
        taken: list[Save] = []
        while self._waiting:
            save, chain = self._waiting[0].save, self._waiting[0].chain
            stop = save.stop if everything else self.cut(save.start, save.stop)
            if stop == save.start:
                break
            self.saves(stop - save.start)
            if stop == save.stop:
                taken.append(save)
                del self._waiting[0]
                continue
            count = stop - save.start
            taken.append(replace(save, tokens=save.tokens[:count], final=False))
            node = chain.node(stop // self.chunk_tokens)
            left = replace(save, node=node, start=stop, tokens=save.tokens[count:])
            self._waiting[0] = _Waiting(left, chain)
        return taken
