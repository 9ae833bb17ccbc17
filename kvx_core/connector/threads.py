"""Threads for work that runs beside an engine's steps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads have all been started, so that `submit` starts none.

    Otherwise a `submit` that cannot start a thread would raise and still leave the work in the
    queue, to run later. Raises RuntimeError if threads cannot be started.
    """
    pool = ThreadPoolExecutor(num_threads, name)
    all_run = threading.Barrier(num_threads + 1)
    try:
        for _ in range(num_threads):
            pool.submit(all_run.wait)
        all_run.wait()
    except BaseException:
        all_run.abort()
        pool.shutdown(cancel_futures=True)
        raise
    return pool
