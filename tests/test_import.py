"""kvx_core on a machine without torch, and what importing it brings along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvx_core

REPOSITORY = Path(__file__).parents[1]

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # any import of torch now fails

import numpy as np
import kvx_core as kvx

assert not any(name.startswith("torch.") for name in sys.modules)
k, v = np.zeros((2, 3, 4, 2, 8), np.float16)
cache = kvx.CacheDesc.from_kv(
    kvx.describe(k, kvx.Layout.BLOCK_NHD), kvx.describe(v, kvx.Layout.BLOCK_NHD)
)
key = np.arange(32, dtype=np.float16).reshape(2, 2, 8)
plan = kvx.WritePlan(cache, key, -key)
plan(key, -key, [5, 0])
got, _ = kvx.gather_kv(cache, [[1]], [2])
assert np.array_equal(got[0, 1], key[0]), got
assert np.array_equal(v[0, 0], -key[1])
view = kvx.CacheView((cache,), kvx.CacheFacts(), dense=True)
copy = np.zeros_like(k)
target = kvx.CacheDesc.from_kv(
    kvx.describe(copy, kvx.Layout.BLOCK_NHD), kvx.describe(copy.copy(), kvx.Layout.BLOCK_NHD)
)
into = kvx.CacheView((target,), kvx.CacheFacts(), dense=True)
assert kvx.migrate(view, into, [4, 4, 4], same_model=True) == 3 * 4 * 2 * 16 * 2
assert kvx.verify(view, into, [4, 4, 4])
assert np.array_equal(copy, k)
print("done")
"""


def python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_everything_works_without_torch() -> None:
    assert python(WITHOUT_TORCH) == "done"


def test_importing_kvx_core_imports_no_torch_and_loads_no_library() -> None:
    code = (
        "import sys, kvx_core; "
        "print('torch' in sys.modules, kvx_core._c.abi.library.cache_info().currsize)"
    )
    assert python(code) == "False 0"


def test_the_first_use_of_a_format_reads_the_table_of_the_library() -> None:
    code = (
        "import kvx_core; loaded = lambda: kvx_core._c.abi.library.cache_info().currsize; "
        "named = kvx_core.DType.of('float16').array_name, loaded(); "
        "print(*named, kvx_core.DType.F16.itemsize, loaded())"
    )
    assert python(code) == "float16 0 2 1"


def test_backend_info() -> None:
    info = kvx_core.backend_info()
    assert info.version == kvx_core.__version__
    assert info.cpu_isa in ("avx512vbmi", "avx512", "avx2", "portable")
    assert info.num_threads >= 1
    assert info.stream_bytes > 0
