"""KVXConnector in vLLM with one fault each: for cases that need a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvx_adapters.vllm_plugin.connector import KVXConnector
from kvx_conformance.connector import Setup
from kvx_conformance.connectors import kvx


class Faulty(kvx.Connector):
    """A subject whose connector has its own name in its module, with `Connector` behind it."""

    def transfer(self, store: Path) -> dict[str, Any]:
        return super().transfer(store) | {
            "kv_connector": f"{type(self).__name__}Connector",
            "kv_connector_module_path": type(self).__module__,
        }


class KeepsOldBlocksConnector(KVXConnector):
    """Goes on with the blocks that a request had before it lost them."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if request.request_id in self._seen():
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.request_id not in self._seen():
            self._seen().add(request.request_id)
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        cached = scheduler_output.scheduled_cached_reqs
        resumed, cached.resumed_req_ids = cached.resumed_req_ids, set()
        try:
            return super().build_connector_meta(scheduler_output)
        finally:
            cached.resumed_req_ids = resumed

    def _seen(self) -> set[str]:
        """Requests that have had blocks."""
        found: set[str] = self.__dict__.setdefault("seen", set())
        return found


class KeepsOldBlocks(Faulty):
    pass


class SavesWhatWasNotComputedConnector(KVXConnector):
    """Takes all that fits into the blocks of a request that has ended for computed."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        room = len(block_ids[0]) * Setup.block_size
        held, request.num_computed_tokens = request.num_computed_tokens, room
        status, request.status = request.status, type(request.status).FINISHED_LENGTH_CAPPED
        try:
            return super().request_finished_all_groups(request, block_ids)
        finally:
            request.num_computed_tokens, request.status = held, status


class SavesWhatWasNotComputed(Faulty):
    pass


class NeverLetsGoConnector(KVXConnector):
    """Says of each request that it is being saved, and never that it was."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        super().request_finished_all_groups(request, block_ids)
        return True, None


class NeverLetsGo(Faulty):
    pass


class ForgetsInItsSleepConnector(KVXConnector):
    """After a reset it has a name of its own for what it stores, and looks for."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if getattr(self, "was_reset", False):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def reset_cache(self) -> bool:
        self.was_reset = True
        return super().reset_cache()


class ForgetsInItsSleep(Faulty):
    pass


class WaitsForTheDiskConnector(KVXConnector):
    """Looks prompts up in the engine's own thread."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        while found[0] is None:
            self._scheduler.lookups.wait(60)
            found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found


class WaitsForTheDisk(Faulty):
    def transfer(self, store: Path) -> dict[str, Any]:
        found = super().transfer(store)
        return found | {
            "kv_connector_extra_config": found["kv_connector_extra_config"]
            | {"lookup_seconds": 600}
        }
