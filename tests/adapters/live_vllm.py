"""Compares a running vLLM engine, through live_view, with HF's own keys and values. A script, since
vLLM changes the process that it runs in: test_vllm.py runs it.

    python tests/adapters/live_vllm.py DIRECTORY KV_CACHE_DTYPE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from vllm import LLM, SamplingParams
from vllm import __version__ as vllm_version
from vllm.v1.attention.backends import utils

from kvx_adapters import transformers as hf
from kvx_adapters import vllm
from kvx_adapters.cli.demo import make_model
from kvx_core import (
    CacheSpan,
    DType,
    InvalidArgumentError,
    OutOfRangeError,
    compare,
    gather_kv,
    verify,
)
from tests.ways_out import WayOut, leads_out

directory, kv_cache_dtype = Path(sys.argv[1]), sys.argv[2]
make_model(directory, "float32", 0)

# 64 tokens per step and blocks of 64: prompts are prefilled in chunks, while others decode.
llm = LLM(
    model=str(directory),
    dtype="float32",
    kv_cache_dtype=kv_cache_dtype,
    enforce_eager=True,
    max_model_len=512,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    block_size=64,
    num_gpu_blocks_override=24,
)
engine = llm.llm_engine
generator = torch.Generator().manual_seed(3)
prompts = [torch.randint(1, 257, (n,), generator=generator).tolist() for n in (131, 1, 64, 77)]
prompts[3][:70] = prompts[0][:70]  # shares its first block
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
request_ids = [
    engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    for i, prompt in enumerate(prompts)
]
started: dict[str, int] = {}  # and how many tokens it has said
while len(started) < len(prompts):
    for output in engine.step():
        assert not output.finished
        started[output.request_id] = len(output.outputs[0].token_ids)

view = vllm.live_view(llm, fingerprint="f")
table = vllm.live_block_table(llm, request_ids)
layers = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.kv_caches
assert [layer.k.data for layer in view.layers] == [layer.data_ptr() for layer in layers]
assert view.null_block_id == 0
assert (view.layers[0].num_blocks, view.layers[0].block_size) == (24, 64)

model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
for row, prompt in enumerate(prompts):
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([prompt]), past_key_values=cache)
    for i, (layer, wanted) in enumerate(zip(view.layers, cache.layers, strict=True)):
        key, value = gather_kv(
            layer,
            table,
            [len(prompt) if s == row else 0 for s in range(len(prompts))],
            dtype="float32",
            k_scale=view.k_scales and view.k_scales[i],
            v_scale=view.v_scales and view.v_scales[i],
        )
        for found, tensor in ((key, wanted.keys), (value, wanted.values)):
            # vLLM's FP8 op drops the bits that E4M3 has no room for: up to an eighth, and what
            # that does to the next layer's input.
            error = (found[row] - tensor[0].transpose(0, 1)).norm() / tensor.norm()
            bound = 1e-4 if kv_cache_dtype == "auto" else 0.2
            assert error < bound, f"prompt {row}, layer {i}: {error}"

facts = hf.cache_facts(model, fingerprint="f")
assert not compare(view.facts, facts).reasons_as_is
if kv_cache_dtype == "fp8":
    assert view.layers[0].k.dtype is DType.F8_E4M3

# The engine's own layers, spec and op; nothing of its cache changes.
runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
attention = runner.compilation_config.static_forward_context
layout = getattr(utils, "get_kv_cache_layout", lambda: None)()  # before 0.29
(group,) = vllm.layer_groups(runner.kv_cache_config, attention, vllm_version, layout=layout)
caches = dict(zip(group.layer_names, layers, strict=True))
before = [cache.clone() for cache in layers]
vllm.self_test_group(group, caches, attention)
assert all(map(torch.equal, before, layers))
shifted = dict(zip(group.layer_names, [*layers[1:], layers[0]], strict=True))
with pytest.raises(InvalidArgumentError, match="vLLM wrote a token to slot 1535, and KVX reads no"):
    vllm.self_test_group(group, shifted, attention)

span = vllm.live_span(llm, request_ids, fingerprint="f")
counts = [len(prompt) + started[str(i)] - 1 for i, prompt in enumerate(prompts)]
assert span.view.holds is not None
assert span.view.holds() == counts
verify(span, span, counts)
for row in range(4):
    more = [count + (i == row) for i, count in enumerate(counts)]
    with pytest.raises(OutOfRangeError, match=f"holds {counts[row]} tokens? of sequence {row} by"):
        verify(span, span, more)
engine.step()
assert span.view.holds() == [count + 1 for count in counts]


def used(ends: CacheSpan) -> None:
    """The first token of each request is read."""
    verify(ends, ends, [1] * ends.block_table.seq_count)


def span_of(*ids: str) -> CacheSpan:
    return vllm.live_span(llm, ids, fingerprint="f")


# Preempted requests are computed anew, in other blocks.
scheduler = engine.engine_core.engine_core.scheduler
scheduler.reset_prefix_cache(reset_running_requests=True)
while any(not scheduler.kv_cache_manager.get_block_ids(one)[0] for one in request_ids):
    engine.step()
leads_out(
    WayOut(
        "as when the span was made. Make a new span",
        lambda: used(span),
        lambda: used(span_of(*request_ids)),
    )
)
span = span_of(*request_ids)
engine.abort_request([request_ids[2]], internal=True)
engine.step()
unfinished = [one for one in request_ids if one != request_ids[2]]
leads_out(
    WayOut(
        "is finished, and its blocks are free. Make a span of requests that are not",
        lambda: used(span),
        lambda: used(span_of(*unfinished)),
    )
)
leads_out(
    WayOut(
        "which is not an unfinished request. Pass the ids that add_request returned, before the "
        "request finishes: its blocks are then freed",
        lambda: vllm.live_block_table(llm, request_ids),
        lambda: vllm.live_block_table(llm, unfinished),
    )
)
print("as HF computed them")
