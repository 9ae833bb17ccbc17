"""KVX: one description and one copy engine for the paged KV cache of every LLM engine.

describe(tensor, layout) and CacheDesc.from_kv say where K and V lie, zero-copy; write_kv, gather_kv
and migrate move tokens; verify compares two caches; PrefixStore keeps prefixes of prompts in files,
PackedKVCache the keys and values of a layer as they are computed.
Engines are described by kvx_adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from kvx_core._c import abi
from kvx_core._c.c_files import include_dir, library_path
from kvx_core.argument_checks import flag, integer
from kvx_core.desc.cache import CacheDesc, PoolDesc
from kvx_core.desc.facts import CacheFacts, Comparison, ReorderRotary, compare
from kvx_core.desc.planes import Plane
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.states import StateFacts, StateSection
from kvx_core.desc.tables import BlockTable, SeqLens, SlotMapping
from kvx_core.desc.tensor_desc import TensorDesc, describe
from kvx_core.desc.tensors import Borrowed, TensorLike, borrow
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.errors import (
    FactsMismatchError,
    IncompatibleError,
    InternalError,
    InvalidArgumentError,
    KvxError,
    OutOfRangeError,
    UnsupportedError,
    not_installed,
)
from kvx_core.model.content_digest import content_digest
from kvx_core.model.files import model_files_digest
from kvx_core.model.record import ModelRecord
from kvx_core.ops.layer_writes import WriteLayersPlan, write_layers
from kvx_core.ops.migrate import migrate
from kvx_core.ops.migrate_plan import MigratePlan
from kvx_core.ops.plan import Plan
from kvx_core.ops.plan_info import PlanInfo
from kvx_core.ops.rotate_keys import rotate_keys
from kvx_core.ops.token_plans import GatherPlan, WritePlan
from kvx_core.ops.verify import Difference, Verification, verify
from kvx_core.ops.write_gather import device_status, gather_kv, write_kv
from kvx_core.types import (
    Axis,
    BlockTableFormat,
    DType,
    Layout,
    Memory,
    Role,
    ScaleGranularity,
    Status,
    Transfer,
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvx_core.caches.kv import KvCacheStore, KvCacheStoreLike, KvMemoryReport, KvStorage
    from kvx_core.caches.packed import CachedAttention, PackedKVCache, packed_view
    from kvx_core.desc.geometry import CacheGeometry
    from kvx_core.ops.append_op import kvcache_append
    from kvx_core.snapshot import PlaneKind, Precision, Section, Snapshot, StoreError
    from kvx_core.stores import BlobStore, Directory, Match, PrefixStore, StoredSpan
else:
    # Imported at first use: only these need pydantic, safetensors or torch.
    _LATER = {
        "CacheGeometry": "kvx_core.desc.geometry",
        "kvcache_append": "kvx_core.ops.append_op",
        **dict.fromkeys(
            ("CachedAttention", "PackedKVCache", "packed_view"), "kvx_core.caches.packed"
        ),
        **dict.fromkeys(
            ("KvCacheStore", "KvCacheStoreLike", "KvMemoryReport", "KvStorage"),
            "kvx_core.caches.kv",
        ),
        **dict.fromkeys(
            ("PlaneKind", "Precision", "Section", "Snapshot", "StoreError"), "kvx_core.snapshot"
        ),
        **dict.fromkeys(
            ("BlobStore", "Directory", "Match", "PrefixStore", "StoredSpan"), "kvx_core.stores"
        ),
    }

    def __getattr__(name: str) -> object:
        """Imports a name of `_LATER` at its first use."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(_LATER[name]), name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("kvx_"):
                raise
            raise not_installed(f"kvx_core.{name}", error.name) from None


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What this libkvx and this machine offer."""

    version: str  # of libkvx
    has_cuda: bool  # built with CUDA kernels
    num_threads: int  # that a large call on HOST memory uses
    cpu_isa: str  # "avx512vbmi", "avx512", "avx2" or "portable"
    stream_bytes: int  # calls that move at least this many bytes store past the caches


def backend_info() -> BackendInfo:
    """What this libkvx and this machine offer."""
    info = abi.kvx_backend_info_t()
    abi.check(abi.library().kvx_backend_info(info))
    return BackendInfo(
        version=info.version.decode(),
        has_cuda=bool(info.has_cuda),
        num_threads=info.num_threads,
        cpu_isa=info.cpu_isa.decode(),
        stream_bytes=info.stream_bytes,
    )


def set_num_threads(num_threads: int) -> None:
    """Sets how many threads a large call on HOST memory uses, for the whole process.

    Stores read and write large files with as many, 8 at most.

    num_threads: 1: the caller alone; 0: the default, $KVX_NUM_THREADS or the process's cores
    Raises InvalidArgumentError.
    """
    abi.check(abi.library().kvx_set_num_threads(integer("num_threads", num_threads)))


def use_openmp(enable: bool = True) -> bool:
    """Lets large calls on HOST memory that this thread makes run on the host's OpenMP threads.

    Threads that have just computed, as torch's have on CPU, are awake: smaller calls are then worth
    sharing. Uses as many as OpenMP gives this thread now: torch.get_num_threads(). Returns whether
    they are used; False if this process has no OpenMP runtime.
    """
    threads = abi.openmp() if flag("enable", enable) else None
    abi.check(abi.library().kvx_set_host_threads(*(threads or (None, 0))))
    return threads is not None


__all__ = [
    "Axis",
    "BackendInfo",
    "BlobStore",
    "BlockTable",
    "BlockTableFormat",
    "Borrowed",
    "CacheDesc",
    "CacheFacts",
    "CacheGeometry",
    "CacheSpan",
    "CacheView",
    "CachedAttention",
    "Comparison",
    "DType",
    "Difference",
    "Directory",
    "FactsMismatchError",
    "GatherPlan",
    "IncompatibleError",
    "InternalError",
    "InvalidArgumentError",
    "KvCacheStore",
    "KvCacheStoreLike",
    "KvMemoryReport",
    "KvStorage",
    "KvxError",
    "Layout",
    "Match",
    "Memory",
    "MigratePlan",
    "ModelRecord",
    "OutOfRangeError",
    "PackedKVCache",
    "Plan",
    "PlanInfo",
    "Plane",
    "PlaneKind",
    "PoolDesc",
    "Precision",
    "PrefixStore",
    "ReorderRotary",
    "Role",
    "ScaleDesc",
    "ScaleGranularity",
    "Section",
    "SeqLens",
    "SlotMapping",
    "Snapshot",
    "StateFacts",
    "StateSection",
    "Status",
    "StoreError",
    "StoredSpan",
    "TensorDesc",
    "TensorLike",
    "Transfer",
    "UnsupportedError",
    "Verification",
    "WriteLayersPlan",
    "WritePlan",
    "__version__",
    "backend_info",
    "borrow",
    "compare",
    "content_digest",
    "describe",
    "device_status",
    "gather_kv",
    "include_dir",
    "kvcache_append",
    "library_path",
    "migrate",
    "model_files_digest",
    "packed_view",
    "rotate_keys",
    "set_num_threads",
    "use_openmp",
    "verify",
    "write_kv",
    "write_layers",
]
