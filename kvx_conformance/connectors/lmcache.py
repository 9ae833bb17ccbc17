"""LMCache in vLLM: its connector, and its server, which keeps what it stores in a directory.

Written for LMCache 0.5.6. It is installed beside vLLM, whose dependencies it must not change:

    pip install -r benchmarks/lmcache-requirements.txt && pip install --no-deps lmcache==0.5.6
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kvx_conformance.case import NotApplicable
from kvx_conformance.connectors.vllm import VllmConnector
from kvx_conformance.served import die_with_parent

_ENVIRONMENT = {
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
}
_START_SECONDS = 60.0


class Connector(VllmConnector):
    """Each engine has a server of its own: what it finds of others comes from the directory."""

    unchanged_seconds = 1.5  # the server writes when it has time
    environment = _ENVIRONMENT

    @contextmanager
    def serve(self, store: Path, work: Path) -> Iterator[dict[str, Any]]:
        if find_spec("lmcache") is None:
            raise NotApplicable("LMCache is not installed: pip install --no-deps lmcache==0.5.6")
        importlib.import_module("llvmlite.binding.ffi")  # LMCache does, after vLLM has looked
        port = free_port()
        with server(store, work / "lmcache.log", port):
            yield {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://localhost",
                    "lmcache.mp.port": port,
                },
            }


@contextmanager
def server(store: Path, log: Path, port: int, memory_gb: int = 1) -> Iterator[None]:
    """LMCache's server on the loopback, with its files in `store`."""
    adapter = {"type": "fs_native", "base_path": str(store)}
    arguments = [
        *("server", "--port", str(port)),
        *("--http-port", str(free_port()), "--l1-size-gb", str(memory_gb)),
        *("--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "engine_driven", "--disable-observability"),
        *("--l2-adapter", json.dumps(adapter)),
    ]
    # Importing it takes ten seconds: one process does, from which servers are forked.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lmcache.cli.main", "lmcache.v1.multiprocess.http_server"])
    process = context.Process(target=_run, args=(arguments, log))
    process.start()
    try:
        _wait_for(port, process, log)
        yield
    finally:
        process.terminate()
        process.join(30)
        process.kill()
        process.join()


def _run(arguments: list[str], log: Path) -> None:
    die_with_parent()
    with log.open("a") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    importlib.import_module("lmcache.cli.main").main(arguments)


def _wait_for(port: int, process: BaseProcess, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if not process.is_alive():
            raise RuntimeError(f"LMCache's server has ended: {log.read_text()[-2000:]}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"LMCache's server did not answer within {_START_SECONDS:g} seconds")


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
