"""Bound calls: calls of libkvx that read their arguments in C. Made once, called many times.

A bound call takes less than a microsecond. If it cannot read an argument in C, it does nothing and
returns minus the sum of what Python must do: MOVED if the storage of a tensor that it is bound to
has been resized or replaced; KEY, VALUE, INDICES (slots or a table) and LENS for what C cannot
read; SIZES for sizes that are no counts. The caller describes these and calls again.

C reads torch tensors and, on the host, numpy arrays, other buffers of integers, and lists and
tuples of int (csrc/python/lent.h). It holds a buffer until the call is over. It reads tensors
through the DLPack exchange API, which torch has since 2.10; older releases need the package
torch-c-dlpack-ext, and without it Python describes every tensor. DLPack does not report torch's
negative bit and the size of the storage: C functions of torch read them from the at::Tensor in the
Python object.
Source: https://dmlc.github.io/dlpack/latest/python_spec.html; torch 2.13
csrc/autograd/python_variable.h, csrc/inductor/aoti_torch/c/shim.h;
https://docs.python.org/3/c-api/buffer.html
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import (
    POINTER,
    byref,
    c_bool,
    c_int,
    c_int64,
    c_ssize_t,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
)
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kvx_core._c import abi
from kvx_core._c.dlpack import Exported
from kvx_core.types import Memory

MOVED, KEY, VALUE, INDICES, LENS, SIZES = 1, 2, 4, 8, 16, 32  # Left of csrc/python/bound.cc
FAILED = 8  # a plan's run returns minus (a status << FAILED)
_EXCHANGE_API = "__dlpack_c_exchange_api__"
_ATTRIBUTES = "c_bytes", "memory", "owner"
_WORD = ctypes.sizeof(c_void_p)
_IS_NEG = "_ZN2at6native6is_negERKNS_6TensorE"  # bool at::native::is_neg(const at::Tensor &)

Call = Callable[..., int]  # tensors -> kvx_status_t, or minus what was left


class _TensorType(ctypes.Structure):
    """TensorType of csrc/python/tensors.h."""

    _fields_ = (
        ("type", py_object),
        ("to_dlpack", c_void_p),
        ("type_offset", c_ssize_t),
        ("handle_offset", c_ssize_t),
        ("is_neg", c_void_p),
        ("data_ptr", c_void_p),
        ("storage_bytes", c_void_p),
        ("storage_offset", c_void_p),
    )


class _HeldTensor(ctypes.Structure):
    """HeldTensor of csrc/python/tensors.h."""

    _fields_ = (("tensor", py_object), ("data", c_void_p), ("storage_bytes", c_int64))


class _Held(ctypes.Structure):
    """Held of csrc/python/tensors.h."""

    _fields_ = (("tensors", POINTER(_HeldTensor)), ("num_tensors", c_ssize_t))


class _Descriptors(ctypes.Structure):
    """Descriptors of csrc/python/described.h."""

    _fields_ = (
        ("types", py_object * 3),
        ("names", py_object * 3),
        ("array_type", py_object),
    )


class _PlanEnd(ctypes.Structure):
    """PlanEnd of csrc/python/bound.cc."""

    _fields_ = (("invalid_slot", c_int64), ("table_flags", c_uint32))


class _Binding(ctypes.Structure):
    """Binding of csrc/python/bound.cc."""

    _fields_ = (
        ("type", _TensorType),
        ("held", _Held * 2),
        ("memory", c_int),
        ("index_memory", c_int),
        ("owner", c_int),
        ("asks_python", c_int),
        ("descriptors", _Descriptors),
        ("stream", c_void_p),
        ("ask_stream", py_object),
        ("kept", py_object),
    )


class Held:
    """Keeps torch tensors, and the memory and storage that they have now.

    exported: what was given by DLPack, which only Python can ask whether it is in place
    """

    __slots__ = ("are_in_place", "array", "exported", "tensors", "type")

    def __init__(self, owners: Sequence[Any]) -> None:
        owners = list({id(owner): owner for owner in owners}.values())
        self.exported = exported = [one for one in owners if isinstance(one, Exported)]
        tensors = [one for one in owners if not isinstance(one, Exported)]
        self.tensors = tensors
        self.type = _torch_type()
        self.array = (_HeldTensor * len(tensors))()
        for held, tensor in zip(self.array, tensors, strict=True):
            held.tensor, held.data = tensor, tensor.data_ptr()
            held.storage_bytes = tensor.untyped_storage().nbytes()
        of_torch: Callable[[], bool] = _in_place(self.type, self.array)
        self.are_in_place: Callable[[], bool] = of_torch
        if exported:
            self.are_in_place = lambda: of_torch() and all(one.is_in_place() for one in exported)

    def is_current(self) -> bool:
        """False if memory has moved, or torch was imported later: calls made now read its tensors
        in C."""
        return self.are_in_place() and (self.type is not None or _torch_type() is None)

    @property
    def owners(self) -> list[Any]:
        """All that it keeps."""
        return [*self.tensors, *self.exported]

    def to_c(self) -> _Held:
        """For a call that reads tensors in C; empty where nothing does: Python looks then."""
        return _Held(self.array, len(self.array) if self.type else 0)


@dataclass(frozen=True, slots=True)
class Binding:
    """What a bound call keeps, besides its C structs."""

    held: tuple[Held, ...]  # one or two: the torch tensors that the structs describe
    memory: Memory  # of keys and values
    index_memory: Memory  # where slots, tables and lengths are read
    stream: abi.Stream = None
    reads_tensors: bool = True  # False: torch's are left, since none tells the stream
    owner: int = -1  # the CUDA device of all tensors in `held`, as torch says; -1: not known
    kept: Any = None  # whatever else the call needs alive
    # BlockTable, SlotMapping and SeqLens: C reads their attributes `c_bytes`, `memory` and `owner`.
    descriptors: tuple[type, type, type] = (type(None),) * 3


def write(
    binding: Binding,
    cache: abi.kvx_cache_desc_t,
    like: abi.kvx_write_desc_t,
    options: abi.kvx_write_options_t,
) -> Call:
    """Binds kvx_write_kv_ext: a call of (key, value or None, slots), the rest as in `like`.

    The call keeps the torch tensors of `binding`; the caller keeps other memory. Further arguments,
    all optional: a stream, then key, value and slots as addresses of C structs, or None for what C
    is to read.
    """
    return _bind("write_kv_ext", binding, cache, like, options)


def write_layers(
    binding: Binding,
    caches: Sequence[abi.kvx_cache_desc_t],
    likes: Sequence[abi.kvx_write_desc_t],
    options: abi.kvx_write_options_t,
) -> Call:
    """Binds kvx_write_layers: a call of (slots, the key of each layer, the value or None of each),
    the rest as in `likes`.

    Keeps and takes the same as `write`.
    """
    layers = len(caches)
    pointers = abi.pointer_array(caches, abi.kvx_cache_desc_t)
    array = (abi.kvx_write_desc_t * layers)(*likes)
    return _bind("write_layers", binding, pointers, array, c_uint32(layers), options, to="layers")


def gather(
    binding: Binding,
    cache: abi.kvx_cache_desc_t,
    like: abi.kvx_gather_desc_t,
    options: abi.kvx_gather_options_t,
) -> Call:
    """Binds kvx_gather_kv_ext: a call of (key, value or None, block_table, seq_lens), the rest as
    in `like`.

    Keeps and takes the same as `write`; the last argument is max_seq_len or None.
    """
    return _bind("gather_kv_ext", binding, cache, like, options)


def run_plan(
    binding: Binding,
    plan: c_void_p,
    token_bytes: int,
    ends: Sequence[tuple[int, int]],
    *,
    counts: bool,
) -> Call:
    """Binds kvx_plan_run: a call of (seq_lens, then block_table, slots and starts of each end,
    stream), each a descriptor, what one is made of, or None. It returns the tokens of all rows, 0
    if their lengths are on a device; or minus (a status << FAILED).

    Further arguments: the same seven as addresses of C structs, or None, and max_seq_len.
    token_bytes: bytes moved per token; 0: the call always releases the GIL
    ends:        invalid_slot and flags, of slots and of a table that are numbers
    counts:      whether lengths on a device are left to Python
    """
    structs = (_PlanEnd(*end) for end in ends)
    return _bind("plan_run", binding, plan, c_uint64(token_bytes), *structs, c_int(counts))


def _bind(name: str, binding: Binding, *args: Any, to: str | None = None) -> Call:
    """Binds kvx_`name` with kvx_python_`to`, by default the first word of `name`."""
    struct = _struct(binding, args)
    function = ctypes.cast(getattr(abi.library(), f"kvx_{name}"), c_void_p)
    bind = getattr(library(), f"kvx_python_{to or name.partition('_')[0]}")
    by_reference = (byref(arg) if isinstance(arg, ctypes.Structure) else arg for arg in args)
    call: Call = bind(byref(struct), function, *by_reference)
    exported = [one for held in binding.held for one in held.exported]
    if not exported:
        return call

    def asks_first(*given: Any) -> int:
        return call(*given) if all(one.is_in_place() for one in exported) else -MOVED

    return asks_first


def _struct(binding: Binding, args: Any) -> _Binding:
    """A binding for C, which keeps it and `args`."""
    type_ = _torch_type() if binding.reads_tensors else None
    stream = binding.stream
    fixed, ask = (None, stream) if callable(stream) else (stream, None)
    kept = type_, binding, args  # _ATTRIBUTES live as long as this module
    held = (_Held * 2)(*(held.to_c() for held in binding.held if type_))
    return _Binding(
        type_ or _TensorType(type_offset=_type_offset()),
        held,
        binding.memory,
        binding.index_memory,
        binding.owner,
        not type_ and any(held.tensors for held in binding.held),
        _Descriptors(binding.descriptors, _ATTRIBUTES, np.ndarray),
        fixed,
        ask,
        kept,
    )


def append(keys: Any, values: Any) -> Callable[..., bool] | None:
    """Binds the room of a packed cache, (batch, capacity, dim) each: a call of (new keys, new
    values, seq_len) that copies token `seq_len` of every sequence, (batch, 1, dim), behind those
    held.

    The call returns False, and has written nothing, for tensors that C cannot read, of another
    shape, dtype or device, where there is no room, and where the storage of keys or values has been
    resized. None: C cannot append to these, such as those of a device.
    """
    held = Held([keys, values])
    if held.type is None:
        return None
    function = library().kvx_python_append(byref(held.type), held.array, (held.type, held))
    return function or None


def identity() -> Callable[..., bytes | int]:
    """Address, device, dtype, shape and strides of up to 4 tensors or None, as bytes."""
    tensors = _torch_type()
    if tensors is None:
        return lambda *_: -KEY
    function: Callable[..., bytes | int] = library().kvx_python_identity(byref(tensors))
    return function


Indices = tuple[int, int, int, int, bytearray | None]


def read_indices(numbers: Any, ndim: int) -> Indices | None:
    """The dtype, rows, columns (0 for one axis) and address of contiguous integers on the host; of
    a list or tuple a copy, with the memory that has it.

    ndim: 1 or 2
    None for what is no torch tensor, numpy array, list or tuple, and for what C cannot read.
    """
    found: Indices | None = _indices_reader("torch" in sys.modules)(numbers, ndim)
    return found


@cache
def _indices_reader(_: bool) -> Callable[..., Any]:
    """Made once, and again when torch has been imported."""
    struct = _struct(Binding((), Memory.HOST, Memory.HOST), ())
    function: Callable[..., Any] = library().kvx_python_indices(byref(struct))
    return function


@cache
def set_fields() -> Callable[..., Any]:
    """(object, tuple of names, a value of each) -> the object, with these attributes set."""
    function: Callable[..., Any] = library().kvx_python_set_fields()
    return function


def are_whole() -> Callable[..., bool]:
    """Whether all these torch tensors have at most 5 axes, no negative bit, and a storage that
    holds all of their elements. False where C reads none.
    """
    tensors = _torch_type()
    if tensors is None:
        return lambda *_: False
    function: Callable[..., bool] = library().kvx_python_are_whole(byref(tensors))
    return function


def _in_place(type_: _TensorType | None, array: Any) -> Callable[[], bool]:
    """Makes a function that says whether all these keep the memory and storage that they have."""
    if type_ is None:
        places = [(held.tensor, held.data, held.storage_bytes) for held in array]
        return lambda: all(
            tensor.data_ptr() == (data or 0) and tensor.untyped_storage().nbytes() == num_bytes
            for tensor, data, num_bytes in places
        )
    function: Callable[[], bool] = library().kvx_python_in_place(
        byref(type_), array, len(array), (type_, array)
    )
    return function


@cache
def library() -> Any:
    """libkvx_python, loaded once: of this package, or else beside the libkvx in use."""
    name = "libkvx_python.so"
    path = abi.PACKAGE / name
    if not path.exists():
        path = abi.library_path().with_name(name)
    try:
        found = ctypes.PyDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"{name} is neither in {abi.PACKAGE} nor at {path} ({error}). Build it with "
            "`pip install -e .` in the KVX repository"
        ) from None
    found.kvx_python_reader.argtypes = (py_object,)
    found.kvx_python_reader.restype = c_void_p
    found.kvx_python_identity.argtypes = (POINTER(_TensorType),)
    found.kvx_python_identity.restype = py_object
    found.kvx_python_set_fields.argtypes = ()
    found.kvx_python_set_fields.restype = py_object
    found.kvx_python_indices.argtypes = (POINTER(_Binding),)
    found.kvx_python_indices.restype = py_object
    found.kvx_python_are_whole.argtypes = (POINTER(_TensorType),)
    found.kvx_python_are_whole.restype = py_object
    found.kvx_python_in_place.argtypes = (
        POINTER(_TensorType),
        POINTER(_HeldTensor),
        c_ssize_t,
        py_object,
    )
    found.kvx_python_in_place.restype = py_object
    found.kvx_python_append.argtypes = (POINTER(_TensorType), POINTER(_HeldTensor), py_object)
    found.kvx_python_append.restype = py_object
    for name in ("write", "layers", "gather", "plan"):
        getattr(found, f"kvx_python_{name}").restype = py_object
    return found


def _torch_type() -> _TensorType | None:
    """How C reads torch.Tensor; None if it cannot."""
    reader = _torch_reader()
    functions = reader and _torch_functions()
    return _TensorType(*reader, *functions) if reader and functions else None


def _torch_reader() -> tuple[Any, int] | None:
    """torch.Tensor and its DLPack exchange API; None if it has none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if not hasattr(torch.Tensor, _EXCHANGE_API):
        _extend_torch()
    api = getattr(torch.Tensor, _EXCHANGE_API, None)
    reader = api and library().kvx_python_reader(api)
    return (torch.Tensor, reader) if reader else None


