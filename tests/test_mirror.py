"""The device mirror of tests, tested without a device: its copies are in other host memory."""

from __future__ import annotations

import pytest
import torch

from kvx_core.errors import OutOfRangeError
from kvx_core.types import Memory, ScaleGranularity
from tests import test_affine, test_codecs, test_migrate, test_write_gather
from tests.caches import LAYOUTS, Geometry, assert_same_bytes, random_values
from tests.calls import HOSTGRID, Backend, Mirror


@pytest.fixture
def mirrored() -> Backend:
    return Backend("mirror", Memory.DEVICE, HOSTGRID.library, Mirror("cpu"))


def test_a_call_sees_copies_alone(mirrored: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has returned, the memory of the test is what it was."""
    cache = LAYOUTS["tgi"](Geometry(), torch.bfloat16, seed=1)
    before = cache.clone()
    key, value = random_values((2, 3, 2, 16), torch.bfloat16, seed=2)
    slots = torch.tensor([3, -1, 17])
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "download", lambda self: None)
        mirrored.write(cache.layers[0], key, value, slots)
    assert_same_bytes(cache, before)
    HOSTGRID.write(before.layers[0], key, value, slots)
    mirrored.write(cache.layers[0], key, value, slots)
    assert_same_bytes(cache, before)


def test_copies_are_aligned_alike() -> None:
    mirror = Mirror("cpu")
    for shift in (0, 1, 2, 8, 16, 240, 300):
        tensor = torch.zeros(1000, dtype=torch.uint8)[shift:]
        address = mirror.address(tensor)
        assert address != tensor.data_ptr()
        assert address % 256 == tensor.data_ptr() % 256
        assert mirror.address(tensor[5:]) == address + 5
    assert mirror.address(torch.empty(0)) == 0


def test_calls_in_copies_pass_the_same_tests(mirrored: Backend) -> None:
    """Both pools, tables of every kind, scales, planes, outputs of any strides, what is skipped."""
    for kinds in (("kv_offsets", "slots"), ("ragged", "kv_offsets"), ("dense", "packed64")):
        test_migrate.test_migrate_every_pair_of_ends(mirrored, *kinds)
    for granularity in (ScaleGranularity.PER_TENSOR, ScaleGranularity.PER_TOKEN_HEAD):
        test_codecs.test_every_granularity(mirrored, "nhd", granularity, torch.float16)
    test_affine.test_planes(mirrored)
    test_write_gather.test_gather_into_any_strides(mirrored, "nhd", "strided", True)
    test_write_gather.test_write_with_the_v1_scale_pointers(mirrored)
    test_write_gather.test_a_block_out_of_range(mirrored, torch.int64)
    cache = LAYOUTS["nhd"](Geometry(), torch.bfloat16, seed=1)
    key, value = random_values((2, 1, 2, 16), torch.bfloat16, seed=2)
    with pytest.raises(OutOfRangeError, match="1 times since the last report"):
        mirrored.write(cache.layers[0], key, value, torch.tensor([1 << 40]))
