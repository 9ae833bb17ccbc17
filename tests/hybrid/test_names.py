"""The names and launch shapes of DeepSeek-V4's kernels, read from their sources.

What they compute is tested in tests/hybrid_ops, on every backend.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvx_core.hybrid
from kvx_core.hybrid import (
    BlockAllocator,
    ClassicalView,
    IndexerView,
    KVCacheManager,
    LayerCacheHandle,
    PagedCache,
    StateCache,
    SWAView,
)

_SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "hybrid"


@pytest.mark.parametrize(
    ("file", "kernel", "rows"),
    [
        ("append.cu", "append_swa_kernel", "a.num_tokens"),
        ("flush.cu", "flush_write_csa_kernel", "f.num_rows, 2"),
        ("flush.cu", "flush_write_hca_kernel", "f.num_rows"),
    ],
)
def test_a_kernel_has_a_block_of_128_threads_for_each_row(
    file: str, kernel: str, rows: str
) -> None:
    """One block per token of append_swa, per request of a flush."""
    source = (_SOURCES / file).read_text()
    launches = re.findall(rf"KVX_LAUNCH_DEPENDENT\(\(?{kernel}.*?;", source, re.DOTALL)
    assert launches
    for launch in launches:
        assert f"dim3({rows}), dim3(kThreads)" in " ".join(launch.split())
    shared = (_SOURCES / "blocks.cuh").read_text()
    assert "constexpr uint32_t kThreads = 128, kWarp = 32" in shared
    assert "__shfl_xor_sync" in shared  # the largest magnitude of a warp, then of the block
    assert "atomicAdd(a.head + slot, 1)" in (_SOURCES / "append.cu").read_text()


def test_names() -> None:
    """Each is where a caller looks for it."""
    methods = {
        BlockAllocator: "acquire release",
        PagedCache: "memory_bytes",
        StateCache: "reset_slot",
        LayerCacheHandle: "write_swa read_swa_view read_classical_view read_indexer_view",
        KVCacheManager: "admit_request release_request allocate_block acquire",
    }
    for kind, names in methods.items():
        assert all(callable(getattr(kind, name)) for name in names.split())
    for view in (SWAView, ClassicalView, IndexerView):
        assert view.__dataclass_fields__
    for name in ["prepare_forward", "maybe_flush_csa", "maybe_flush_hca", "compute_block_budget"]:
        assert callable(getattr(kvx_core.hybrid, name))
