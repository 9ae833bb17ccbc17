"""A KV connector for vLLM that promises each prompt once, writes nonsense, and reports that it has
failed to load it.

It stands beside the connector that is checked, for `Setup.beside`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


@dataclass
class Promised(KVConnectorMetadata):  # type: ignore[misc]
    """What a step has to fill."""

    block_ids: list[int] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)


class FailingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads within a step, before the model runs; with the setting `apart`, beside steps."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._is_apart = settings.get("apart", False)
        self._block_size = vllm_config.cache_config.block_size
        self._first_block: dict[str, int] = {}  # by request: of those that were promised
        self._kept: set[str] = set()  # requests whose promise was taken
        self._promised = Promised()
        self._failed: set[int] = set()
        self._over: set[str] = set()  # requests whose load beside steps has ended

    # ---- scheduler ----

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        promised = len(request.all_token_ids) - 1 - num_computed_tokens
        if request.request_id in self._kept or promised <= 0:
            return 0, False
        self._first_block[request.request_id] = num_computed_tokens // self._block_size
        return promised, self._is_apart

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._kept.add(request.request_id)
            self._promised.request_ids.append(request.request_id)
            first = self._first_block[request.request_id]
            for ids in blocks.get_block_ids():
                self._promised.block_ids += ids[first:]

    def build_connector_meta(self, scheduler_output: Any) -> Promised:
        promised, self._promised = self._promised, Promised()
        return promised

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._kept.discard(request.request_id)
        return False, None

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        promised = self._get_connector_metadata()
        assert isinstance(promised, Promised)
        for cache in self._caches:
            cache[promised.block_ids] = 7.0
        self._failed.update(promised.block_ids)
        if self._is_apart:
            self._over.update(promised.request_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        over, self._over = self._over, set()
        return None, over

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *arguments: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
