"""StatePositions: after which of its tokens a request's states are stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StatePositions:
    """Chooses states to store. One takes as much room as K and V of thousands of tokens, and exists
    only where a step ends.

    every: None: those at the end of a prompt, for requests that go on from it; else also one in so
           many tokens, of prompts and answers
    """

    every: int | None = None

    def takes(self, start: int, stop: int, num_prompt_tokens: int) -> bool:
        """True if the states after `stop` tokens are stored, when a step has computed [start, stop)
        of a request.
        """
        if self.every is not None and start // self.every < stop // self.every:
            return True
        return stop == num_prompt_tokens
