"""Every argument of every public function and descriptor, given values of every other type.

A wrong value raises a KvxError that names the argument, never an error from inside, and never goes
unnoticed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import kvx_core as kvx
from kvx_adapters import kvbm
from kvx_core import (
    BlockTable,
    BlockTableFormat,
    CacheDesc,
    CacheSpan,
    CacheView,
    DType,
    GatherPlan,
    KvxError,
    Layout,
    Memory,
    Plane,
    PoolDesc,
    ScaleDesc,
    ScaleGranularity,
    SeqLens,
    SlotMapping,
    TensorDesc,
    WritePlan,
    describe,
)
from kvx_core.blocks import layouts
from kvx_core.desc import layouts as layouts_module
from kvx_core.encodings import hadamard, lossless, turboquant
from tests.facts import SAME_MODEL

NHD = Layout.BLOCK_NHD
K, V = torch.zeros(2, 4, 8, 2, 16)
KEY, VALUE = torch.ones(2, 2, 2, 16)
CACHE = CacheDesc.from_kv(describe(K, NHD), describe(V, NHD))
COPY = CacheDesc.from_kv(describe(K.clone(), NHD), describe(V.clone(), NHD))
VIEW = CacheView((CACHE,), SAME_MODEL, dense=True)
OTHER = CacheView((COPY,), SAME_MODEL, dense=True)
PAGED = CacheView((CACHE,), SAME_MODEL)
DEVICE_ADDRESS = 4096

WRONG: dict[str, Any] = {
    "None": None,
    "int": 3,
    "negative": -1,
    "big": 1 << 70,
    "float": 2.5,
    "bool": True,
    "str": "HND",
    "bytes": b"x",
    "object": object(),
    "type": int,
    "dict": {"k": 1},
    "set": {1},
    "empty list": [],
    "list": [1],
    "list of lists": [[1]],
    "list of floats": [0.5],
    "list of objects": [object()],
    "pair": (1, 2),
    "cache": CACHE,
    "caches": [CACHE],
    "view": VIEW,
    "tensor desc": describe(K, NHD),
    "torch floats": torch.ones(2),
    "torch bools": torch.ones(2, dtype=torch.bool),
    "torch table": torch.zeros(1, 1, dtype=torch.int64),
    "torch list": torch.zeros(1, dtype=torch.int64),
    "numpy float": np.float32(1),
    "numpy int": np.int64(1),
    "numpy objects": np.array([object()]),
    "numpy strings": np.array(["x"]),
    "layout": Layout.BLOCK_NHD,
    "torch dtype": torch.float16,
    "function": lambda: None,
}

UP_TO_1 = {"numpy int", "layout"}  # 1
INTS = {"int", "numpy int", "layout"}  # an IntEnum is an int
ANY_INTS = INTS | {"negative"}
LISTS = {"empty list", "list", "pair", "torch list"}
DESC = {"tensor desc"}  # of another shape: C says so
TABLES = {"empty list", "list of lists", "torch table"}


@dataclass(frozen=True)
class Case:
    """A call that is right, and what else each argument may be."""

    call: Callable[..., Any]
    right: dict[str, Any]
    also: dict[str, set[str]]  # names in WRONG that are right too
    says: dict[str, str]  # what sentences call an argument, if not by its name


def case(
    call: Callable[..., Any],
    right: dict[str, Any],
    also: dict[str, set[str]],
    says: dict[str, str] | None = None,
) -> Case:
    return Case(call, right, also, says or {})


def _tensor_desc(**fields: Any) -> TensorDesc:
    right = {
        "dtype": DType.F32,
        "layout": NHD,
        "memory": Memory.HOST,
        "shape": (1, 2),
        "stride": (2, 1),
        "data": 64,
        "writable": True,
    }
    return TensorDesc(**(right | fields))


SCALES = INTS | {"negative", "big", "float", "numpy float"}
SCALES |= {"torch floats", "torch list", "torch table"}  # whether they fit is for C to say
OPTIONAL = {"None"}
OUTPUTS = torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 2, 16)
BLOCK = torch.tensor([[1]])
PACKED = torch.ones(1, 3, 4)


def _packed() -> kvx.PackedKVCache:
    cache = kvx.PackedKVCache()
    cache.append_packed(PACKED, PACKED)
    return cache


SIZES = {"num_layers": 1, "num_heads": 2, "head_dim": 16, "max_seq_len": 8}
ONE = torch.ones(2, 16)


def _store() -> kvx.KvCacheStore:
    store = kvx.KvCacheStore(**SIZES)
    store.append(0, ONE[None], ONE[None])
    return store


def store_calls() -> dict[str, Case]:
    """Those of KvCacheStore. Whether sizes of wrong arguments are right is another test's."""
    sizes_also = dict.fromkeys(SIZES, INTS)
    formats = {"torch dtype", "layout"}  # BLOCK_NHD is an int of no format
    encodings = {"key_encoding": "Q8_0", "value_encoding": "Q8_0"}
    place = {"placement": "cpu"}
    ends = {"layer": 0, "start": 0, "end": 1}
    none = set[str]()
    ends_also = {"layer": none, "start": UP_TO_1, "end": {"None", *UP_TO_1}}
    one = {"layer": none}
    return {
        "KvCacheStore": case(
            kvx.KvCacheStore,
            SIZES | {"head_dim": 32} | encodings | place,
            sizes_also | {"head_dim": none, "placement": none} | dict.fromkeys(encodings, formats),
        ),
        "KvCacheStore.from_preset": case(
            kvx.KvCacheStore.from_preset,
            SIZES | {"head_dim": 128, "preset": "safe-lowbit"} | place,
            {"preset": none},
        ),
        "KvCacheStore.append_token": case(
            lambda **given: _store().append_token(**given),
            {"layer": 0, "key": ONE, "value": ONE},
            one | {"key": none, "value": none},
        ),
        "KvCacheStore.append": case(
            lambda **given: _store().append(**given),
            {"layer": 0, "keys": ONE[None], "values": ONE[None]},
            one | {"keys": none, "values": none},
        ),
        "KvCacheStore.append_zeros": case(
            lambda num_tokens: _store().append_zeros(num_tokens),
            {"num_tokens": 1},
            {"num_tokens": INTS},
        ),
        "KvCacheStore.read_keys": case(
            lambda **given: _store().read_keys(**given),
            ends | {"head": None, "out": None},
            ends_also | {"head": {"None", *UP_TO_1}, "out": OPTIONAL},
        ),
        "KvCacheStore.read_key_storage": case(
            lambda **given: _store().read_key_storage(**given), ends, ends_also
        ),
        "KvCacheStore.attend": case(
            lambda **given: _store().attend(**given),
            ends | {"query": ONE, "scale": None},
            ends_also
            | {"query": none, "scale": INTS | {"negative", "big", "float", "numpy float", "None"}},
        ),
        "KvCacheStore.layer_seq_len": case(
            lambda layer: _store().layer_seq_len(layer), {"layer": 0}, one
        ),
        "KvCacheStore.evict": case(
            lambda from_pos: _store().evict(from_pos), {"from_pos": 0}, {"from_pos": UP_TO_1}
        ),
        "KvCacheStore.cache_view": case(
            lambda **given: _store().cache_view(**given),
            {"facts": SAME_MODEL, "block_size": None},
            {"facts": none, "block_size": {"None", *UP_TO_1}},
        ),
    }


