"""borrow: the same memory, seen from torch, numpy and DLPack, and kept alive."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kvx_core import (
    Borrowed,
    DType,
    IncompatibleError,
    InvalidArgumentError,
    Memory,
    ScaleDesc,
    UnsupportedError,
    borrow,
    describe,
)
from kvx_core.caches.kv.tokens import array_of
from kvx_core.desc.tensors import row_major
from tests.desc import dlpack
from tests.desc.dlpack import OldProducer, OnlyDLPack, Producer

TORCH = {
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.F32,
    torch.float8_e4m3fn: DType.F8_E4M3,
    torch.float8_e5m2: DType.F8_E5M2,
    torch.int32: DType.S32,
    torch.int64: DType.S64,
    torch.uint32: DType.U32,
    torch.uint64: DType.U64,
    torch.uint8: DType.U8,
}
NUMPY = {
    "float16": DType.F16,
    "float32": DType.F32,
    "int32": DType.S32,
    "int64": DType.S64,
    "uint32": DType.U32,
    "uint64": DType.U64,
    "uint8": DType.U8,
    ml_dtypes.bfloat16: DType.BF16,
    ml_dtypes.float8_e4m3fn: DType.F8_E4M3,
    ml_dtypes.float8_e5m2: DType.F8_E5M2,
}


@pytest.mark.parametrize(("dtype", "expected"), TORCH.items(), ids=str)
def test_torch(dtype: torch.dtype, expected: DType) -> None:
    tensor = torch.zeros(5, 4, 6, dtype=dtype)[1:, ::2, 1:5]
    found = borrow(tensor)
    assert found.data == tensor.data_ptr()
    assert found.shape == (4, 2, 4)
    assert found.stride == (24, 12, 1)
    assert found.dtype is expected
    assert found.memory is Memory.HOST
    assert found.writable
    assert expected.itemsize == tensor.itemsize


@pytest.mark.parametrize(("dtype", "expected"), NUMPY.items(), ids=str)
def test_numpy(dtype: Any, expected: DType) -> None:
    array = np.zeros((5, 4, 6), dtype)[1:, ::2, 1:5]
    found = borrow(array)
    assert found.data == array.ctypes.data
    assert found.shape == (4, 2, 4)
    assert found.stride == (24, 12, 1)
    assert found.dtype is expected
    assert found.memory is Memory.HOST
    assert found.writable


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_dlpack_of_torch(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, 4, 6, dtype=dtype)[1:, ::2, 1:5]
    assert borrow(OnlyDLPack(tensor)) == borrow(tensor)


def test_dlpack_of_read_only_numpy() -> None:
    array = np.zeros((3, 4), np.float32)
    array.setflags(write=False)
    found = borrow(OnlyDLPack(array))
    assert found == borrow(array)
    assert not found.writable


def test_dlpack_byte_offset_and_implied_strides() -> None:
    found = borrow(Producer(data=4096, shape=(3, 4, 5), byte_offset=64))
    assert found.data == 4160
    assert found.stride == (20, 5, 1)
    assert found.dtype is DType.BF16


def test_dlpack_from_before_1_0() -> None:
    found = borrow(OldProducer(data=4096, shape=(3, 4), strides=(8, 2)))
    assert (found.data, found.shape, found.stride) == (4096, (3, 4), (8, 2))
    assert found.writable


@pytest.mark.parametrize("kind", [Producer, OldProducer])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"ndim": 1 << 20}, "ndim is 1048576, expected 0 to 8"),
        ({"ndim": 9}, "ndim is 9, expected 0 to 8"),
        ({"ndim": -1}, "ndim is -1, expected 0 to 8"),
        ({"ndim": -(2**31)}, "ndim is -2147483648, expected 0 to 8"),
        ({"shape": None}, "shape is NULL, expected 2 extents"),
        ({"extent": -1}, r"shape\[1\] is -1, expected 0 to 2\^62"),
        ({"extent": 2**62 + 1}, r"shape\[1\] is 4611686018427387905, expected 0 to 2\^62"),
        ({"byte_offset": 2**64 - 4096}, "byte_offset is 18446744073709547520, expected one within"),
    ],
)
def test_hostile_dlpack(kind: type[Producer], fields: dict[str, Any], says: str) -> None:
    class Hostile(kind):  # type: ignore[misc,valid-type]
        def _tensor(self) -> Any:
            tensor = super()._tensor()
            self.extents[1] = fields.get("extent", 4)
            for name in fields.keys() - {"extent"}:
                setattr(tensor, name, fields[name])
            return tensor

    hostile = Hostile(data=4096, shape=(3, 4))
    for call in (borrow, lambda t: describe(t, "BLOCK_NHD"), array_of_store):
        with pytest.raises(InvalidArgumentError, match=f"is a DLPack tensor whose {says}"):
            call(hostile)


def array_of_store(tensor: Any) -> Any:
    return array_of("keys", tensor)


def test_a_capsule_that_is_none() -> None:
    class Other(Producer):
        def __dlpack__(self, **options: Any) -> object:
            return self.made

    other = Other(data=4096, shape=(3, 4))
    used = torch.zeros(3).__dlpack__()
    torch.from_dlpack(used)
    for other.made in (None, 3, used):
        with pytest.raises(
            InvalidArgumentError, match=r"__dlpack__\(\) is .* expected a DLPack cap"
        ):
            borrow(other)


@pytest.mark.parametrize(
    ("device_type", "memory"),
    [
        (dlpack.CPU, Memory.HOST),
        (dlpack.CUDA_HOST, Memory.HOST),
        (dlpack.CUDA, Memory.DEVICE),
        (dlpack.ROCM, Memory.DEVICE),
        (dlpack.MANAGED, Memory.UNIFIED),
    ],
)
def test_dlpack_device(device_type: int, memory: Memory) -> None:
    producer = Producer(data=4096, shape=(2,), device_type=device_type)
    assert borrow(producer).memory is memory
    # Producers on a device are asked not to synchronise; the CPU takes no stream.
    assert ("stream" in producer.calls[0]) == (memory is not Memory.HOST)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"dtype": (2, 64)}, UnsupportedError, "type code 2 with 64 bits and 1 lanes"),
        ({"lanes": 4}, UnsupportedError, "type code 4 with 16 bits and 4 lanes"),
        ({"major": 2}, IncompatibleError, "major version 2, expected 1"),
    ],
)
def test_dlpack_refused(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        borrow(Producer(data=4096, shape=(2,), **change))


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (torch.zeros(2, dtype=torch.int16), "tensor.dtype is 'torch.int16', expected one of float"),
        (np.zeros(2), "tensor.dtype is 'float64', expected one of float16"),
        (torch.zeros(2, device="meta"), "tensor.device is meta, expected a device that holds"),
        (torch.eye(3).to_sparse(), "tensor.layout is torch.sparse_coo, expected torch.strided"),
        (np.zeros(2, ">i4"), "tensor.dtype is >i4, expected native byte order"),
        (
            np.zeros(4, [("a", "u1"), ("b", "f4")])["b"],
            r"tensor.strides is \(5,\) bytes, expected multiples of itemsize 4",
        ),
    ],
    ids=["torch dtype", "numpy dtype", "meta", "sparse", "byte order", "unaligned stride"],
)
def test_refused(tensor: Any, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        borrow(tensor)


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"tensor is a list, expected a torch\.Tensor"):
        borrow([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1000),
        lambda: np.zeros(1000, np.float32),
        lambda: OnlyDLPack(torch.zeros(1000)),
    ],
    ids=["torch", "numpy", "dlpack"],
)
def test_the_owner_is_kept_alive(make: Any) -> None:
    tensor = make()
    alive = weakref.ref(tensor)
    found = borrow(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    del found
    gc.collect()
    assert alive() is None


def test_a_dlpack_capsule_is_released_once() -> None:
    """The deleter runs when the description goes, not before, and the storage with it."""
    tensor = torch.zeros(1000)
    storage = weakref.ref(tensor.untyped_storage())
    found = borrow(OnlyDLPack(tensor))
    assert found.owner is not None
    del tensor, found
    gc.collect()
    assert storage() is None


@pytest.mark.parametrize(
    ("shape", "stride", "contiguous"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (4, 1), False),
        ((1, 3), (99, 1), True),
        ((2, 3), (1, 2), False),
        ((0, 3), (7, 7), True),
        ((), (), True),
    ],
)
def test_is_contiguous(shape: Any, stride: Any, contiguous: bool) -> None:
    tensor = torch.zeros(1000).as_strided(shape, stride)
    assert borrow(tensor).is_contiguous is contiguous
    assert tensor.is_contiguous() is contiguous


def test_row_major() -> None:
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major(()) == ()


@pytest.mark.parametrize(
    "name",
    [torch.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn), "float8_e4m3fn", "F8_E4M3"],
)
def test_dtype_of_any_name(name: object) -> None:
    assert DType.of(name) is DType.F8_E4M3
    assert DType.of(DType.F8_E4M3) is DType.F8_E4M3


def test_dtype_of_a_scalar_type() -> None:
    assert DType.of(np.float16) is DType.F16
    assert DType.of("bfloat16") is DType.of("torch.bfloat16") is DType.BF16


def test_dtype_unknown() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        DType.of("fp8")
    assert str(raised.value) == (
        "dtype is 'fp8', expected one of float16, bfloat16, float32, float8_e4m3fn, float8_e5m2, "
        "int32, int64, uint32, uint64, uint8, float8_e4m3fnuz, Q8_0, Q4_0, "
        "U8_ZERO, U8_BIAS, Q4_1, IQ4_NL, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, "
        "F4_E2M1, MXFP4, float8_e8m0fnu, TQ2, TQ3, TQ4, int8 (spec 4.3)"
    )
    with pytest.raises(UnsupportedError, match=r"DType.INVALID has no torch or numpy type"):
        _ = DType.INVALID.array_name


def test_every_description_of_memory_is_of_one_type() -> None:
    """A TensorDesc and a ScaleDesc answer what a Borrowed does, of the same bytes."""
    memory = torch.zeros(7, 6, dtype=torch.float32)
    rows = memory[1:5, 2:5]
    owners = rows, rows.numpy()[::-1], rows[:0]
    ranges = [(rows.data_ptr(), 84), (rows.data_ptr(), 84), (rows[:0].data_ptr(), 0)]
    for owner, (first, num_bytes) in zip(owners, ranges, strict=True):
        found = borrow(owner), describe(owner, "BLOCK_CUSTOM"), ScaleDesc.of(owner, "PER_BLOCK")
        for desc in found:
            assert isinstance(desc, Borrowed)
            assert desc.byte_range == (first, first + num_bytes)
            assert desc.is_contiguous is (0 in owner.shape)
            assert desc.ndim == 2
            desc.require_writable("x")
            desc.require_in_place("x")
            with pytest.raises(InvalidArgumentError, match="x is read-only memory, expected"):
                replace(desc, writable=False).require_writable("x")
        assert len({repr(desc).partition("(")[0] for desc in found}) == 3
    freed = torch.zeros(3, 4)
    found = borrow(freed), describe(freed, "BLOCK_CUSTOM"), ScaleDesc.of(freed, "PER_BLOCK")
    freed.untyped_storage().resize_(0)
    for desc in found:
        with pytest.raises(InvalidArgumentError, match="x describes memory that its tensor no lon"):
            desc.require_in_place("x")


@pytest.mark.parametrize(
    ("field", "wrong", "expected"),
    [
        ("data", -1, "data is -1, expected 0 to 18446744073709551615"),
        ("shape", 3, "shape is 3, expected a tuple of integers"),
        ("stride", (1,), "stride has 1 numbers, expected 2 as shape has"),
        ("dtype", "float7", "dtype is 'float7', expected"),
        ("memory", 1, "memory is 1, expected a kvx_core.Memory: HOST"),
        ("writable", 2, "writable is 2, expected True or False"),
    ],
)
def test_a_description_of_memory_checks_its_fields(field: str, wrong: Any, expected: str) -> None:
    tensor = torch.zeros(2, 3)
    descs = borrow(tensor), describe(tensor, "BLOCK_CUSTOM"), ScaleDesc.of(tensor, "PER_BLOCK")
    for desc in descs:
        with pytest.raises(InvalidArgumentError) as raised:
            replace(desc, **{field: wrong})
        assert str(raised.value).startswith(expected)
