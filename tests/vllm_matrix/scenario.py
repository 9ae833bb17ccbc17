"""One engine of whichever vLLM is installed, on the CPU: prompts in, tokens out.

    python tests/vllm_matrix/scenario.py TASK RESULT

TASK is a file of JSON: model, block_size, prompts (token ids), max_tokens, and kv_transfer, the
fields of a KVTransferConfig or null. RESULT is written: tokens and num_cached_tokens per prompt,
the class that writes the cache, and how many blocks are in use when the engine is idle.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

task = json.loads(Path(sys.argv[1]).read_text())

# 64 tokens per step: the longer prompts are prefilled in chunks, while others decode.
llm = LLM(
    model=task["model"],
    dtype="float32",
    enforce_eager=True,
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    block_size=task["block_size"],
    num_gpu_blocks_override=64,
    kv_transfer_config=task["kv_transfer"] and KVTransferConfig(**task["kv_transfer"]),
)
outputs = llm.generate(
    [{"prompt_token_ids": prompt} for prompt in task["prompts"]],
    SamplingParams(temperature=0, max_tokens=task["max_tokens"], ignore_eos=True),
    use_tqdm=False,
)
core = llm.llm_engine.engine_core.engine_core
for _ in range(1000):  # as a server's loop does until a connector lets go of finished requests
    if not core.scheduler.has_requests():
        break
    llm.llm_engine.step()
pool = core.scheduler.kv_cache_manager.block_pool
num_used_blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # without the null block
runner = core.model_executor.driver_worker.worker.model_runner
layers = runner.compilation_config.static_forward_context.values()
(writer,) = {f"{type(layer.impl).__module__}.{type(layer.impl).__name__}" for layer in layers}
core.shutdown()  # a connector has written its files when this returns

Path(sys.argv[2]).write_text(
    json.dumps(
        {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "num_cached_tokens": [output.num_cached_tokens for output in outputs],
            "writer": writer,
            "num_used_blocks": num_used_blocks,
        }
    )
)