STACK = [[torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)]]
UNIVERSALS, OPERATIONALS = [torch.zeros(2, 1, 2, 4, 8)], [torch.zeros(1, 2, 64)]


def block_calls() -> dict[str, Case]:
    """Those of kvx_core.blocks and kvx_adapters.kvbm."""
    stream: dict[str, set[str]] = {"stream": INTS | OPTIONAL}
    end = {"dtype": None, "blocks_per_seq": None, "head_start": 0, "facts": None}
    end_also = {
        "dtype": OPTIONAL,
        "blocks_per_seq": OPTIONAL | {"list"},
        "head_start": INTS,
        "facts": OPTIONAL,
    }
    move, move_also = {"convert": False, "stream": None}, {"convert": {"bool"}, **stream}
    universal = {"blocks": STACK, "universals": UNIVERSALS, "layout": "NHD", "head_start": None}
    flat = {"blocks": STACK, "operationals": OPERATIONALS, "backend": "auto"}
    universal_also = {"blocks": set[str](), "universals": set[str](), "layout": {"str"}}
    flat_also = {"blocks": set[str](), "operationals": set[str](), "backend": OPTIONAL}
    pairs = {"srcs": [torch.zeros(3)], "dsts": [torch.zeros(3)]}
    pairs_also = {"srcs": set[str](), "dsts": set[str]()}
    hd = universal | {"layout": "HND", "blocks": [[t.transpose(0, 1).clone() for t in STACK[0]]]}
    calls = {
        "block_stack": case(
            layouts.block_stack,
            {"blocks": STACK, "layout": "NHD", "no": 2} | end,
            {"blocks": set(), "layout": {"str"}, "no": {"numpy int", "layout"}} | end_also,
        ),
        "universal_blocks": case(
            layouts.universal_blocks,
            {"universals": UNIVERSALS} | end,
            {"universals": set[str]()} | end_also,
        ),
        "operational_blocks": case(
            layouts.operational_blocks,
            {"operationals": OPERATIONALS, "shape": (4, 2, 8), "layout": "NHD"} | end,
            {"operationals": set(), "shape": set(), "layout": {"str"}} | end_also,
        ),
        "vectorized_copy": case(
            kvbm.vectorized_copy, pairs | {"stream": None}, pairs_also | stream
        ),
        "memcpy_batch": case(
            kvbm.memcpy_batch,
            pairs | {"mode": "auto", "stream": None},
            pairs_also | {"mode": set[str]()} | stream,
        ),
    }
    for name in ("block_to_universal", "universal_to_block"):
        also = universal_also | {"head_start": OPTIONAL, "layout": set[str]()} | move_also
        calls[name] = case(getattr(kvbm, name), hd | move, also | {"layout": {"str"}})
    for name in ("block_to_operational", "operational_to_block"):
        calls[name] = case(getattr(kvbm, name), flat | move, flat_also | move_also)
    return calls


