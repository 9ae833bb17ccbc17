"""The servers and the proxy of these tests do what they say."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import obstore
import pytest
import valkey
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import from_url

from tests.remote.servers import (
    FaultyProxy,
    RedisServer,
    S3Server,
    redis_server,
    s3_server,
)

DATA = os.urandom(1_000_003)
KEY = "a folder/key"
SECONDS = 0.3  # of delays and timeouts here
AMPLE_SECONDS = 30  # for what takes milliseconds, on a busy machine


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def s3_proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    yield from proxy_of(s3.port)


@pytest.fixture
def redis_proxy(redis: RedisServer) -> Iterator[FaultyProxy]:
    yield from proxy_of(redis.port)


def proxy_of(port: int) -> Iterator[FaultyProxy]:
    """A proxy that must leave no thread."""
    before = set(threading.enumerate())
    with FaultyProxy(port) as proxy:
        yield proxy
    assert set(threading.enumerate()) <= before


@pytest.fixture
def store(s3: S3Server, s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An obstore client behind the proxy, by the environment, and an object."""
    for name, value in (s3.environment | {"AWS_ENDPOINT": s3_proxy.url}).items():
        monkeypatch.setenv(name, value)
    found = store_in(s3.bucket, AMPLE_SECONDS)
    obstore.put(found, KEY, DATA)
    return found


def store_in(bucket: str, seconds: float) -> Any:
    timeout = timedelta(seconds=seconds)
    return from_url(
        f"s3://{bucket}",
        # With client_options, obstore 0.12 does not read AWS_ALLOW_HTTP.
        client_options={"timeout": timeout, "connect_timeout": timeout, "allow_http": True},
        retry_config={"max_retries": 0},
    )


@pytest.fixture
def client(redis_proxy: FaultyProxy) -> Iterator[valkey.Valkey]:
    with valkey.Valkey(port=redis_proxy.port, socket_timeout=AMPLE_SECONDS) as found:
        found.set(KEY, DATA)
        yield found


def read(store: Any) -> bytes:
    return bytes(obstore.get(store, KEY).bytes())


def signed(store: Any, method: Literal["GET", "PUT"]) -> str:
    """An address with which a client without credentials may reach the object."""
    return obstore.sign(store, method, KEY, timedelta(minutes=5))


def test_objects(s3: S3Server, store: Any) -> None:
    assert read(store) == DATA
    assert read(from_url(f"s3://{s3.bucket}")) == DATA  # the environment alone is enough
    assert bytes(obstore.get_range(store, KEY, start=5, length=9)) == DATA[5:14]
    assert obstore.head(store, KEY)["size"] == len(DATA)
    assert [each["path"] for some in obstore.list(store, "a folder") for each in some] == [KEY]
    obstore.delete(store, KEY)
    with pytest.raises(FileNotFoundError):
        obstore.head(store, KEY)


def test_if_none_match(store: Any) -> None:
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, KEY, b"other", mode="create")
    assert read(store) == DATA
    obstore.put(store, "a folder/new", b"", mode="create")
    obstore.delete(store, "a folder/new")
    request = Request(signed(store, "PUT"), b"", {"If-None-Match": "*"}, method="PUT")
    with pytest.raises(HTTPError, match="412"):
        urlopen(request, timeout=AMPLE_SECONDS)
    assert read(store) == DATA


def test_a_killed_s3_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = store_in(server.bucket, AMPLE_SECONDS)
        obstore.put(store, KEY, b"x")
        server.kill()
        server.kill()
        with pytest.raises(GenericError):
            obstore.head(store, KEY)


def test_redis(client: valkey.Valkey) -> None:
    assert client.get(KEY) == DATA
    assert client.getrange(KEY, 5, 13) == DATA[5:14]
    assert client.set(KEY, b"other", nx=True) is None
    assert client.strlen(KEY) == len(DATA)
    assert client.delete(KEY) == 1
    assert client.get(KEY) is None
    assert client.config_get("save")["save"] == ""
    assert client.config_get("appendonly")["appendonly"] == "no"


def test_a_killed_redis_server() -> None:
    with redis_server() as server, valkey.from_url(server.url) as client:
        assert client.ping()
        server.kill()
        server.kill()
        with pytest.raises(valkey.ConnectionError):
            client.ping()


def test_a_server_that_is_dead_behind_a_proxy() -> None:
    with redis_server() as server:
        server.kill()
    for proxy in proxy_of(server.port):
        assert is_closed_at_once(proxy.port)


def test_delay_seconds(s3: S3Server, store: Any, s3_proxy: FaultyProxy) -> None:
    s3_proxy.delay_seconds = SECONDS
    begun = time.monotonic()
    assert read(store) == DATA
    # Once an answer: it comes in 15 parts at least.
    assert SECONDS <= time.monotonic() - begun < 12 * SECONDS
    s3_proxy.delay_seconds = AMPLE_SECONDS
    with pytest.raises(GenericError):
        read(store_in(s3.bucket, SECONDS))


