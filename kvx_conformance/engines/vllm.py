"""vLLM on the CPU: an engine in this process whose requests are computed step by step, and its FP8.

Imported by the suite's worker, since vLLM changes the process that it runs in.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
import vllm
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.core.block_pool import BlockPool

from kvx_adapters import vllm as adapter
from kvx_adapters.cli.engines import Model
from kvx_conformance.engine import Floats, Table
from kvx_conformance.engines.tiny import llama, mistral
from kvx_core import CacheFacts, CacheSpan, CacheView

BLOCK_SIZE = 32  # the smallest that vLLM takes on CPU
_LAYERS, _HEADS, _DIM = 3, 2, 32
_numbers = itertools.count()
_idle = defaultdict[str, list[Any]](list)  # engines that no request is in, by their model


def in_this_process(folder: str, **sizes: int) -> Any:
    """A vllm.LLM that computes what it is asked, in float32 and in this process.

    folder: of the model, without a tokenizer; sizes: more arguments of vllm.LLM
    """
    return vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        block_size=BLOCK_SIZE,
        **sizes,
    )


def _llm(model: Model) -> Any:
    """An engine that no request is in: one that others have used, or a new one."""
    if idle := _idle[model.fingerprint]:
        return idle.pop()
    folder = tempfile.TemporaryDirectory()
    model.llama.save_pretrained(folder.name)
    made = in_this_process(
        folder.name,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=24,
    )
    folder.cleanup()
    return made


def _vector(pages: Any, block: int, offset: int) -> tuple[Any, Any]:
    """K and V of a token, (heads, dim): a head's page is K as [dim, token], then V as [token, dim].

    pages: (blocks, heads, tokens, 2 * dim). Source: vllm 0.32 csrc/cpu/cpu_attn_vec.hpp
    """
    k, v = pages[block].reshape(_HEADS, 2, BLOCK_SIZE * _DIM).unbind(1)
    return k.view(_HEADS, _DIM, BLOCK_SIZE)[..., offset], v.view(_HEADS, BLOCK_SIZE, _DIM)[
        :, offset
    ]


class Requests:
    """Requests of a vllm.LLM in float32, each with a long prompt. A step computes a part of it."""

    computes, num_sequences, max_tokens = True, 3, 45

    def __init__(self) -> None:
        self.llm = _llm(self.model())
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.names: dict[int, str] = {}
        weakref.finalize(self, _end, self.llm, self.names, _idle[self.model().fingerprint])

    def model(self) -> Model:
        return llama()

    def describe(self) -> CacheView:
        return adapter.live_view(self.llm, fingerprint=self.model().fingerprint)

    def span(self, sequences: Sequence[int]) -> CacheSpan:
        names = [self.names[one] for one in sequences]
        return adapter.live_span(self.llm, names, fingerprint=self.model().fingerprint)

    def write(self, sequence: int, tokens: Sequence[int], keys: None, values: None) -> None:
        """Puts the tokens into the prompt, and has one step compute them, and no other request."""
        others = self.scheduler.running
        if sequence not in self.names:
            params = vllm.SamplingParams(temperature=0, max_tokens=8, detokenize=False)
            prompt: Any = {"prompt_token_ids": [0] * 100}
            self.names[sequence] = self.engine.add_request(str(next(_numbers)), prompt, params)
        name = self.names[sequence]
        request = self.scheduler.requests[name]
        at, count = request.num_computed_tokens, len(tokens)
        request.prompt_token_ids[at : at + count] = tokens
        row = self.runner.input_batch.req_id_to_index.get(name)
        if row is not None:
            self.runner.input_batch.token_ids_cpu[row, at : at + count] = tokens
        limit = self.scheduler.max_num_scheduled_tokens
        self.scheduler.max_num_scheduled_tokens = count
        self.scheduler.running = [one for one in others if one is request]
        self.engine.step()
        self.scheduler.running = [one for one in others if one is not request] + [request]
        self.scheduler.max_num_scheduled_tokens = limit
        assert request.num_computed_tokens == at + count

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats]:
        table = self.table(sequence)
        if not table.first <= position < table.first + table.length or table.blocks is None:
            raise LookupError(position)
        block, offset = table.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
        k, v = zip(*(_vector(one, block, offset) for one in self.runner.kv_caches), strict=True)
        return torch.stack(k).numpy(), torch.stack(v).numpy()

    def table(self, sequence: int) -> Table:
        name = self.names.get(sequence)
        if name is None:
            return Table(0)
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        held = self.scheduler.requests[name].num_computed_tokens
        return Table(int(held), blocks=[*blocks])

    def facts(self) -> CacheFacts:
        return self.describe().facts

    def reserve(self, sequence: int, count: int) -> None:
        """Computes any tokens, and zeroes what they have stored."""
        self.write(sequence, [0] * count, None, None)
        for layer in self.runner.kv_caches:
            layer[[*(self.table(sequence).blocks or ())]] = 0

    def free(self, sequence: int) -> None:
        self.engine.abort_request([self.names.pop(sequence)], internal=True)


class Windowed(Requests):
    """One request of a model whose layers have a window of 9: blocks that it has left are null."""

    num_sequences, max_tokens = 1, 75
    span: Any = None  # that of live_span begins at position 0

    def model(self) -> Model:
        return mistral()

    def describe(self) -> CacheView:
        return replace(super().describe(), holds=lambda: self.held(0))

    def held(self, sequence: int) -> int:
        table = self.table(sequence)
        return table.first + table.length

    def table(self, sequence: int) -> Table:
        found = super().table(sequence)
        null = sum(block == adapter.NULL_BLOCK_ID for block in found.blocks or ())
        first = null * BLOCK_SIZE
        return replace(found, length=found.length - first, first=first)


def _end(llm: Any, names: dict[int, str], idle: list[Any]) -> None:
    llm.llm_engine.abort_request([*names.values()], internal=True)
    idle.append(llm)


class Fp8:
    """E4M3 by vLLM's own op on CPU, with a scale for K and one for V of each layer; blocks of its
    own pool."""

    num_sequences, max_tokens = 3, 45
    name = "fp8_e4m3"

    def __init__(self) -> None:
        shape = (20, _HEADS, BLOCK_SIZE, 2 * _DIM)
        self.caches = [torch.zeros(shape, dtype=torch.uint8) for _ in range(_LAYERS)]
        self.scales = [(0.3 + 0.1 * i, 0.7 - 0.2 * i) for i in range(_LAYERS)]
        self.pool = BlockPool(20, enable_caching=False, hash_block_size=BLOCK_SIZE)
        self.blocks: dict[int, list[Any]] = {}
        self.lengths: dict[int, int] = {}

    def describe(self) -> CacheView:
        spec = adapter.LayerSpec(
            version=vllm.__version__,
            backend="CPU_ATTN",
            layout="LBHNC",
            kv_cache_dtype=self.name,
            dtype=torch.uint8,
            num_blocks=20,
            block_size=BLOCK_SIZE,
            num_kv_heads=_HEADS,
            head_size=_DIM,
            page_size_bytes=self.caches[0][0].nbytes,
            isa="vec",
        )
        k_scales, v_scales = zip(*self.scales, strict=True)
        return adapter.cache_view(
            self.caches, spec, self.facts(), k_scales=k_scales, v_scales=v_scales
        )

    def span(self, sequences: Sequence[int]) -> CacheSpan:
        chosen = [*sequences]
        tables = [[*(self.table(one).blocks or ())] for one in chosen]
        width = max(map(len, tables))
        rows = [[*row, *[0] * (width - len(row))] for row in tables]
        view = replace(self.describe(), holds=lambda: [self.lengths.get(s, 0) for s in chosen])
        return view.at(adapter.block_table(rows))

    def write(self, sequence: int, tokens: Sequence[int], keys: Floats, values: Floats) -> None:
        at, count = self.lengths.get(sequence, 0), len(tokens)
        blocks = self.blocks.setdefault(sequence, [])
        needed = -(-(at + count) // BLOCK_SIZE) - len(blocks)
        blocks += self.pool.get_new_blocks(needed) if needed > 0 else []
        slots = torch.tensor(
            [
                blocks[p // BLOCK_SIZE].block_id * BLOCK_SIZE + p % BLOCK_SIZE
                for p in range(at, at + count)
            ]
        )
        for i, (cache_, (k_scale, v_scale)) in enumerate(
            zip(self.caches, self.scales, strict=True)
        ):
            impl: Any = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
            impl.attn_type, impl.kv_cache_dtype = "decoder", self.name
            layer: Any = SimpleNamespace(isa="vec", _k_scale_float=k_scale, _v_scale_float=v_scale)
            key, value = (torch.from_numpy(one[i].copy()) for one in (keys, values))
            impl.do_kv_cache_update(layer, key, value, cache_, slots)
        self.lengths[sequence] = at + count

    def read(self, sequence: int, position: int) -> tuple[Floats, Floats]:
        if not 0 <= position < self.lengths.get(sequence, 0):
            raise LookupError(position)
        block = self.blocks[sequence][position // BLOCK_SIZE].block_id
        found: tuple[list[Any], list[Any]] = ([], [])
        for one, scales in zip(self.caches, self.scales, strict=True):
            for half, stored, scale in zip(
                found, _vector(one, block, position % BLOCK_SIZE), scales, strict=True
            ):
                numbers = stored.contiguous().view(torch.float8_e4m3fn).float().numpy()
                half.append(numbers * np.float32(scale))
        return np.stack(found[0]), np.stack(found[1])

    def table(self, sequence: int) -> Table:
        blocks = [block.block_id for block in self.blocks.get(sequence, [])]
        return Table(self.lengths.get(sequence, 0), blocks=blocks)

    def facts(self) -> CacheFacts:
        config = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: _HEADS)
        rotary = SimpleNamespace(is_neox_style=True, rotary_dim=_DIM)
        found = adapter.cache_facts(
            config,
            [rotary],
            version=vllm.__version__,
            fingerprint=llama().fingerprint,
            first_kv_head=0,
        )
        return replace(found, num_layers=_LAYERS, first_layer=0, window=0)

    def memory(self) -> list[Any]:
        return [one.numpy() for one in self.caches]

    def free(self, sequence: int) -> None:
        self.pool.free_blocks(self.blocks.pop(sequence))
        del self.lengths[sequence]


ENGINES = (Requests, Windowed, *([Fp8] if torch.cpu._is_avx512_supported() else []))
