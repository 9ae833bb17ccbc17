"""Opens the store named by the settings."""

from __future__ import annotations

from kvx_adapters.tensorrt_llm_plugin import api
from kvx_adapters.tensorrt_llm_plugin.model import Model
from kvx_adapters.tensorrt_llm_plugin.settings import Settings
from kvx_core.snapshot import StoreError
from kvx_core.stores.prefix import PrefixStore


def opened_store(model: Model, settings: Settings) -> PrefixStore | None:
    """Returns the store; None if it is broken. A broken store is logged, and ends no engine.

    Raises InvalidArgumentError.
    """
    settings.check(writes=True)
    try:
        store = model.store(settings)
        store.chunk_tokens  # noqa: B018
    except StoreError as error:
        api.logger.warning(f"KVX saves and loads nothing until the next start: {error}")
        return None
    return store
