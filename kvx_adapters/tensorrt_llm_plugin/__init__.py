"""KVX in TensorRT-LLM: a KV cache connector that keeps prefixes in a KVX store.

    LLM(..., kv_connector_config=KvCacheConnectorConfig(
        connector_module="kvx_adapters.tensorrt_llm_plugin",
        connector_scheduler_class="KVXConnectorScheduler",
        connector_worker_class="KVXConnectorWorker"))

with TRTLLM_KVX='{"path": "/the/stores/directory"}' in the environment (settings.py). Any engine
that serves the same model finds the saved prefixes: TensorRT-LLM with another block size or other
ranks, or vLLM. So does any program that opens the store.

TensorRT-LLM gives a connector the configurations of engine and model, and a bare tensor; model.py
combines them. scheduler.py plans on rank 0, worker.py copies on every rank, and steps.py has the
messages from scheduler to workers.
"""

from kvx_adapters.tensorrt_llm_plugin import api as api  # first: it reports a missing tensorrt_llm
from kvx_adapters.tensorrt_llm_plugin.scheduler import KVXConnectorScheduler
from kvx_adapters.tensorrt_llm_plugin.worker import KVXConnectorWorker

__all__ = ["KVXConnectorScheduler", "KVXConnectorWorker"]