def encoding_calls() -> dict[str, Case]:
    """Those of kvx_core.encodings."""
    numbers, preset = torch.ones(2, 64), turboquant.SLOTS[1]
    encoded, units = lossless.encode(numbers.bfloat16()), turboquant.encode(numbers, 3)
    return {
        "lossless.encode": case(
            lossless.encode, {"numbers": numbers.bfloat16()}, {"numbers": set()}
        ),
        "lossless.num_numbers": case(
            lossless.num_numbers, {"encoded": encoded}, {"encoded": set[str]()}
        ),
        "lossless.decode": case(
            lossless.decode,
            {"encoded": encoded, "into": None, "first": 0, "count": None},
            {"encoded": set(), "into": OPTIONAL, "first": INTS, "count": INTS | OPTIONAL},
        ),
        "turboquant.unit_bytes": case(
            turboquant.unit_bytes,
            {"dim": 64, "bits": 3, "residual": False},
            {"dim": set[str](), "bits": {"int"}, "residual": {"bool"}},
        ),
        "turboquant.encode": case(
            turboquant.encode,
            {"values": numbers, "bits": 3, "residual": False},
            {"values": set[str](), "bits": {"int"}, "residual": {"bool"}},
            {"values": ""},
        ),
        "turboquant.decode": case(
            turboquant.decode,
            {"units": units, "dim": 64, "bits": 3, "residual": False},
            {"units": set[str](), "dim": set[str](), "bits": {"int"}, "residual": set[str]()},
            {"residual": ""},
        ),
        "turboquant.slot_bytes": case(
            turboquant.slot_bytes,
            {"dim": 64, "cache_dtype": preset},
            {"dim": set[str](), "cache_dtype": set[str]()},
        ),
        "turboquant.encode_slots": case(
            turboquant.encode_slots,
            {"keys": numbers, "values": numbers, "cache_dtype": preset},
            {"keys": set[str](), "values": set[str](), "cache_dtype": set[str]()},
            {"keys": ""},
        ),
        "turboquant.decode_slots": case(
            turboquant.decode_slots,
            {"slots": torch.zeros(2, 70, dtype=torch.uint8), "dim": 64, "cache_dtype": preset},
            {"slots": set[str](), "dim": set[str](), "cache_dtype": set[str]()},
        ),
    }


LENGTH = torch.tensor([1])
OPTIONS = {
    "k_scale": SCALES | OPTIONAL,
    "v_scale": SCALES | OPTIONAL,
    "find_scales": {"bool"},
    "zero_fill": {"bool"},
    "transfer": set[str](),
    "stream": INTS | OPTIONAL,
    "null_block_id": ANY_INTS,
    "secondary_num_blocks": INTS,
}
WRITE_OPTIONS = ("k_scale", "v_scale", "find_scales", "transfer", "stream")
GATHER_OPTIONS = (
    "k_scale",
    "v_scale",
    "null_block_id",
    "zero_fill",
    "secondary_num_blocks",
    "transfer",
    "stream",
)
RIGHT_OPTIONS = {
    "k_scale": None,
    "v_scale": None,
    "find_scales": False,
    "zero_fill": False,
    "transfer": kvx.Transfer.KERNEL,
    "stream": None,
    "null_block_id": -1,
    "secondary_num_blocks": 0,
}


def options(*names: str) -> tuple[dict[str, Any], dict[str, set[str]]]:
    return {n: RIGHT_OPTIONS[n] for n in names}, {n: OPTIONS[n] for n in names}


