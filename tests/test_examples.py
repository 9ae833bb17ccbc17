"""The examples that start no engine, run as they are, and what they print.

Most in this process, which saves each of them the import of torch.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parent.parent / "examples"
START_VLLM = {  # and take their time
    "continue_elsewhere",
    "hf_prefill_vllm_decode",
    "share_a_prefix",
    "vllm_to_transformers",
}
IN_DOCS = {"tgi_kv_cache_store"}  # tests/adapters/test_tgi_docs.py runs it
IMPORTED = {"needed"}  # by all others; tests/test_extras.py
# Run by an interpreter of their own, in another folder, as their users run them.
SCRIPTS = {
    "trtllm_pool_bridge",
    "migrate_vllm_to_trtllm",
    "migrate_tgi_to_vllm",
    "reshard_tp4_to_tp8",
}
# What each prints, a regular expression per line.
PRINTED = {
    "deepseek_v4_decode": [
        "250 tokens: blocks 42308 bytes, GQA-8 3072000: 73 x",
        "500 tokens: blocks 85196 bytes, GQA-8 6144000: 72 x",
        "1000 tokens: blocks 170972 bytes, GQA-8 12288000: 72 x",
        "windows and tails: 830488 bytes, however long the sequence is",
    ],
    "generate_packed": [
        "20 tokens each, the same as from transformers' own cache",
        *[
            rf"layer {i}: PackedKVCache\(2 x 30 x 32, float32, room for 267 tokens\)"
            for i in range(3)
        ],
    ],
    "long_context_in_8_bits": [
        f"300 tokens in {3 * 300 * 2 * (2 * 34 + 33)} bytes: 5.1 times smaller than float32",
        r"logits differ by \d+\.\d %",
    ],
    "migrate_tgi_to_vllm": [
        rf"{139 * 4 * 2 * 2 * 128 * 2} bytes migrated; equal: 139 tokens, 284672 values",
        "vLLM's own indexing finds every token",
    ],
    "migrate_vllm_to_trtllm": [
        rf"{139 * 4 * 2 * 2 * 128 * 2} bytes migrated; equal: 139 tokens, 284672 values",
        r"K offsets of sequence 0: \[24, 0, 2147483647, 2147483647\]",
        "TensorRT-LLM's own indexing finds every token",
    ],
    "reshard_tp4_to_tp8": [
        r"4 ranks -> 8: 17\.0 MB in 8 calls, \d+\.\d ms, exact",
        r"8 ranks -> 4: 17\.0 MB in 8 calls, \d+\.\d ms, exact",
    ],
    "save_blocks_tp4_load_tp8": [
        r"3\.1 MB saved by 4 ranks, loaded by 8 and by 4 again in \d+\.\d ms: exact"
    ],
    "torch_caches": [
        f"{21 * 2 * 2 * 64 * 4} bytes migrated",
        "equal: 21 tokens, 5376 values",
    ],
    "trtllm_pool_bridge": [
        "written and gathered   00000038 00000010 00000058 00000020",
        f"in the secondary pool  80000028 80000000 80000018 80000008  {101 * 4 * 2 * 2 * 64 * 2} "
        "bytes",
        "in the primary again   00000040 00000050 00000000 00000048",
    ],
}


@pytest.mark.parametrize("name", PRINTED)
def test_example(
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if name in SCRIPTS:
        done = subprocess.run(
            [sys.executable, EXAMPLES / f"{name}.py"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        require_lines(done.stdout, PRINTED[name])
        return
    monkeypatch.syspath_prepend(EXAMPLES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are too small to share
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    torch.set_num_threads(threads)
    require_lines(capsys.readouterr().out, PRINTED[name])


def require_lines(printed: str, expected: list[str]) -> None:
    lines = printed.splitlines()
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_every_example_is_run() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    assert found == START_VLLM | IN_DOCS | IMPORTED | set(PRINTED)
