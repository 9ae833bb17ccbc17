"""SpoiltBlocks: blocks whose load has failed, until somebody has computed them.

vLLM keeps such a block in its prefix cache, since the request that loaded it computes it again. If
that request is preempted or aborted before, the next one with its tokens takes the block as
computed, and vLLM itself answers wrongly. What such a request computes must not be stored.
Source: vllm 0.26 to 0.33 v1/core/sched/scheduler.py, _update_requests_with_invalid_blocks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvx_core.connector.plan import RequestId


class SpoiltBlocks:
    """Blocks of one group of layers, and how many of their first tokens are computed again.

    A step asks about the spoilt blocks that a request has, not about all of its blocks: there may
    be thousands, and a block that nobody uses stays spoilt.
    """

    __slots__ = ("_block_size", "_computed", "_held")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._computed: dict[int, int] = {}
        self._held: dict[RequestId, list[tuple[int, int]]] = {}  # of requests: index, spoilt block

    def __bool__(self) -> bool:
        return bool(self._computed)

    def failed(self, block_ids: Iterable[int]) -> None:
        """Notes blocks that a load was to fill. Name the blocks of all requests anew (`gets`)."""
        self._held.clear()
        self._computed.update(dict.fromkeys(block_ids, 0))

    def loads(self, block_ids: Sequence[int], start: int, stop: int) -> None:
        """Notes a load of a request's tokens, which reports its blocks if it fails.

        block_ids: of the request
        """
        size = self._block_size
        for block_id in block_ids[-(-start // size) : -(-stop // size)]:
            self._computed.pop(block_id, None)

    def gets(self, request_id: RequestId, first: int, block_ids: Sequence[int]) -> None:
        """Notes that a request has these blocks behind its `first` ones; 0: and no others."""
        found = [(first + i, one) for i, one in enumerate(block_ids) if one in self._computed]
        if not first:
            self._held.pop(request_id, None)
        if found:
            self._held.setdefault(request_id, []).extend(found)

    def computes(self, request_id: RequestId, start: int, stop: int) -> bool:
        """Notes that a step computes a request's tokens from `start` to `stop`. Returns whether it
        reads tokens before them that nobody has computed.
        """
        size, reads = self._block_size, False
        for i, block_id in self._held.get(request_id, ()):
            computed, begin = self._computed.get(block_id), i * size
            if computed is None or begin >= stop:
                continue
            if start > begin + computed:
                reads = True
            elif stop >= begin + size:
                del self._computed[block_id]
            else:
                self._computed[block_id] = max(computed, stop - begin)
        return reads

    def ends(self, request_id: RequestId) -> None:
        """Forgets a request."""
        self._held.pop(request_id, None)
