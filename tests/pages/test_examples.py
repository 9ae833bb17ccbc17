"""The examples that start no engine, run as they are, and what they print.

Most in this process, which saves each of them the import of torch.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.documents import Document
from tests.native import run

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
START_VLLM = {  # and take their time
    "continue_elsewhere",
    "hybrid_conversation",
    "hf_prefill_vllm_decode",
    "share_a_prefix",
    "vllm_to_transformers",
}
IN_DOCS = {"tgi_kv_cache_store"}  # tests/adapters/test_tgi_docs.py runs it
IMPORTED = {"needed"}  # by all others; tests/cli/test_extras.py
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
    "edit_a_store": [
        "A store of two tenants:",
        "  2 entries, 30 tokens",
        "  4 entries, 43 tokens",
        r"  a prompt of 19 tokens: \[0, 1, 2\] \.\.\. \[91, 92\]",
        r"  a prompt of 40 tokens: \[0, 1, 2\] \.\.\. \[38, 39\]",
        "16 files verified, 1 bad, 1 deleted",
        "6 files of tenant-7 removed",
        "The other store:",
        "  3 entries, 40 tokens, signed",
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
    "own_engine": [
        "21 tokens in 2 layers are where the description says",
        f"{21 * 2 * 2 * 3 * 40 * 2} bytes migrated",
        r"equal: 21 tokens, 10080 values, the largest error 0\.00\d+, its mean square \S+e-06",
        "19 of 22 tokens of another prompt loaded from the store",
        "equal: 19 tokens, 9120 values",
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


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("vllm") is None or find_spec("mlx_lm") is None,
    reason="vllm and mlx-lm are not installed",
)
def test_a_hybrid_conversation() -> None:
    """It prints what docs/live_migration.md shows; the page's snippet is a part of it."""
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("keys in bfloat16 are AMX tiles there, which live_hybrid_span refuses")
    page = Document("live_migration.md")
    assert page.snippets()[1] in (EXAMPLES / "hybrid_conversation.py").read_text()
    (shown,) = (text for text in page.snippets("text") if "zero states" in text)
    printed = run(
        [sys.executable, EXAMPLES / "hybrid_conversation.py"],
        env={"PYTHONPATH": str(EXAMPLES.parent)},
    )
    for line in shown.splitlines():
        kind = "zero states   '"  # which differ, as the example checks; rounding decides how
        assert f"\n{kind if line.startswith(kind) else line}" in printed, printed


def require_lines(printed: str, expected: list[str]) -> None:
    lines = printed.splitlines()
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_every_example_is_run() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    assert found == START_VLLM | IN_DOCS | IMPORTED | set(PRINTED)


def test_the_index_has_every_example() -> None:
    """Each once: what it shows, what it needs, how long it takes; its own first line agrees."""
    text = (EXAMPLES / "README.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| [")]
    listed = [re.match(r"\| \[(\S+)\]\((\S+)\)", row[0]) for row in rows]
    assert all(found and found[1] == found[2] for found in listed)
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    programs -= {f"{name}.py" for name in IMPORTED}
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()} - {"__pycache__"}
    assert sorted(found[1] for found in listed if found) == sorted(programs | folders)
    for row in rows:
        assert len(row) == 4, row
        assert row[2], row
        assert re.fullmatch(r"(?:\d+ s|a minute) \|", row[3]), row
