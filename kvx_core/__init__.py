"""KVX: one description and one copy engine for the paged KV cache of every LLM engine.

describe(tensor, layout) and CacheDesc.from_kv say where K and V lie, zero-copy; write_kv, gather_kv
and migrate move tokens; verify compares two caches. Engines are described by kvx_adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvx_core import _abi
from kvx_core.descriptors import (
    BlockTable,
    CacheDesc,
    PoolDesc,
    ScaleDesc,
    SeqLens,
    SlotMapping,
    TensorDesc,
    describe,
)
from kvx_core.errors import (
    FactsMismatchError,
    IncompatibleError,
    InternalError,
    InvalidArgumentError,
    KvxError,
    OutOfRangeError,
    UnsupportedError,
)
from kvx_core.facts import CacheFacts, compare, fingerprint
from kvx_core.migrate import migrate
from kvx_core.ops import GatherPlan, WritePlan, device_status, gather_kv, write_kv
from kvx_core.tensors import Borrowed, TensorLike, borrow
from kvx_core.types import (
    BlockTableFormat,
    DType,
    Layout,
    Memory,
    ScaleGranularity,
    Status,
    Transfer,
)
from kvx_core.verify import Difference, Verification, verify
from kvx_core.view import CacheSpan, CacheView

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvx_core.geometry import CacheGeometry
else:

    def __getattr__(name: str) -> object:
        """CacheGeometry, imported when it is first asked for: it alone needs pydantic."""
        if name != "CacheGeometry":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from kvx_core.geometry import CacheGeometry

        return CacheGeometry


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What this libkvx and this machine offer."""

    version: str  # of libkvx
    has_cuda: bool  # built with CUDA kernels
    num_threads: int  # that a large call on HOST memory uses
    cpu_isa: str  # "avx512", "avx2" or "portable"
    stream_bytes: int  # calls that move at least this many bytes store past the caches


def backend_info() -> BackendInfo:
    """What this libkvx and this machine offer."""
    info = _abi.kvx_backend_info_t()
    _abi.check(_abi.library().kvx_backend_info(info))
    return BackendInfo(
        version=info.version.decode(),
        has_cuda=bool(info.has_cuda),
        num_threads=info.num_threads,
        cpu_isa=info.cpu_isa.decode(),
        stream_bytes=info.stream_bytes,
    )


def set_num_threads(num_threads: int) -> None:
    """Sets how many threads a large call on HOST memory uses, for the whole process.

    num_threads: 1: the caller alone; 0: the default, $KVX_NUM_THREADS or the process's cores
    Raises InvalidArgumentError.
    """
    _abi.check_uint32("num_threads", num_threads)
    _abi.check(_abi.library().kvx_set_num_threads(num_threads))


__all__ = [
    "BackendInfo",
    "BlockTable",
    "BlockTableFormat",
    "Borrowed",
    "CacheDesc",
    "CacheFacts",
    "CacheGeometry",
    "CacheSpan",
    "CacheView",
    "DType",
    "Difference",
    "FactsMismatchError",
    "GatherPlan",
    "IncompatibleError",
    "InternalError",
    "InvalidArgumentError",
    "KvxError",
    "Layout",
    "Memory",
    "OutOfRangeError",
    "PoolDesc",
    "ScaleDesc",
    "ScaleGranularity",
    "SeqLens",
    "SlotMapping",
    "Status",
    "TensorDesc",
    "TensorLike",
    "Transfer",
    "UnsupportedError",
    "Verification",
    "WritePlan",
    "__version__",
    "backend_info",
    "borrow",
    "compare",
    "describe",
    "device_status",
    "fingerprint",
    "gather_kv",
    "migrate",
    "set_num_threads",
    "verify",
    "write_kv",
]
