"""The commands and the snippet of docs/vllm.md, run as they stand: two servers that share a store,
and HF's cache in a store that vLLM loads.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import Document
from tests.fakes.vllm import needs_cpu_op
from tests.native import ROOT
from tests.vllm_plugin.conftest import Stock
from tests.vllm_plugin.engine import EngineProcess, connector, same_tokens
from tests.vllm_plugin.models import prompt

PAGE = Document("vllm.md")
SERVERS, CONVERSATION = PAGE.snippets("sh")
(PREFILL,) = PAGE.snippets("python")


# Of every Python: vLLM forks a server's core instead of starting one that imports it anew.
FORKS = """
import multiprocessing
get_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: get_context("fork" if method else None)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@needs_cpu_op
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing")
def test_two_servers_share_a_store(tmp_path: Path) -> None:
    """What they print is what the page shows."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(FORKS)
    text = f"{SERVERS}\n{CONVERSATION}"
    for port in ("8001", "8002"):
        assert port in text
        text = text.replace(port, str(free_port()))
    environment = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with subprocess.Popen(
        ["bash", "-ec", text],
        cwd=tmp_path,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            printed, said = shell.communicate(timeout=900)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    logs = "".join(log.read_text()[-3000:] for log in tmp_path.glob("*.log"))
    assert shell.returncode == 0, f"{said}\n{logs}"
    shown = [text for text in PAGE.snippets("text") if text.startswith('"text"')]
    assert len(shown) == 2
    answers = [line for line in printed.splitlines() if line.startswith(('"', "vllm:"))]
    assert answers == "".join(shown).splitlines()


@needs_cpu_op
def test_hf_fills_a_store(
    llama: Path, engines: EngineProcess, stock: Stock, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kvx_adapters import transformers as hf
    from kvx_core import Directory, Precision, PrefixStore, Section

    ids = prompt(200, seed=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]), past_key_values=cache)
    names = {
        "hf": hf,
        "Directory": Directory,
        "Precision": Precision,
        "PrefixStore": PrefixStore,
        "Section": Section,
        "model": model,
        "directory": llama,
        "cache": cache,
        "prompt_ids": ids,
    }
    assert '"/the/store"' in PREFILL
    PAGE.run(names, PREFILL.replace("/the/store", str(tmp_path)))
    config = connector(tmp_path, "kv_consumer")
    with engines.engine(llama, kv_transfer_config=config) as engine:
        (output,) = engine.generate([ids])
    same_tokens([output], stock(llama, [ids]))
    assert output.num_cached_tokens == len(ids) - 1
