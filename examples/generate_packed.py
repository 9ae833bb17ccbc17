"""A Llama from a safetensors file generates with each layer's keys and values in a PackedKVCache.

python examples/generate_packed.py
"""

import tempfile

import needed  # noqa: F401  says what to install if a package is missing
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvx_adapters import transformers as hf

config = LlamaConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)  # model.safetensors and config.json
    model = LlamaForCausalLM.from_pretrained(folder).eval()

prompts = torch.randint(1, 61, (2, 11))
mask = torch.ones_like(prompts)
prompts[1, :4] = mask[1, :4] = 0  # the second prompt is shorter, and padded on the left
options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
wanted = model.generate(prompts, **options)

hf.use_packed(model)
found = model.generate(prompts, **options, return_dict_in_generate=True)
assert torch.equal(found.sequences, wanted)
print("20 tokens each, the same as from transformers' own cache")
for i, layer in enumerate(found.past_key_values.layers):
    print(f"layer {i}: {layer.kv_cache}")
