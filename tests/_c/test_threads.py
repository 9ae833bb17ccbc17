"""Threads that calls on HOST memory use: libkvx's own, or the host's."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import kvx_core
from kvx_core import (
    CacheDesc,
    InvalidArgumentError,
    Layout,
    describe,
    write_kv,
)
from kvx_core._c import abi

NUM_TOKENS, HEADS, DIM, BLOCK = 203, 3, 40, 16

_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, _WORK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    yield
    kvx_core.set_num_threads(0)
    _lend(None)


def _lend(threads: object) -> None:
    address = None if threads is None else ctypes.cast(threads, ctypes.c_void_p).value
    abi.check(abi.library().kvx_set_host_threads(address, 2))


class HostThreads:
    """`size` threads of a host, which counts how often they are asked."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, 0
        self.c = _PARALLEL(self._run)

    def _run(self, work: Callable[[int], None], data: int, num_threads: int, flags: int) -> None:
        assert (num_threads, flags) == (0, 0)
        self.calls += 1
        others = [threading.Thread(target=work, args=(data,)) for _ in range(self.size - 1)]
        for other in others:
            other.start()
        work(data)
        for other in others:
            other.join()


class Case:
    """Tokens for a cache [block, head, dim, token], where each of their numbers has a cache line of
    its own; `expected` is torch's."""

    def __init__(self, num_tokens: int = NUM_TOKENS) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        self.key, self.value = torch.randn(2, num_tokens, HEADS, DIM, generator=generator)
        self.slots = torch.randperm(20 * BLOCK, generator=generator)[:num_tokens]
        self.cache = torch.full((2, 20, HEADS, DIM, BLOCK), -1.0)
        self.expected = self.cache.clone()
        places = self.slots // BLOCK, slice(None), slice(None), self.slots % BLOCK
        self.expected[0][places], self.expected[1][places] = self.key, self.value

    def write(self) -> bool:
        k, v = (describe(tensor.transpose(2, 3), Layout.BLOCK_HND) for tensor in self.cache)
        write_kv(CacheDesc.from_kv(k, v), self.key, self.value, self.slots)
        return np.array_equal(self.cache.numpy(), self.expected.numpy())


def test_set_num_threads() -> None:
    default = kvx_core.backend_info().num_threads
    kvx_core.set_num_threads(1)
    assert kvx_core.backend_info().num_threads == 1
    kvx_core.set_num_threads(0)
    assert kvx_core.backend_info().num_threads == default


def test_set_num_threads_refuses_what_is_no_count() -> None:
    with pytest.raises(InvalidArgumentError, match="num_threads is -1, expected 0 to 4294967295"):
        kvx_core.set_num_threads(-1)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_number_of_host_threads_does_the_work(size: int) -> None:
    threads = HostThreads(size)
    _lend(threads.c)
    assert Case().write()
    assert threads.calls == 1


def test_host_threads_are_not_asked_for_a_token_or_for_one_thread() -> None:
    threads = HostThreads(2)
    _lend(threads.c)
    assert Case(num_tokens=1).write()
    kvx_core.set_num_threads(1)
    assert Case().write()
    assert threads.calls == 0


def test_host_threads_help_the_thread_that_set_them() -> None:
    threads = HostThreads(2)
    _lend(threads.c)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(Case().write).result()
    assert threads.calls == 0
    _lend(None)
    assert Case().write()
    assert threads.calls == 0


def test_a_forked_child_does_without_host_threads() -> None:
    threads = HostThreads(2)
    _lend(threads.c)
    case = Case()
    child = os.fork()
    if child == 0:  # without torch, whose own threads are not there either
        os._exit(0 if case.write() and threads.calls == 0 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_use_openmp() -> None:
    assert kvx_core.use_openmp()  # torch has brought it
    torch.set_num_threads(2)
    for num_tokens in (1, 7, NUM_TOKENS):
        assert Case(num_tokens).write()
    assert not kvx_core.use_openmp(False)


class Teams:
    """Host threads that break the promise to run on the calling thread."""

    @staticmethod
    def nobody(work: Callable[[int], None], data: int, num_threads: int, flags: int) -> None:
        pass

    @staticmethod
    def others_alone(work: Callable[[int], None], data: int, num_threads: int, flags: int) -> None:
        other = threading.Thread(target=work, args=(data,))
        other.start()
        other.join()


@pytest.mark.parametrize("team", [Teams.nobody, Teams.others_alone], ids=lambda t: t.__name__)
def test_the_caller_does_what_host_threads_leave(team: Callable[..., None]) -> None:
    lent = _PARALLEL(team)
    _lend(lent)
    assert Case().write()
