"""ObjectStore: a BlobStore in a bucket of an object store: S3, Google Cloud Storage or Azure.

Source: obstore 0.12, obstore.store.from_url, obstore.put, obstore.get
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import Any

from kvx_core.errors import InvalidArgumentError
from kvx_core.stores.blob_store import is_word
from kvx_core.stores.eviction import File
from kvx_core.stores.tiers.remote import First, RemoteStore

SCHEMES = ("s3", "gs", "az")
_MULTIPART_BYTES = 64 << 20  # a larger file is sent in parts
_MOST_NAMES = 1 << 16  # that `names` returns
# In the error for a range of an empty object. Source: RFC 9110, 15.5.17; obstore's MemoryStore
_NO_SUCH_RANGE = ("416 Range Not Satisfiable", "StartTooLarge")
_RETRIES = 3  # of one call, while its deadline lasts
_BACKOFF = timedelta(milliseconds=50)  # before the first of them

_processes = set[int]()  # that have called obstore: its threads are in one of them


class ObjectStore(RemoteStore):
    """Files are objects below a prefix of a bucket.

    A file that must be new is created on the condition that there is none, which S3, Google and
    Azure keep; of a file in parts KVX looks first whether there is one. Credentials, region and
    endpoint come from the environment alone, by the names that the cloud's own tools use.
    """

    def __init__(self, url: str, *, deadline: float = 5.0, client: Any = None) -> None:
        """url:  "s3://bucket/prefix", "gs://bucket/prefix" or "az://account/container/prefix"
        deadline: seconds after which a call has failed
        client:   a store of obstore to use in place of the one that `url` names
        Raises InvalidArgumentError if obstore is not installed, or `url` names no store.
        """
        obstore = _obstore()
        self._module = obstore
        if client is None:
            seconds = timedelta(seconds=deadline)
            plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
            try:
                client = obstore.store.from_url(
                    url,
                    client_options={
                        "timeout": seconds,
                        "connect_timeout": seconds,
                        "allow_http": plain,
                    },
                    retry_config={
                        "max_retries": _RETRIES,
                        "retry_timeout": seconds,
                        "backoff": {"init_backoff": _BACKOFF, "max_backoff": 4 * _BACKOFF},
                    },
                )
            except (obstore.exceptions.BaseError, ValueError) as error:
                raise InvalidArgumentError(
                    f"{url} cannot be used as a store: {error}. Expected a URL such as "
                    "s3://bucket/prefix, and credentials in the environment"
                ) from None
        self._client = client
        self._absent = (obstore.exceptions.NotFoundError, FileNotFoundError)
        self._exists = (obstore.exceptions.AlreadyExistsError, FileExistsError)
        self.failures = (obstore.exceptions.BaseError, ValueError, OSError)
        self.refusals = (
            obstore.exceptions.PermissionDeniedError,
            obstore.exceptions.UnauthenticatedError,
            obstore.exceptions.PreconditionError,
            PermissionError,
            ValueError,
        )
        super().__init__(url.rstrip("/"), deadline)

    @property
    def _calls(self) -> ModuleType:
        """obstore. Raises OSError in a process that was forked off one that has called it: there
        its calls would never end.
        """
        if not _processes:
            _processes.add(os.getpid())
        if os.getpid() not in _processes:
            raise OSError(
                "this process was forked off one that has used an object store. Start it by "
                "spawn or forkserver (VLLM_WORKER_MULTIPROC_METHOD=spawn), or fork it before"
            )
        return self._module

    def _call_put(self, name: str, parts: Sequence[memoryview]) -> bool:
        data = b"".join(parts)
        if len(data) > _MULTIPART_BYTES:
            if self._call_size(name) is not None:
                return False
            self._calls.put(self._client, name, data, use_multipart=True)
            return True
        try:
            self._calls.put(self._client, name, data, mode="create", use_multipart=False)
        except self._exists:
            return False
        return True

    def _call_get(self, name: str, num_bytes: int) -> First | None:
        try:
            found = self._calls.get(self._client, name, options={"range": (0, num_bytes)})
            return First(memoryview(found.bytes()).cast("B"), found.meta["size"])
        except self._absent:
            return None
        except self.failures as error:
            if any(word in str(error) for word in _NO_SUCH_RANGE):  # the object is empty
                return First(memoryview(b""), 0)
            raise

    def _call_size(self, name: str) -> int | None:
        try:
            return int(self._calls.head(self._client, name)["size"])
        except self._absent:
            return None

    def _call_names(self, folder: str) -> list[str]:
        found = self._calls.list_with_delimiter(self._client, folder or None)
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        words = [path.rstrip("/").rpartition("/")[2] for path in paths]
        return [word for word in words if is_word(word)][:_MOST_NAMES]

    def _call_files(self) -> list[File]:
        return [
            (each["last_modified"].timestamp(), each["size"], each["path"])
            for some in self._calls.list(self._client)
            for each in some
        ]

    def _call_delete(self, name: str) -> None:
        with suppress(*self._absent):
            self._calls.delete(self._client, name)


def _obstore() -> ModuleType:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise InvalidArgumentError(
            "a store in an object store needs the package obstore: pip install 'obstore>=0.12'"
        ) from None
    module: ModuleType = obstore
    return module
