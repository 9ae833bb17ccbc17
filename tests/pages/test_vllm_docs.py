"""docs/vllm.md: its table of settings, and the examples that it shows, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvx_adapters.vllm_plugin.settings import Settings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "vllm.md").read_text()


def test_every_setting_is_listed_with_its_default() -> None:
    section = TEXT.partition("## Configuration")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.M))
    assert list(listed) == list(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        if isinstance(field.default, bool):
            assert listed[name] == f"`{str(field.default).lower()}`", name
        elif name == "max_pending_bytes":
            assert listed[name] == f"{field.default >> 30} GiB"
        elif isinstance(field.default, int):
            assert listed[name] == str(field.default), name


@pytest.mark.skipif(
    find_spec("vllm") is None or find_spec("transformers") is None,
    reason="vllm and transformers are not installed",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["share_a_prefix", "continue_elsewhere", "hf_prefill_vllm_decode"])
def test_example(name: str) -> None:
    result = subprocess.run(
        [sys.executable, f"examples/{name}.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    shown = TEXT.partition(f"$ python examples/{name}.py\n")[2].partition("```")[0]
    assert shown
    assert result.stdout.endswith(shown)