def at_rest_calls(folder: Path) -> dict[str, Case]:
    """Those of snapshots, stores of prefixes, their directories and facts."""
    none = set[str]()
    facts = replace(SAME_MODEL, first_kv_head=0, total_kv_heads=2)
    view, table = replace(PAGED, facts=facts), BlockTable.packed([[1, 0]])
    section = kvx.Section((0,), view, table)
    snapshot = kvx.Snapshot.capture(range(16), [section])
    directory, exact = kvx.Directory(folder), kvx.Precision.of("float32")
    model = {
        "fingerprint": facts.fingerprint,
        "num_layers": 1,
        "total_kv_heads": 2,
        "precision": exact,
    }
    store = kvx.PrefixStore(directory, **model, chunk_tokens=8)
    captured = store.capture(range(16), 0, 8, [section])
    assert captured is not None
    assert snapshot is not None
    assert store.commit(captured)
    chunk = {"tokens": list(range(16)), "start": 0, "stop": 8, "node": None, "base": 0}
    chunk_also = {"tokens": none, "start": none, "stop": INTS, "node": OPTIONAL, "base": none}
    part = {"layers": (0,), "heads": (0, 2)}
    numbers = {"torch list", "list"}
    sections = {"sections": [section]}
    # What has a length may be tokens; those of no full chunk are not read where nothing is like it.
    unread = {kind for kind, value in WRONG.items() if hasattr(value, "__getitem__")}
    unread -= {"str", "bytes", "dict", "numpy float", "numpy int", "numpy objects", "numpy strings"}
    no_config = {"directory": ""}  # of another one: "x has no config.json"
    none_or_number = INTS | OPTIONAL
    return {
        "compare": case(
            kvx.compare,
            {"src": facts, "dst": facts, "src_head_start": 0, "same_model": True, "hadamard_k": 0},
            {
                "src": none,
                "dst": none,
                "src_head_start": INTS,
                "same_model": {"bool"},
                "hadamard_k": INTS,
            },
        ),
        "Section": case(
            kvx.Section,
            {"layers": (0,), "view": view, "block_table": table}
            | {"encoding": "values", "state_tokens": None},
            {
                "layers": numbers,
                "view": none,
                "block_table": OPTIONAL,
                "encoding": none,
                "state_tokens": none_or_number,
            },
        ),
        "Snapshot.capture": case(
            kvx.Snapshot.capture,
            {"tokens": range(8), "sections": [section], "start": 0, "precision": None},
            {
                "tokens": LISTS | {"torch table"},  # of one element
                "sections": none,
                "start": INTS,
                "precision": OPTIONAL,
            },
        ),
        "Snapshot.fill": case(snapshot.fill, {"section": section}, {"section": none}),
        "Snapshot.restore": case(
            snapshot.restore,
            {"section": section, "start": 0, "stop": 8},
            {"section": none, "start": INTS, "stop": INTS},
        ),
        "Snapshot.mismatch": case(snapshot.mismatch, {"section": section}, {"section": none}),
        "Snapshot.memory_for": case(
            snapshot.memory_for,
            {"layers": [0], "num_tokens": None},
            {"layers": LISTS | {"set"}, "num_tokens": none_or_number},
        ),
        "Snapshot.array": case(snapshot.array, {"name": "layers.0.k"}, {"name": none}),
        "Snapshot.save": case(
            snapshot.save,
            {"target": folder / "file", "key": b"k" * 32},
            {"target": none, "key": OPTIONAL},
        ),
        "Directory": case(
            kvx.Directory,
            {"root": folder, "max_bytes": None, "group": "none"},
            {"root": {"str"}, "max_bytes": none_or_number, "group": none},
        ),
        "Directory.names": case(
            directory.names, {"folder": ""}, {"folder": {"str"}}, {"folder": ""}
        ),
        "Directory.open": case(directory.open, {"name": "a"}, {"name": {"str"}}),
        "Directory.delete": case(directory.delete, {"name": "a"}, {"name": {"str"}}),
        "PrefixStore": case(
            kvx.PrefixStore,
            {"blobs": kvx.Directory(folder / "keys"), "chunk_tokens": 8, "salt": ""}
            | {"key": b"k" * 32, "encryption_key": [b"k" * 32, b"o" * 32]}
            | {"accept": "same", "planes": (), **model},
            {
                "blobs": none,
                "fingerprint": {"str"},
                "num_layers": INTS,
                "total_kv_heads": INTS | {"list"},
                "precision": none,
                "chunk_tokens": OPTIONAL,
                "salt": {"str"},
                "accept": none,
                "key": OPTIONAL,
                "encryption_key": OPTIONAL,
                "planes": {"empty list"},
            },
        ),
        "PrefixStore.salted": case(store.salted, {"salt": ""}, {"salt": {"str"}}),
        "PrefixStore.of_weights": case(
            store.of_weights, {"fingerprint": ""}, {"fingerprint": {"str"}}
        ),
        "PrefixStore.nodes": case(store.nodes, {"tokens": [1]}, {"tokens": unread}),
        "PrefixStore.lookup": case(store.lookup, {"tokens": [1]}, {"tokens": unread}),
        "PrefixStore.spans": case(
            store.spans,
            {"num_tokens": 20, "start": 0},
            {"num_tokens": ANY_INTS, "start": INTS},
        ),
        "PrefixStore.missing": case(
            store.missing, chunk | part, chunk_also | {"layers": none, "heads": {"pair"}}
        ),
        "PrefixStore.capture": case(
            store.capture, chunk | sections, chunk_also | {"sections": none}
        ),
        "PrefixStore.would_write": case(
            store.would_write,
            sections,
            {"sections": {"empty list"}},
        ),
        "PrefixStore.commit": case(store.commit, {"snapshot": captured}, {"snapshot": none}),
        "PrefixStore.name_of": case(store.name_of, {"snapshot": captured}, {"snapshot": none}),
        "PrefixStore.carry": case(store.carry, {"precision": exact}, {"precision": none}),
        "PrefixStore.load": case(
            store.load,
            {"match": store.lookup(range(16)), "start": 0, "stop": 8} | sections,
            {"match": none, "start": INTS, "stop": INTS, "sections": {"empty list"}},
        ),
        "Precision": case(
            lambda **given: kvx.Precision.of("float32", **given),
            {"opaque": "rows", "vector_scales": False},
            {"opaque": {"str", *OPTIONAL}, "vector_scales": {"bool"}},
        ),
        "content_digest": case(
            lambda part: kvx.content_digest(part), {"part": b""}, {"part": {"str", "bytes"}}
        ),
        "model_files_digest": case(
            kvx.model_files_digest, {"directory": _model(folder)}, {"directory": none}, no_config
        ),
    }


def _model(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.ones(1)}, folder / "model.safetensors")
    return folder


def test_a_count_takes_no_memory_before_it_is_checked(tmp_path: Path) -> None:
    store = kvx.PrefixStore(
        kvx.Directory(tmp_path),
        fingerprint="m",
        num_layers=1,
        total_kv_heads=2,
        precision=kvx.Precision.of("float32"),
        chunk_tokens=16,
    )
    assert store.spans(40, 20) == [(16, 32), (32, 40)]
    with pytest.raises(kvx.InvalidArgumentError, match="num_tokens is 9223372036854775807, expect"):
        store.spans(2**63 - 1)
    with pytest.raises(kvx.InvalidArgumentError, match="num_heads is 2147483648, expected at most"):
        kvx.verify(VIEW, OTHER, [1, 0, 0, 0], num_heads=2**31)


def test_a_part_that_a_model_does_not_have_is_not_looked_for(tmp_path: Path) -> None:
    store = kvx.PrefixStore(
        kvx.Directory(tmp_path),
        fingerprint="m",
        num_layers=2,
        total_kv_heads=2,
        precision=kvx.Precision.of("float32"),
        chunk_tokens=4,
    )
    for layers, heads in (((2,), (0, 2)), ((-1,), (0, 2)), ((), (0, 2)), ((0,), (0, 3))):
        with pytest.raises(kvx.InvalidArgumentError, match=r"of the model|of layer 0"):
            store.missing([1, 2, 3, 4], 0, 4, layers, heads)


