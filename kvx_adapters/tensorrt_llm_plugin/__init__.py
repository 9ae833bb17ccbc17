"""KVX in TensorRT-LLM: a KV cache connector that keeps prefixes in a KVX store.

    LLM(..., kv_connector_config=KvCacheConnectorConfig(
        connector_module="kvx_adapters.tensorrt_llm_plugin",
        connector_scheduler_class="KVXConnectorScheduler",
        connector_worker_class="KVXConnectorWorker"))

with TRTLLM_KVX='{"path": "/the/stores/directory"}' in the environment (settings.py). What is saved
is found again by whatever serves the same model: TensorRT-LLM with other blocks or ranks, vLLM, or
a program that fills a store.

A connector is told what TensorRT-LLM's configuration and the model's say, and given a bare tensor:
model.py puts them together. scheduler.py decides on rank 0, worker.py copies on every rank, and
steps.py is what one tells the other.
"""

from kvx_adapters.tensorrt_llm_plugin import api as api  # first: it says what is missing
from kvx_adapters.tensorrt_llm_plugin.scheduler import KVXConnectorScheduler
from kvx_adapters.tensorrt_llm_plugin.worker import KVXConnectorWorker

__all__ = ["KVXConnectorScheduler", "KVXConnectorWorker"]
