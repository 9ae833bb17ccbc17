"""ValkeyStore: a BlobStore in a Valkey or Redis server.

Source: valkey-py 6.2, valkey.Valkey; https://valkey.io/commands: SET, GETRANGE, STRLEN, SSCAN
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kvx_core.errors import InvalidArgumentError
from kvx_core.stores.blob_store import is_word
from kvx_core.stores.eviction import File
from kvx_core.stores.tiers.remote import THREADS, First, RemoteStore

SCHEMES = ("valkey", "valkeys", "redis", "rediss")
_ENCRYPTED = ("valkeys", "rediss")
_PORT = 6379
_URL = re.compile(
    r"(?P<scheme>[a-z]+)://(?P<host>[^/:?#\[\]]+|\[[0-9a-fA-F:]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"/(?P<prefix>[^/?#][^?#]*?)/*"
)
_MOST_BYTES = 512 << 20  # of a value
_MOST_NAMES = 1 << 16  # that `names` returns
_SCANNED = 512  # keys that one call lists
_USER, _PASSWORD = "VALKEY_USERNAME", "VALKEY_PASSWORD"


class ValkeyStore(RemoteStore):
    """Files are values below a prefix. The server's own policy decides what stays: give it a
    `maxmemory`, and `maxmemory-policy allkeys-lru`.

    Beside each folder's files stands a set of its names, so that no folder is searched for. User
    and password come from VALKEY_USERNAME and VALKEY_PASSWORD alone.
    """

    def __init__(self, url: str, *, deadline: float = 5.0) -> None:
        """url: "valkey://host:6379/prefix"; "valkeys://" encrypts the connection. "redis://" and
                "rediss://" are the same
        deadline: seconds after which a call has failed
        Raises InvalidArgumentError if neither valkey nor redis is installed, or for another url.
        """
        name = _package()
        package = import_module(name)
        backoff, retry = import_module(f"{name}.backoff"), import_module(f"{name}.retry")
        host, port, self._prefix = _parsed(url)
        self._client: Any = package.Redis(
            host=host,
            port=port,
            username=os.environ.get(_USER),
            password=os.environ.get(_PASSWORD),
            ssl=url.partition("://")[0] in _ENCRYPTED,
            socket_timeout=deadline / 2,
            socket_connect_timeout=deadline / 2,
            retry=retry.Retry(backoff.NoBackoff(), 1),  # the server may have closed a connection
            max_connections=2 * THREADS,
        )
        failure = getattr(package, "ValkeyError", None) or package.RedisError
        self.failures = (failure, OSError, ValueError)
        # No right, a server that only reads, or one that is full and drops nothing.
        named = ("NoPermissionError", "ReadOnlyError", "OutOfMemoryError")
        self.refusals = (ValueError, *(getattr(package.exceptions, name) for name in named))
        super().__init__(url.rstrip("/"), deadline)

    def _call_put(self, name: str, parts: Sequence[memoryview]) -> bool:
        data = b"".join(parts)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has {len(data)} bytes, expected at most {_MOST_BYTES}")
        calls = self._client.pipeline(transaction=False)
        calls.set(self._key(name), data, nx=True)
        folder, _, word = name.rpartition("/")
        calls.sadd(self._names(folder), word)
        while folder:
            folder, _, word = folder.rpartition("/")
            calls.sadd(self._names(folder), word)
        return bool(calls.execute()[0])

    def _call_get(self, name: str, num_bytes: int) -> First | None:
        calls = self._client.pipeline(transaction=False)
        calls.getrange(self._key(name), 0, num_bytes - 1)
        calls.strlen(self._key(name))
        calls.exists(self._key(name))
        data, size, is_there = calls.execute()
        return First(memoryview(data), size) if is_there else None

    def _call_size(self, name: str) -> int | None:
        calls = self._client.pipeline(transaction=False)
        calls.strlen(self._key(name))
        calls.exists(self._key(name))
        size, is_there = calls.execute()
        return size if is_there else None

    def _call_names(self, folder: str) -> list[str]:
        found = list[str]()
        for word in self._client.sscan_iter(self._names(folder), count=_SCANNED):
            text = word.decode("ascii", "replace")
            if is_word(text):
                found.append(text)
            if len(found) == _MOST_NAMES:
                break
        return found

    def _call_files(self) -> list[File]:
        found, now = list[File](), time.time()
        for names in self._all_names():
            calls = self._client.pipeline(transaction=False)
            for name in names:
                calls.strlen(self._key(name))
                calls.object("idletime", self._key(name))
            # The time since a file was used is not known under some policies of the server.
            answers = calls.execute(raise_on_error=False)
            for name, size, idle in zip(names, answers[::2], answers[1::2], strict=True):
                if isinstance(size, int):
                    used = now - idle if isinstance(idle, int) else now
                    found.append((used, size, name))
        return found

    def _call_delete(self, name: str) -> None:
        self._client.delete(self._key(name))
        folder, _, word = name.rpartition("/")
        while True:
            calls = self._client.pipeline(transaction=False)
            calls.srem(self._names(folder), word)
            calls.exists(self._names(folder))
            if calls.execute()[1] or not folder:
                return
            folder, _, word = folder.rpartition("/")

    def _all_names(self) -> Iterator[list[str]]:
        """Yields the names of all files, some at a time."""
        begin = self._key("").encode()
        pattern = b"".join(b"\\" + bytes([byte]) for byte in begin) + b"*"
        some = list[str]()
        for key in self._client.scan_iter(pattern, count=_SCANNED):
            some.append(key[len(begin) :].decode("ascii", "replace"))
            if len(some) == _SCANNED:
                yield some
                some = []
        yield some

    def _key(self, name: str) -> str:
        return f"{self._prefix}:file:{name}"

    def _names(self, folder: str) -> str:
        return f"{self._prefix}:names:{folder}"


def _parsed(url: str) -> tuple[str, int, str]:
    """Returns host, port and prefix. Raises InvalidArgumentError."""
    if "@" in url:
        raise InvalidArgumentError(
            f"the address of {url.rpartition('@')[2]} has a user or a password in it, expected "
            f"neither: they would be in logs. Set {_USER} and {_PASSWORD} in the environment"
        )
    found = _URL.fullmatch(url)
    if found is None or found["scheme"] not in SCHEMES:
        raise InvalidArgumentError(
            f"{url!r} names no place, expected one such as valkey://host:6379/kvx"
        )
    return found["host"].strip("[]"), int(found["port"] or _PORT), found["prefix"]


def _package() -> str:
    """Returns the name of the package of the client. Raises InvalidArgumentError."""
    for name in ("valkey", "redis"):
        if find_spec(name) is not None:
            return name
    raise InvalidArgumentError(
        "a store in Valkey or Redis needs the package valkey or redis: pip install 'valkey>=6'"
    )