def test_sections_that_can_be_gone_through_once_are_refused() -> None:
    """A snapshot of a generator's sections would be one of zeros."""
    facts = replace(SAME_MODEL, first_kv_head=0, total_kv_heads=2)
    section = kvx.Section([0], replace(PAGED, facts=facts), BlockTable.packed([[1, 0]]))
    assert section.layers == (0,)
    with pytest.raises(kvx.InvalidArgumentError, match="sections is a generator, expected a list"):
        kvx.Snapshot.capture(range(16), (one for one in [section]))


def calls() -> dict[str, Case]:
    write, write_also = options(*WRITE_OPTIONS)
    layers, layers_also = options("find_scales", "transfer", "stream")
    layers |= {"k_scales": None, "v_scales": None}
    scales = OPTIONAL | {"list", "list of floats", "torch table", "torch list"}
    layers_also |= {"k_scales": scales, "v_scales": scales}
    gather, gather_also = options(*GATHER_OPTIONS)
    move, move_also = options("zero_fill", "find_scales", "transfer", "stream")
    ends = {"src": VIEW, "dst": OTHER, "seq_lens": [1, 0, 0, 0]}
    ends_also = {"src": {"view"}, "dst": {"view"}, "seq_lens": LISTS}
    heads = INTS | OPTIONAL
    geometry = dict.fromkeys(
        ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"), 4
    )
    return {
        "describe": case(
            describe,
            {"tensor": K, "layout": NHD, "dtype": None},
            {
                "tensor": {"torch floats", "torch list", "torch table"},
                "layout": {"layout"},
                "dtype": OPTIONAL,
            },
        ),
        "borrow": case(
            kvx.borrow,
            {"tensor": K},
            {"tensor": {"torch floats", "torch list", "torch table"}},
        ),
        "TensorDesc": case(
            _tensor_desc,
            {"dtype": DType.F16, "layout": NHD, "memory": Memory.HOST, "shape": (1, 2)}
            | {"stride": (2, 1), "data": 64, "writable": True},
            {
                "dtype": {"torch dtype"},
                "layout": {"layout"},
                "memory": set(),
                "shape": {"pair", "empty list"},
                "stride": {"pair", "empty list"},
                "data": INTS,
                "writable": {"bool"},
            },
            {"shape": "s"},  # a shape of another length: "stride has ..."
        ),
        "PoolDesc": case(
            PoolDesc,
            {"memory": Memory.HOST, "bytes_per_block": 64, "primary": 64, "secondary": 0},
            {"memory": set(), "bytes_per_block": INTS, "primary": INTS, "secondary": INTS},
        ),
        "PoolDesc.of": case(
            PoolDesc.of,
            {"primary": K, "bytes_per_block": 64, "secondary": None},
            {
                "primary": {"torch floats", "torch list", "torch table"},
                "bytes_per_block": INTS,
                "secondary": {"torch floats", "torch list", "torch table", "None"},
            },
        ),
        "CacheDesc": case(
            CacheDesc,
            {"num_blocks": 4, "block_size": 8, "num_kv_heads": 2, "head_dim": 16}
            | {"k": describe(K, NHD), "v": describe(V, NHD), "pool": None, "shared_kv": False},
            {
                **dict.fromkeys(("num_blocks", "block_size", "num_kv_heads", "head_dim"), INTS),
                "k": {"tensor desc"},
                "v": OPTIONAL,
                "pool": OPTIONAL,
                "shared_kv": {"bool"},
            },
        ),
        "CacheDesc.from_kv": case(
            CacheDesc.from_kv,
            {"k": describe(K, NHD), "v": describe(V, NHD), "pool": None, "shared_kv": False},
            {"k": {"tensor desc"}, "v": OPTIONAL, "pool": OPTIONAL, "shared_kv": {"bool"}},
        ),
        "BlockTable": case(
            BlockTable,
            {"format": BlockTableFormat.PACKED, "index_dtype": DType.S64, "seq_count": 1}
            | {"max_blocks_per_seq": 1, "indices": 64, "indices_count": 1, "beam_width": 1}
            | {"indptr_dtype": DType.INVALID, "indptr": 0, "indptr_count": 0, "flags": 0}
            | {"memory": Memory.HOST},
            {
                "format": set(),
                "index_dtype": {"torch dtype"},
                "indptr_dtype": {"torch dtype"},
                "memory": set(),
                **dict.fromkeys(("seq_count", "max_blocks_per_seq", "indices"), INTS),
                **dict.fromkeys(("indices_count", "beam_width", "indptr"), INTS),
                **dict.fromkeys(("indptr_count", "flags"), INTS),
            },
        ),
        "BlockTable.packed": case(
            BlockTable.packed, {"indices": [[1]]}, {"indices": TABLES}, {"indices": "block_table"}
        ),
        "BlockTable.of": case(
            BlockTable.of, {"table": [[1]]}, {"table": TABLES}, {"table": "block_table"}
        ),
        "BlockTable.ragged": case(
            BlockTable.ragged,
            {"indices": [1], "indptr": [0, 1]},
            {"indices": LISTS, "indptr": LISTS},
        ),
        "BlockTable.kv_offsets": case(
            BlockTable.kv_offsets,
            {"indices": torch.zeros(1, 1, 2, 1, dtype=torch.int32)},
            {"indices": set()},
            {"indices": "block_table"},
        ),
        "SlotMapping": case(
            SlotMapping,
            {"dtype": DType.S64, "token_count": 1, "slots": 64, "invalid_slot": -1}
            | {"memory": Memory.HOST},
            {
                "dtype": {"torch dtype"},
                "token_count": INTS,
                "slots": INTS,
                "invalid_slot": ANY_INTS,
                "memory": set(),
            },
        ),
        "SlotMapping.of": case(
            SlotMapping.of,
            {"slots": [1], "invalid_slot": -1},
            {"slots": LISTS, "invalid_slot": ANY_INTS},
        ),
        "SeqLens": case(
            SeqLens,
            {"dtype": DType.S64, "seq_count": 1, "lengths": 64, "memory": Memory.HOST},
            {"dtype": {"torch dtype"}, "seq_count": INTS, "lengths": INTS, "memory": set()},
        ),
        "SeqLens.of": case(
            SeqLens.of, {"lengths": [1]}, {"lengths": LISTS}, {"lengths": "seq_lens"}
        ),
        "ScaleDesc": case(
            ScaleDesc,
            {"dtype": DType.F32, "granularity": ScaleGranularity.PER_TENSOR, "shape": (2, 2)}
            | {"stride": (2, 1), "data": 64, "memory": Memory.HOST, "writable": True},
            {
                "dtype": {"torch dtype"},
                "granularity": set(),
                "shape": {"pair", "empty list"},
                "stride": {"pair", "empty list"},
                "data": INTS,
                "memory": set(),
                "writable": {"bool"},
            },
        ),
        "ScaleDesc.of": case(
            ScaleDesc.of,
            {"scale": 1.0, "granularity": ScaleGranularity.PER_TENSOR},
            {
                "scale": SCALES,
                "granularity": set(),
            },
        ),
        "Plane": case(
            Plane,
            {"dtype": DType.F32, "axes": ("block", "dim"), "shape": (2, 2), "role": 4}
            | {"stride": (2, 1), "data": 64, "memory": Memory.HOST, "writable": True}
            | {"layer": 0, "tokens_per_entry": 1, "replicated": False, "scale": None}
            | {"block_table": None, "slots": None},
            {
                "dtype": {"torch dtype"},
                "axes": set(),
                "shape": {"pair"},
                "role": INTS,
                "stride": {"pair"},
                "data": INTS,
                "memory": set(),
                "writable": {"bool"},
                "layer": INTS,
                "tokens_per_entry": INTS,
                "replicated": {"bool"},
                "scale": OPTIONAL,
                "block_table": OPTIONAL,
                "slots": OPTIONAL,
            },
        ),
        "Plane.of": case(
            Plane.of,
            {"tensor": torch.ones(1, 2), "axes": ("block", "dim"), "role": "k", "layer": 0}
            | {"dtype": None, "tokens_per_entry": 1, "replicated": False, "scale": None}
            | {"block_table": None, "slots": None},
            {
                "tensor": {"torch table"},
                "axes": set(),
                "role": INTS,
                "layer": INTS,
                "dtype": OPTIONAL,
                "tokens_per_entry": INTS,
                "replicated": {"bool"},
                "scale": SCALES | OPTIONAL,
                "block_table": TABLES | OPTIONAL,
                "slots": LISTS | OPTIONAL,
            },
        ),
        "CacheView": case(
            CacheView,
            {"layers": (CACHE,), "facts": SAME_MODEL, "k_scales": None, "v_scales": None}
            | {"null_block_id": -1, "secondary_num_blocks": 0, "dense": True, "outdated": None}
            | {"planes": ()},
            {
                "planes": {"empty list"},
                "layers": {"caches", "empty list"},
                "facts": set(),
                "k_scales": OPTIONAL,
                "v_scales": OPTIONAL,
                "null_block_id": ANY_INTS,
                "secondary_num_blocks": INTS,
                "dense": {"bool"},
                "outdated": OPTIONAL | {"function", "type"},
            },
        ),
        "CacheView.at": case(
            VIEW.at,
            {"block_table": None, "slots": None, "starts": None, "head_start": 0},
            {
                "block_table": TABLES | OPTIONAL,
                "slots": LISTS | OPTIONAL,
                "starts": LISTS | OPTIONAL,
                "head_start": INTS,
            },
        ),
        "CacheView.bytes_per_token": case(
            VIEW.bytes_per_token, {"num_heads": None}, {"num_heads": heads}
        ),
        "CacheSpan": case(
            CacheSpan,
            {"view": VIEW, "block_table": None, "slots": None, "starts": None, "head_start": 0},
            {
                "view": {"view"},
                "block_table": OPTIONAL,
                "slots": OPTIONAL,
                "starts": OPTIONAL,
                "head_start": INTS,
            },
        ),
        "CacheSpan.of": case(CacheSpan.of, {"end": VIEW}, {"end": {"view"}}),
        "CacheGeometry.k_shape": case(
            kvx.CacheGeometry(**geometry, dtype="float16").k_shape,  # type: ignore[arg-type]
            {"layout": Layout.BLOCK_HND_PACKED, "pack": 2},
            {"layout": {"layout"}, "pack": {"numpy int", "layout"}},
        ),
        "layouts.axes": case(
            layouts_module.axes,
            {"layout": NHD, "shape": (4, 8, 2, 16)},
            {"layout": {"layout"}, "shape": {"empty list", "list", "pair"}},  # too few axes
        ),
        "write_kv": case(
            kvx.write_kv,
            {"cache": CACHE, "key": KEY, "value": VALUE, "slots": [1]} | write,
            {"cache": {"cache"}, "key": DESC, "value": DESC, "slots": LISTS} | write_also,
        ),
        "write_layers": case(
            kvx.write_layers,
            {"caches": [CACHE], "keys": [KEY], "values": [VALUE], "slots": [1]} | layers,
            {"caches": {"caches"}, "keys": set(), "values": set(), "slots": LISTS} | layers_also,
            {"keys": "key", "values": "value", "k_scales": "k_scale", "v_scales": "v_scale"},
        ),
        "WriteLayersPlan": case(
            kvx.WriteLayersPlan,
            {"caches": [CACHE]} | layers | {"stream": None},
            {"caches": {"caches"}}
            | layers_also
            | {"stream": INTS | OPTIONAL | {"function", "type"}},
            {"k_scales": "k_scale", "v_scales": "v_scale"},
        ),
        "WriteLayersPlan()": case(
            kvx.WriteLayersPlan([CACHE]).__call__,
            {"keys": [KEY], "values": [VALUE], "slots": [1]},
            {"keys": set(), "values": set(), "slots": LISTS},
            {"keys": "key", "values": "value"},
        ),
        "WritePlan": case(
            WritePlan,
            {"cache": CACHE, "key_like": KEY, "value_like": VALUE} | write | {"stream": None},
            {"cache": {"cache"}, "key_like": DESC, "value_like": DESC}
            | write_also
            | {"stream": INTS | OPTIONAL | {"function", "type"}},
            {"key_like": "key", "value_like": "value"},
        ),
        "WritePlan()": case(
            WritePlan(CACHE, KEY, VALUE).__call__,
            {"key": KEY, "value": VALUE, "slots": [1]},
            {"key": DESC, "value": DESC, "slots": LISTS},
        ),
        "gather_kv, out": case(
            kvx.gather_kv,
            {"cache": CACHE, "block_table": [[1]], "seq_lens": [1], "out": OUTPUTS}
            | {"max_seq_len": None, "dtype": None}
            | gather,
            {
                "cache": {"cache"},
                "block_table": TABLES,
                "seq_lens": LISTS,
                "out": OPTIONAL,
                "max_seq_len": heads,
                "dtype": OPTIONAL,
            }
            | gather_also,
            {"out": ""},  # of a pair, the one that is wrong
        ),
        "gather_kv": case(
            kvx.gather_kv,
            {"cache": CACHE, "block_table": [[1]], "seq_lens": [1]}
            | {"max_seq_len": None, "dtype": None}
            | gather,
            {
                "cache": {"cache"},
                "block_table": TABLES,
                "seq_lens": LISTS,
                "max_seq_len": heads,
                "dtype": OPTIONAL | {"torch dtype"},
            }
            | gather_also,
        ),
        "GatherPlan": case(
            GatherPlan,
            {"cache": CACHE, "key_like": OUTPUTS[0], "value_like": OUTPUTS[1]} | gather,
            {"cache": {"cache"}, "key_like": DESC, "value_like": DESC}
            | gather_also
            | {"stream": INTS | OPTIONAL | {"function", "type"}},
            {"key_like": "key", "value_like": "value"},
        ),
        "GatherPlan()": case(
            GatherPlan(CACHE, *OUTPUTS).__call__,
            {"key": OUTPUTS[0], "value": OUTPUTS[1], "block_table": [[1]], "seq_lens": [1]},
            {"key": DESC, "value": DESC, "block_table": TABLES, "seq_lens": LISTS},
        ),
        "migrate": case(
            kvx.migrate,
            ends | {"num_heads": None, "same_model": False, "new_positions": False} | move,
            ends_also
            | {"num_heads": heads, "same_model": {"bool"}, "new_positions": {"bool"}}
            | move_also,
        ),
        "verify": case(
            kvx.verify,
            ends | {"num_heads": None, "tolerance": "exact"},
            ends_also | {"num_heads": heads, "tolerance": {"int", "layout", "float", "big"}},
        ),
        "rotate_keys": case(
            kvx.rotate_keys,
            {
                "span": replace(VIEW, facts=kvx.CacheFacts(rotary="half", rotary_dim=2)),
                "seq_lens": [1, 0, 0, 0],
                "by": [2],
                "inv_freq": [1.0],
                "lossy": True,
            },
            {
                "seq_lens": LISTS,
                "by": LISTS,
                "inv_freq": LISTS | {"list of floats"},
                "lossy": {"bool"},
            },
        ),
        "device_status": case(kvx.device_status, {"stream": None}, {"stream": INTS | OPTIONAL}),
        "kvcache_append": case(
            kvx.kvcache_append,
            {"cache": PACKED, "new": PACKED, "axis": 1},
            {"cache": set(), "new": set(), "axis": {"negative", "numpy int", "layout"}},
            {"cache": ""},  # of other axes: "axis is ..."
        ),
        "encodings.hadamard()": case(
            hadamard,
            {"values": torch.zeros(3, 64), "order": 32},
            {"values": {"torch floats"}, "order": {"None"}},
        ),
        "PackedKVCache": case(kvx.PackedKVCache, {"capacity": 0}, {"capacity": INTS}),
        "PackedKVCache.append_packed": case(
            _packed().append_packed,
            {"new_keys": PACKED, "new_values": PACKED},
            {"new_keys": set(), "new_values": set()},
        ),
        "PackedKVCache.set_packed": case(
            _packed().set_packed,
            {"keys": PACKED, "values": PACKED},
            {"keys": set(), "values": set()},
        ),
        "PackedKVCache.truncate": case(
            lambda num_tokens: _packed().truncate(num_tokens),
            {"num_tokens": 0},
            {"num_tokens": INTS},
        ),
        "CachedAttention": case(
            kvx.CachedAttention,
            {"num_heads": 9, "head_dim": 2, "num_kv_heads": None}
            | {"alibi": False, "scale": None, "kv_cache": None},
            {
                "num_heads": INTS,
                "head_dim": INTS,
                "num_kv_heads": INTS | OPTIONAL,
                "alibi": {"bool"},
                "scale": {"int", "negative", "big", "float", "layout", *OPTIONAL},
                "kv_cache": OPTIONAL,
            },
        ),
        "CachedAttention.forward": case(
            kvx.CachedAttention(2, 2).forward,
            {"query": PACKED, "key": PACKED, "value": PACKED, "kv_cache": None},
            {"query": set(), "key": set(), "value": set(), "kv_cache": OPTIONAL},
        ),
        "packed_view": case(
            kvx.packed_view,
            {"caches": _packed(), "facts": SAME_MODEL, "num_kv_heads": 4, "num_heads": None},
            {
                "caches": set(),
                "facts": set(),
                "num_kv_heads": {"numpy int", "layout"},  # 1; 3 heads do not divide the dim
                "num_heads": OPTIONAL,
            },
            {"num_kv_heads": ""},
        ),
        **state_calls(),
        **block_calls(),
        **encoding_calls(),
        **store_calls(),
        **at_rest_calls(Path(tempfile.mkdtemp())),
        "set_num_threads": case(kvx.set_num_threads, {"num_threads": 0}, {"num_threads": INTS}),
        "use_openmp": case(kvx.use_openmp, {"enable": False}, {"enable": {"bool"}}),
    }


