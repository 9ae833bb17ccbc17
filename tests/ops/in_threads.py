"""Runs calls in several threads at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def run_in_threads(work: Callable[[int], None], num_threads: int) -> None:
    """Runs work(i) in threads that start together and take turns often. Raises the first error."""
    barrier = threading.Barrier(num_threads)
    errors: list[BaseException] = []

    def body(i: int) -> None:
        barrier.wait()
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(num_threads)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]
