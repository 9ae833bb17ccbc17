"""Builds a torch extension that calls libkvx, and writes tokens into a paged cache with it.

    python examples/torch_extension/write_tokens.py

It needs a C++ compiler and ninja. The first run compiles for half a minute; torch keeps the result.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import needed  # noqa: F401  says what to install if a package is missing
import torch
from torch.utils.cpp_extension import load

import kvx_core

library = kvx_core.library_path()
kvx = load(
    "kvx_write",
    str(Path(__file__).with_name("kvx_write.cc")),
    extra_include_paths=[str(kvx_core.include_dir())],
    extra_ldflags=[f"-L{library.parent}", "-lkvx", f"-Wl,-rpath,{library.parent}"],
)

key_cache, value_cache = torch.zeros(2, 8, 16, 2, 64, dtype=torch.bfloat16)  # 8 blocks of 16 tokens
key, value = torch.randn(2, 3, 2, 64).bfloat16()  # of three new tokens
slots = torch.tensor([5 * 16 + 15, 0, -1])  # block 5, block 0; the last token is skipped

kvx.write_tokens(key_cache, value_cache, key, value, slots, 0)
for cache, new in ((key_cache, key), (value_cache, value)):
    assert torch.equal(cache[5, 15], new[0])
    assert torch.equal(cache[0, 0], new[1])
    assert cache.count_nonzero() == new[:2].count_nonzero()
print("written: 2 tokens of 3")

try:
    kvx.write_tokens(key_cache, value_cache, key, value, slots + 128, 0)
except RuntimeError as error:
    print("refused:", str(error).splitlines()[0])