def state_calls() -> dict[str, Case]:
    """What describes the states of recurrent layers."""
    sections = [kvx.StateSection("q", 4), kvx.StateSection("k", 4), kvx.StateSection("v", 8)]
    return {
        "StateSection": case(
            kvx.StateSection,
            {"name": "q", "width": 4, "replicated": False},
            {"name": {"str"}, "width": INTS, "replicated": {"bool"}},
        ),
        "StateFacts": case(
            kvx.StateFacts,
            {"kind": "gdn", "sections": sections, "rank": 0, "num_ranks": 2}
            | {"num_columns": 3, "first_column": 0, "newest_first": False},
            {
                "rank": UP_TO_1,
                "num_ranks": UP_TO_1,
                "num_columns": INTS | OPTIONAL,
                "first_column": INTS,
                "newest_first": {"bool"},
            },
        ),
    }


CALLS = calls()
# Exceptions, enums, results, and what others hand over; stores and facts have tests of their own.
ELSEWHERE = {
    "BackendInfo BlobStore Borrowed CacheFacts CacheGeometry Difference Directory Match PrefixStore"
    " Section Snapshot StoreError StoredSpan TensorLike Verification __version__ backend_info"
    " Comparison ModelRecord Precision ReorderRotary compare content_digest"
    " model_files_digest read_key MigratePlan Plan PlanInfo PlaneKind PlaneInfo Plane Axis Role"
    " KvCacheStoreLike KvMemoryReport KvStorage include_dir library_path"
}