@cache
def _torch_functions() -> tuple[int, ...] | None:
    """The offsets of type and at::Tensor in a torch.Tensor, and the C functions that read it.

    None unless these functions agree with torch's methods on a plain and a negative tensor.
    """
    torch = sys.modules["torch"]
    process = ctypes.CDLL(torch._C.__file__)  # and all that it is linked to
    try:
        is_neg = process[_IS_NEG]
        data_ptr, storage_bytes, storage_offset = (
            process.aoti_torch_get_data_ptr,
            process.aoti_torch_get_storage_size,
            process.aoti_torch_get_storage_offset,
        )
    except AttributeError:
        return None
    is_neg.argtypes, is_neg.restype = (c_void_p,), c_bool
    plain = torch.zeros(7)[2:]
    negative = torch._neg_view(plain)
    both, header, size = (plain, negative), object.__basicsize__, torch.Tensor.__basicsize__
    type_offset = _offset(range(0, header, _WORD), {id(t): id(torch.Tensor) for t in both})
    offset = _offset(range(header, size, _WORD), {id(t): t._cdata for t in both})
    if type_offset is None or offset is None:
        return None
    for tensor in both:
        handle, data = id(tensor) + offset, c_void_p()
        num_bytes, elements = c_int64(), c_int64()
        failed = data_ptr(c_void_p(handle), byref(data))
        failed |= storage_bytes(c_void_p(handle), byref(num_bytes))
        failed |= storage_offset(c_void_p(handle), byref(elements))
        answers = (failed, is_neg(handle), data.value, num_bytes.value, elements.value)
        if answers != (0, tensor.is_neg(), tensor.data_ptr(), 28, 2):
            return None
    functions = is_neg, data_ptr, storage_bytes, storage_offset
    return type_offset, offset, *(ctypes.cast(f, c_void_p).value or 0 for f in functions)


@cache
def _type_offset() -> int:
    """The offset of its type in every Python object."""
    some: list[object] = [[], "text", (1.5,)]
    types = {id(one): id(type(one)) for one in some}
    found = _offset(range(0, object.__basicsize__, _WORD), types)
    assert found is not None
    return found


def _offset(offsets: range, words: dict[int, int]) -> int | None:
    """The first offset at which every object, given by address, has its word."""
    for offset in offsets:
        if all(c_void_p.from_address(at + offset).value == word for at, word in words.items()):
            return offset
    return None


@cache
def _extend_torch() -> None:
    """Adds the exchange API to an older torch if the package torch-c-dlpack-ext is installed."""
    with suppress(ImportError, AttributeError, OSError):  # the latter two: for another torch
        importlib.import_module("torch_c_dlpack_ext")
