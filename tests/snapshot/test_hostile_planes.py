"""Files whose planes or packed formats were altered: refused, or restored to the right bytes.

tests/hostile.py makes them.
"""

from __future__ import annotations

import time
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch

from kvx_core import CacheDesc, Snapshot, StoreError, describe
from tests.hostile import hostile_planes, mutated_files
from tests.snapshot.with_planes import Engine, assert_same, copy_by_hand, filled

NUM_TOKENS = 13
MAX_SECONDS = 5  # of the processor, for one file


def is_short(name: str, error: Exception) -> None:
    assert len(str(error)) < 10_000, name


class Packed(Engine):
    """K in units of Q8_0, and planes of every kind."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.latent = filled((self.num_blocks, self.block_size, 2, 34), torch.uint8, self.seed)

    def cache(self) -> CacheDesc:
        return CacheDesc.from_kv(describe(self.latent, "BLOCK_NHD", dtype="Q8_0"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "file"
    captured = Snapshot.capture(
        range(NUM_TOKENS), [Packed(16, 3, 1).section(state_tokens=NUM_TOKENS)]
    )
    assert captured is not None
    captured.save(path)
    return path.read_bytes()


def test_the_same_files_every_time(good: bytes) -> None:
    files = list(hostile_planes(good))
    assert files == list(hostile_planes(good))
    names = sorted(name for name, _ in files)
    assert [n for n, other in pairwise(names) if n == other] == []
    assert len(names) > 150
    assert good not in [data for _, data in files]


def test_no_file_harms_a_cache(good: bytes, tmp_path: Path) -> None:
    """Nothing but StoreError; the cache is as it was, or has the right bytes."""
    path = tmp_path / "file"
    empty, whole = Packed(8, 5, None), Packed(8, 5, None)
    copy_by_hand(Packed(16, 3, 1), whole, 0, NUM_TOKENS, state=True)
    dst = Packed(8, 5, None)
    refused = 0
    for name, data in chain(hostile_planes(good), mutated_files(good, 200)):
        path.write_bytes(data)
        begin = time.process_time()
        try:
            with Snapshot.open(path) as snapshot:
                snapshot.read(snapshot.header.layers).restore(dst.section(), 0, NUM_TOKENS)
        except StoreError as error:
            is_short(name, error)
            assert_same(dst, empty)
            refused += 1
        except Exception as error:
            raise AssertionError(name) from error
        else:
            if snapshot.header.layers == (3,):
                assert_same(dst, whole)
            else:
                assert_same(dst, empty)
            dst = Packed(8, 5, None)
        assert time.process_time() - begin < MAX_SECONDS, name
    assert refused > 300
