"""Other libraries' kernels for the same work, where they can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.caches import Cache
from benchmarks.gpu.places import Call, Place

VLLM_VARIABLE = "KVX_BENCH_VLLM"  # names a wheel of vLLM, or the file alone
_VLLM_FILE = "vllm/v1/attention/ops/triton_reshape_and_cache_flash.py"

# Writes key and value, (num_tokens, heads, dim), into k and v, [block, token, head, dim], at slots.
Writer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Call]
# Moves all layers from the blocks of one table to those of another.
Migrator = Callable[[Cache, Tensor, Cache, Tensor], Call]


@dataclass(frozen=True)
class Peers:
    """Those that are there, by name, and why the others are not."""

    writers: dict[str, Writer] = field(default_factory=dict)
    migrators: dict[str, Migrator] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def find(place: Place, benchmark: str, unfinished: Collection[str] = ()) -> Peers:
    """Imports what can be imported of those that take part in a benchmark: others' imports would
    take as long as its measurements.

    unfinished: those that have been called before (warm.py) and have not returned
    """
    peers = Peers()
    loaders: Sequence[tuple[str, str, dict[str, Any], Callable[[], Any]]] = (
        ("vllm", "write", peers.writers, _vllm),
        ("flashinfer", "write", peers.writers, _flashinfer),
        ("lmcache", "migrate", peers.migrators, partial(_lmcache, place)),
    )
    for name, of, found, load in loaders:
        if of != benchmark:
            continue
        if name in unfinished:
            peers.absent[name] = "its first call did not end"
            continue
        try:
            found[name] = load()
        except Exception as error:  # whatever an import raises, the peer is not there
            peers.absent[name] = f"{type(error).__name__}: {error}"
    return peers


# ---- vLLM: the Triton kernel behind reshape_and_cache_flash ----


def _vllm() -> Writer:
    if not torch.cuda.is_available():
        raise RuntimeError("its kernel needs a GPU")
    path = os.environ.get(VLLM_VARIABLE)
    name = _VLLM_FILE.removesuffix(".py").replace("/", ".")
    module = _load_vllm_file(Path(path)) if path else importlib.import_module(name)
    op = module.triton_reshape_and_cache_flash

    def writer(k: Tensor, v: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> Call:
        one = torch.ones((), device=key.device)
        return partial(op, key, value, k, v, slots, "auto", one, one)

    return writer


def _load_vllm_file(path: Path) -> ModuleType:
    """The file alone, from a wheel or as it is, without the rest of vLLM.

    What it imports of vLLM is stood in for: platform tests and names that this use does not reach.
    """
    import triton
    import triton.language as tl

    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            path = Path(wheel.extract(_VLLM_FILE, tempfile.mkdtemp()))
    quant_utils = "vllm.model_executor.layers.quantization.utils.quant_utils"
    platform = SimpleNamespace(
        has_device_capability=lambda number: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        fp8_dtype=lambda: torch.float8_e4m3fn,
    )
    stand_ins: dict[str, dict[str, Any]] = {
        quant_utils: {"FP8_DTYPE": torch.float8_e4m3fn, "get_fp8_min_max": lambda: (-448.0, 448.0)},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.torch_utils": {"is_quantized_kv_cache": lambda name: name.startswith("fp8")},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": None},
    }
    for name, attributes in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
    try:
        spec = importlib.util.spec_from_file_location("vllm_triton_reshape_and_cache_flash", path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where Triton looks for the source of its kernels
        spec.loader.exec_module(module)
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return module


# ---- FlashInfer ----


def _flashinfer() -> Writer:
    append = importlib.import_module("flashinfer").append_paged_kv_cache

    def writer(k: Tensor, v: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> Call:
        """Every token as a sequence of one page, which says the same as slots do."""
        num_tokens, block_size = len(slots), k.shape[1]
        sequences = torch.arange(num_tokens + 1, dtype=torch.int32, device=key.device)
        blocks, offsets = ((slots // block_size).int(), (slots % block_size).int())
        return partial(
            append,
            key,
            value,
            sequences[:-1],
            offsets,
            (k, v),
            kv_indices=blocks,
            kv_indptr=sequences,
            kv_last_page_len=offsets + 1,
            kv_layout="NHD",
        )

    return writer


# ---- LMCache: through its chunks of 256 tokens ----

_CHUNK = 256


def _lmcache(place: Place) -> Migrator:
    """Its kernels take addresses: of layers in a tensor of the GPU's, of chunks in a list.

    Source: LMCache 0.5.6, lmcache/v1/gpu_connector/gpu_connectors.py and
    lmcache/v1/multiprocess/object_group_transfer.py, callers of multi_layer_block_kv_transfer
    """
    native: Any = importlib.import_module("lmcache.lmcache_native")
    ops = importlib.import_module("lmcache").device_ops
    if place.device != "cpu":
        # Where this raises, as beside another torch than it was built for, LMCache itself goes on
        # without its kernels, and would be no peer.
        ops = importlib.import_module("lmcache.cuda_ops")
    formats, direction = native.EngineKVFormat, native.TransferDirection

    def page_shape(cache: Cache) -> Any:
        shape, k = native.PageBufferShapeDesc(), cache.layers[0].k
        shape.kv_size, shape.nl, shape.nb = 2, len(cache.layers), k.shape[0]
        shape.bs, shape.nh, shape.hs = k.shape[1], k.shape[2], cache.shape.head_dim
        shape.element_size, shape.dtype, shape.block_stride_elems = k.element_size(), k.dtype, 0
        return shape

    def pages(tensors: Sequence[Tensor]) -> Tensor:
        starts = [tensor.data_ptr() for tensor in tensors]
        return torch.tensor(starts, dtype=torch.int64, device=place.device)

    def migrator(src: Cache, src_blocks: Tensor, dst: Cache, dst_blocks: Tensor) -> Call:
        """src: layers of [2, NB, BS, NH, HS]; dst: [NB, NL, 2, NH, BS, HS]"""
        shape, num_tokens = src.shape, src_blocks.numel() * src.shape.block_size
        sizes = (2, len(src.layers), _CHUNK, shape.num_kv_heads * shape.head_dim)
        chunks = [
            torch.empty(sizes, dtype=shape.dtype, device=place.device)
            for _ in range(num_tokens // _CHUNK)
        ]
        device, transfer = src.storage.device, ops.multi_layer_block_kv_transfer
        from_, from_blocks, from_shape = (
            pages(list(src.storage)),
            src_blocks.view(-1),
            page_shape(src),
        )
        to, to_blocks, to_shape = pages([dst.storage]), dst_blocks.view(-1), page_shape(dst)

        def run() -> None:
            there = [chunk.data_ptr() for chunk in chunks]
            store = (from_, there, from_blocks, device, direction.D2H, from_shape)
            transfer(*store, _CHUNK, formats.NL_X_TWO_NB_BS_NH_HS, 0)
            load = (to, there, to_blocks, device, direction.H2D, to_shape)
            transfer(*load, _CHUNK, formats.NB_NL_TWO_NH_BS_HS, 0)

        return run

    return migrator