def test_bytes_per_second(client: valkey.Valkey, redis_proxy: FaultyProxy) -> None:
    redis_proxy.bytes_per_second = int(len(DATA) / SECONDS)
    for call in (lambda: client.set(KEY, DATA), lambda: client.get(KEY)):
        begun = time.monotonic()
        assert call() in (True, DATA)
        assert time.monotonic() - begun >= 0.9 * SECONDS


def test_drop(client: valkey.Valkey, redis_proxy: FaultyProxy) -> None:
    with socket.create_connection(("127.0.0.1", redis_proxy.port), AMPLE_SECONDS) as is_open:
        is_open.sendall(b"PING\r\n")
        assert is_open.recv(9) == b"+PONG\r\n"
        redis_proxy.drop = True
        assert is_open.recv(9) == b""
    assert is_closed_at_once(redis_proxy.port)
    with pytest.raises(valkey.ConnectionError):
        client.get(KEY)
    redis_proxy.drop = False
    assert client.get(KEY) == DATA


def test_freeze(s3: S3Server, store: Any, s3_proxy: FaultyProxy) -> None:
    s3_proxy.freeze = True
    begun = time.monotonic()
    with pytest.raises(GenericError):
        read(store_in(s3.bucket, SECONDS))
    assert time.monotonic() - begun >= SECONDS
    with socket.create_connection(("127.0.0.1", s3_proxy.port)) as client:
        client.settimeout(SECONDS)
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with pytest.raises(TimeoutError):
            client.recv(1)
        s3_proxy.freeze = False
        client.settimeout(AMPLE_SECONDS)
        assert client.recv(8) == b"HTTP/1.1"


def test_refuse(client: valkey.Valkey, redis_proxy: FaultyProxy) -> None:
    for _ in range(2):
        redis_proxy.refuse = True
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", redis_proxy.port))
        with pytest.raises(valkey.ConnectionError):
            client.get(KEY)
        redis_proxy.refuse = False
        assert client.get(KEY) == DATA


@pytest.mark.parametrize("every", [1, 1000, 65_536, len(DATA)])
def test_flip_every(every: int, store: Any, s3_proxy: FaultyProxy) -> None:
    s3_proxy.flip_every = every
    for _ in range(2):  # each answer is counted by itself
        found = read(store)  # headers are whole, or this fails
        assert len(found) == len(DATA)
        flips = [i for i in range(len(DATA)) if found[i] != DATA[i]]
        assert flips == list(range(every - 1, len(DATA), every))
    s3_proxy.flip_every = len(DATA) + 1
    assert read(store) == DATA


def test_flip_every_without_http(client: valkey.Valkey, redis_proxy: FaultyProxy) -> None:
    redis_proxy.flip_every = 1000
    found = client.get(KEY)
    assert isinstance(found, bytes)
    header = len(f"${len(DATA)}\r\n")
    flips = [i for i in range(len(DATA)) if found[i] != DATA[i]]
    assert flips == list(range(999 - header, len(DATA), 1000))


def test_cut_after(store: Any, s3_proxy: FaultyProxy) -> None:
    s3_proxy.cut_after = 500_000
    with socket.create_connection(("127.0.0.1", s3_proxy.port), AMPLE_SECONDS) as client:
        path = signed(store, "GET").removeprefix(s3_proxy.url)
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        with client.makefile("rb") as answer:
            assert len(answer.read()) == 500_000
    with pytest.raises(GenericError):
        read(store)
    assert obstore.head(store, KEY)["size"] == len(DATA)  # shorter answers pass
    s3_proxy.cut_after = None
    assert read(store) == DATA


def test_status_503(store: Any, s3_proxy: FaultyProxy) -> None:
    s3_proxy.status_503 = 3
    with pytest.raises(GenericError, match="503"):
        read(store)
    for _ in range(2):
        with pytest.raises(GenericError, match="503"):
            obstore.put(store, KEY, b"other")
    assert s3_proxy.status_503 == 0
    assert read(store) == DATA  # the others did not reach the server


@pytest.mark.parametrize("fault", ["none", "delay_seconds", "bytes_per_second", "freeze", "refuse"])
def test_a_proxy_that_is_closed_meanwhile(fault: str, redis: RedisServer) -> None:
    """No thread waits on, and clients see the end."""
    for proxy in proxy_of(redis.port):
        with socket.create_connection(("127.0.0.1", proxy.port), AMPLE_SECONDS) as client:
            client.sendall(b"PING\r\n")
            assert client.recv(7) == b"+PONG\r\n"
            if fault != "none":
                setattr(proxy, fault, AMPLE_SECONDS if fault == "delay_seconds" else 1)
            if fault in ("delay_seconds", "bytes_per_second", "freeze"):
                client.sendall(b"PING\r\n")
                time.sleep(0.05)
            proxy.close()
            proxy.close()
            with suppress(ConnectionResetError):
                assert len(client.recv(9)) <= 1


def is_closed_at_once(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), AMPLE_SECONDS) as client:
        try:
            return client.recv(1) == b""
        except ConnectionResetError:
            return True