def test_every_public_function_and_descriptor_is_here() -> None:
    covered = {name.split(".")[0].split(",")[0].removesuffix("()") for name in CALLS}
    elsewhere = set(" ".join(ELSEWHERE).split())
    for name in kvx.__all__:
        thing = getattr(kvx, name)
        is_enum = isinstance(thing, type) and issubclass(thing, int)
        is_error = isinstance(thing, type) and issubclass(thing, Exception)
        assert name in covered or name in elsewhere or is_enum or is_error, name


def outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    """What a call raises."""
    try:
        call(**arguments)
    except Exception as error:  # a TypeError from inside too
        return error
    return None


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, found in CALLS.items() for argument in found.also],
)
def test_a_wrong_type_is_refused_in_words(name: str, argument: str) -> None:
    found = CALLS[name]
    found.call(**found.right)
    try:
        for kind, value in WRONG.items():
            raised = outcome(found.call, found.right | {argument: value})
            assert raised is None or isinstance(raised, KvxError), f"{kind}: {raised!r}"
            if kind not in found.also[argument]:
                assert raised is not None, f"{kind} is taken"
                assert found.says.get(argument, argument) in str(raised), f"{kind}: {raised}"
                assert "expected" in str(raised), f"{kind}: {raised}"
    finally:
        kvx.set_num_threads(0)
        kvx.use_openmp(False)


