"""SaveBudget: saves of an engine's steps, so that no step copies much more than it computes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvx_core.connector.plan import RequestId, Save
from kvx_core.stores.token_chain import TokenChain


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The last tokens of a finished request, whose blocks stay until they are saved."""

    save: Save
    chain: TokenChain  # which has the keys of all its chunks


@dataclass(slots=True)
class SaveBudget:
    """A step saves one chunk, or as many tokens as it computes. What is left waits for later steps.

    So four sequences that complete a chunk in the same decode step cost four steps a copy each, not
    one step all of them. Saves never fall behind: a sequence completes no more tokens than steps
    compute. Less than a chunk that a step has not saved is left for the next one, so that a long
    prompt is saved as it is computed, wherever its steps end.
    """

    chunk_tokens: int
    _computed: int = 0  # tokens of the step that is being planned, as far as is known, and before
    _saved: int = 0  # tokens that its plan saves
    _waiting: list[_Waiting] = field(default_factory=list)  # oldest first

    def computes(self, num_tokens: int) -> None:
        """The step that is being planned computes these tokens, too."""
        self._computed += num_tokens

    def saves(self, num_tokens: int) -> None:
        """It saves these tokens, too."""
        self._saved += num_tokens

    def cut(self, start: int, stop: int) -> int:
        """How far a step may save tokens [start, stop): `stop`, or the end of a chunk before it.

        start: the beginning of a chunk
        """
        room = max(self.chunk_tokens, self._computed) - self._saved
        if stop - start <= room:
            return stop
        return start + max(0, room) // self.chunk_tokens * self.chunk_tokens

    def wait(self, save: Save, chain: TokenChain) -> None:
        """Has the final save of a request wait for its turn. Raises InvalidArgumentError."""
        chain.node(save.stop // self.chunk_tokens)  # what can fail fails now
        self._waiting.append(_Waiting(save, chain))

    def forget(self, request_id: RequestId) -> None:
        """Drops what waits of a request."""
        self._waiting = [each for each in self._waiting if each.save.request_id != request_id]

    def next_step(self) -> list[Save]:
        """Begins the plan of the next step; what `take` returns for it."""
        left = min(max(0, self._computed - self._saved), self.chunk_tokens - 1)
        self._computed, self._saved = left, 0
        return self.take()

    def take(self) -> list[Save]:
        """The saves of finished requests that the step has room for."""
        return self._take(everything=False)

    def take_all(self) -> list[Save]:
        """All that waits, for a step that computes nothing: nobody waits for it."""
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
