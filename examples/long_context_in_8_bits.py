"""A small Llama decodes with keys in 8 bits and values in 4: a fifth of their float32 size.

python examples/long_context_in_8_bits.py
"""

import needed  # noqa: F401  says what to install if a package is missing
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from kvx_core import KvCacheStore

config = LlamaConfig(
    vocab_size=128,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    attn_implementation="kvx_store",
)
store = KvCacheStore.from_preset("safe-lowbit", 3, 2, 64, max_seq_len=4096)


def attend(module, query, key, value, attention_mask, scaling, **_):
    """Attention of a layer: appends the new tokens, (1, heads, tokens, dim), and attends.

    Queries go one by one, each to the tokens up to its own.
    """
    layer, before = module.layer_idx, store.current_seq_len
    store.append(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    mixed = [
        store.attend(layer, one, scale=scaling, end=before + i + 1)
        for i, one in enumerate(query[0].transpose(0, 1))
    ]
    return torch.stack(mixed)[None], None


AttentionInterface.register("kvx_store", attend)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()

tokens = torch.randint(128, (1, 300))
with torch.inference_mode():
    model(tokens[:, :-1], use_cache=False)  # the prompt
    logits = model(tokens[:, -1:], position_ids=torch.tensor([[299]]), use_cache=False).logits

    # The whole sequence again, from float32 keys and values.
    model.set_attn_implementation("sdpa")
    wanted = model(tokens, use_cache=False).logits[:, -1:]

report = store.memory_report()
print(
    f"{store.current_seq_len} tokens in {report.used_bytes} bytes: {report.compression_ratio:.1f} "
    "times smaller than float32"
)
error = (logits - wanted).norm() / wanted.norm()
print(f"logits differ by {100 * error:.1f} %")
assert error < 0.15  # values of 4 bits are off by 9 %, of weights that nobody has trained