@pytest.mark.parametrize("enum", [Layout, Memory, BlockTableFormat, ScaleGranularity, kvx.Transfer])
def test_names_are_taken_in_capitals_or_not(enum: Any) -> None:
    for member in enum:
        assert enum.of(member) is enum.of(member.name) is enum.of(member.name.lower()) is member
    name = list(enum)[1].name
    for wrong in (name[1:], f"{name} ", 1, None, "HND"):
        with pytest.raises(kvx.InvalidArgumentError) as raised:
            enum.of(wrong)
        assert f", expected a kvx_core.{enum.__name__}: " in str(raised.value)


def test_names_do_wherever_members_do() -> None:
    k, v = describe(K, "BLOCK_NHD"), describe(V, "BLOCK_NHD")
    assert k.layout is NHD
    cache = CacheDesc.from_kv(k, v)
    for transfer in ("KERNEL", "BACKGROUND"):
        kvx.write_kv(cache, KEY, VALUE, [1], transfer=transfer)
        kvx.gather_kv(cache, [[1]], [1], transfer=transfer)
        WritePlan(cache, KEY, VALUE, transfer=transfer)
        kvx.migrate(VIEW, OTHER, [1, 0, 0, 0], transfer=transfer)
    assert ScaleDesc.of(torch.ones(2), "PER_HEAD").granularity is ScaleGranularity.PER_HEAD
    assert _tensor_desc(dtype="float16", layout="BLOCK_HND", memory="DEVICE").dtype is DType.F16
