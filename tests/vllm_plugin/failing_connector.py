"""A KV connector that promises every prompt, writes nonsense, and reports that its loads failed."""

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
    """Blocks by request."""

    blocks: dict[str, list[int]] = field(default_factory=dict)


class FailingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Its setting `beside`: it loads beside other requests' steps."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._beside = settings.get("beside", False)
        self._asked: set[str] = set()
        self._block_size = vllm_config.cache_config.block_size
        self._starts: dict[str, int] = {}  # the first block that is to be loaded
        self._promised = Promised()
        self._failed: set[int] = set()
        self._over: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count = len(request.all_token_ids) - 1 - num_computed_tokens
        if request.request_id in self._asked or count <= 0:
            return 0, False
        self._starts[request.request_id] = num_computed_tokens // self._block_size
        return count, self._beside

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._asked.add(request.request_id)
            (ids,) = blocks.get_block_ids()
            self._promised.blocks[request.request_id] = ids[self._starts[request.request_id] :]

    def build_connector_meta(self, scheduler_output: Any) -> Promised:
        promised, self._promised = self._promised, Promised()
        return promised

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        promised = self._get_connector_metadata()
        assert isinstance(promised, Promised)
        for request_id, blocks in promised.blocks.items():
            for cache in self._caches:
                cache[blocks] = 7.0
            self._failed |= set(blocks)
            if self._beside:
                self._over.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *arguments: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        over, self._over = self._over, set()
        return None, over

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed
