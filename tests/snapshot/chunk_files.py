"""Snapshots of every kind that a file of a store can hold, of random bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvx_core import DType, PlaneKind, Snapshot
from kvx_core._c.os_files import OpenFile
from kvx_core.snapshot import Header, Part, Precision, Room, Stored
from kvx_core.snapshot.chunk_file import Wanted, chunk_parts
from kvx_core.snapshot.chunk_reads import Fetch, read_chunk
from kvx_core.snapshot.contents import FILE_DTYPES, STORED_UNITS, is_scale
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.memory import laid_out
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.beneath import fetch_beneath
from tests.lossless_reference import reference
from tests.snapshot import sections

SIGNING, ENCRYPTION = bytes(range(32)), bytes(range(100, 140))
KEYS: dict[str, tuple[bytes | None, bytes | None]] = {
    "plain": (None, None),
    "signed": (SIGNING, None),
    "encrypted": (None, ENCRYPTION),
    "both": (SIGNING, ENCRYPTION),
}
FULL = 200  # tokens of a chunk
FACTS = replace(sections.FACTS, fingerprint="a model", compute_dtype=DType.BF16)
HEADS = (2, 5)
Types = dict[str, Stored]


class Content(NamedTuple):
    """What snapshots of so many tokens hold."""

    parts: tuple[Part, ...]
    tensors: Types


Maker = Callable[[int], Content]


def numbers(dtype: DType, layers: int = 2, *, coding: str = "", dim: int = 6) -> Maker:
    """K and V in a format, V with another head_dim."""

    def make(n: int) -> Content:
        precision = Precision.of(dtype).name
        kv = {
            f"layers.{layer}.{kind}": Stored(dtype, (n, 3, size), coding=coding)
            for layer in range(layers)
            for kind, size in (("k", dim), ("v", dim // 2))
        }
        return Content((Part(tuple(range(layers)), HEADS, FACTS, "values", precision),), kv)

    return make


def scaled(shape: Callable[[int], tuple[int, ...]], dtype: DType = DType.F8_E4M3) -> Maker:
    def make(n: int) -> Content:
        parts, kv = numbers(dtype)(n)
        scales = {f"{name}_scale": Stored(DType.F32, shape(n)) for name in kv}
        return Content(parts, kv | scales)

    return make


def nvfp4(n: int) -> Content:
    kv: Types = {}
    for name, dim in (("layers.7.k", 64), ("layers.7.v", 32)):
        kv[name] = Stored(DType.F4_E2M1, (n, 3, dim // 2), original=DType.BF16)
        kv[f"{name}_scale"] = Stored(DType.F8_E4M3, (n, 3, dim // 16))
    return Content((Part((7,), HEADS, FACTS, "values", "nvfp4"),), kv)


def rows(n: int) -> Content:
    """Units of 32 numbers that span heads: 6 heads of 16 numbers are 3 units."""
    kv = {f"layers.0.{kind}": Stored(DType.Q8_0, (n, 1, 3)) for kind in "kv"}
    part = Part((0,), (0, 6), FACTS, "values", Precision.of(DType.Q8_0).name)
    return Content((part,), kv)


def opaque(n: int) -> Content:
    kv = {f"layers.{layer}.k": Stored(DType.U8, (n, 3, 37)) for layer in (1, 4)}
    precision = Precision.of(opaque="ours").name
    return Content((Part((1, 4), HEADS, FACTS, "ours", precision),), kv)


def planes(n: int) -> Content:
    """K and V, an entry a token, an entry for 4 tokens in FP8 with a scale, and a state."""
    kinds = (
        PlaneKind(3, 6, 1, replicated=True),
        PlaneKind(3, 41, 4),
        PlaneKind(5, 40, 0),
        PlaneKind(3, 5, 2),  # INDEX_K_SCALE: numbers, not the scale of another tensor
    )
    parts, kv = numbers(DType.BF16)(n)
    own = Part((3, 5), HEADS, FACTS, "values", "bf16", kinds)
    found = kv | {
        kinds[0].name: Stored(DType.F16, (n, 1, 33)),
        kinds[2].name: Stored(DType.F32, (1, 3, 17)),
    }
    if n >= 2:
        found[kinds[3].name] = Stored(DType.F32, (n // 2, 3, 2))
    if n >= 4:
        found[kinds[1].name] = Stored(DType.F8_E4M3, (n // 4, 3, 10))
        found[f"{kinds[1].name}.scale"] = Stored(DType.F32, (3,))
    return Content((*parts, own), found)


def unequal(n: int) -> Content:
    """Layers with different heads, formats and precisions."""
    kv = {
        "layers.9.k": Stored(DType.F16, (n, 2, 4)),
        "layers.9.v": Stored(DType.F16, (n, 2, 4)),
        "layers.2.k": Stored(DType.F32, (n, 5, 16)),
        "layers.2.v": Stored(DType.BF16, (n, 5, 16)),
    }
    parts = (
        Part((9,), (2, 4), FACTS, "values", "f16"),
        Part((2,), (0, 5), FACTS, "values", "bf16"),
    )
    return Content(parts, kv)


MAKERS: dict[str, Maker] = {
    **{dtype.name: numbers(dtype) for dtype in FILE_DTYPES if dtype is not DType.U8},
    **{dtype.name: numbers(dtype) for dtype in STORED_UNITS if dtype is not DType.F4_E2M1},
    "a scale": scaled(lambda n: (1,)),
    "a scale per head": scaled(lambda n: (3,)),
    "a scale per token and head": scaled(lambda n: (n, 3)),
    "S8 with scales": scaled(lambda n: (n, 3), DType.S8),
    "NVFP4": nvfp4,
    "rows": rows,
    "opaque": opaque,
    "planes": planes,
    "unequal": unequal,
    "lossless": numbers(DType.BF16, coding="lossless_bf16", dim=64),
    "33 layers": numbers(DType.BF16, 33),
    "a layer": numbers(DType.BF16, 1),
    "pieces of 1 MiB": numbers(DType.F32, dim=1000),
}


def snapshot_of(make: Maker, n: int, seed: int, *, start: int = 400, prefix: str = "") -> Snapshot:
    """Random bytes; numbers with a coding are Gaussian, and scales positive."""
    random = np.random.default_rng(seed)
    parts, types = make(n)
    tokens = random.integers(0, 1 << 40, n)
    tensors, num_bytes = laid_out(types.items())
    memory = random.integers(0, 256, num_bytes, dtype=np.uint8)
    for name, stored in tensors.items():
        part = memory[stored.offset : stored.offset + stored.num_bytes]
        if stored.coding:
            values = random.standard_normal(len(part) // 2).astype(ml_dtypes.bfloat16)
            part[:] = values.view(np.uint8)
        elif is_scale(name):
            small = random.integers(0, 0x70, len(part), dtype=np.uint8)
            values = random.uniform(0.5, 2, len(part) // 4).astype(np.float32)
            part[:] = small if stored.dtype is DType.F8_E4M3 else values.view(np.uint8)
    prefix = prefix or random.bytes(32).hex()
    return Snapshot(Header(start, prefix, parts), tokens, tensors, memory)


def kind_of(make: Maker, keys: str = "plain") -> Kind:
    parts, tensors = make(FULL)
    signing, encryption = (key is not None for key in KEYS[keys])
    return Kind.of(parts, tensors, FULL, keyed=signing, encrypted=encryption)


def secrets_of(keys: str) -> Secrets:
    return Secrets.of(*KEYS[keys])


def key_of(snapshot: Snapshot) -> str:
    ids = snapshot.tokens.astype("<i8").tobytes()
    return hashlib.sha256(bytes.fromhex(snapshot.header.prefix) + ids).hexdigest()


def write(path: Path, snapshot: Snapshot, kind: Kind, keys: str = "plain") -> bytes:
    """Writes a file. Returns its bytes."""
    raw = b"".join(chunk_parts(snapshot, kind, secrets_of(keys)))
    path.write_bytes(raw)
    return raw


def read(
    fetch: Fetch,
    kind: Kind,
    num_tokens: int,
    keys: str = "plain",
    *,
    key: str | None = None,
    layers: Sequence[int] | None = None,
    room: Room | None = None,
    secrets: Secrets | None = None,
) -> Snapshot:
    """What a load reads of a file."""
    room = room or Room(num_tokens)
    wanted = Wanted.of(kind, num_tokens, kind.layers if layers is None else layers, room, "a model")
    secrets, taken = secrets or secrets_of(keys), room.take(wanted.selection.place.num_bytes)
    try:
        found = read_chunk(fetch, wanted, secrets, name="it", key=key, room=room, taken=taken)
    except BaseException:
        room.give_back(taken[0])
        raise
    assert found is not None
    return found


def file_at(path: Path) -> Fetch:
    """Opens one file whatever its name."""

    def fetch(name: str, views: tuple[memoryview, ...], least: int, most: int) -> OpenFile | None:
        return fetch_beneath(None, str(path.resolve()), views, least, most)

    return fetch


def bytes_of(snapshot: Snapshot, name: str) -> bytes:
    stored = snapshot.tensors[name]
    assert snapshot.memory is not None
    return snapshot.memory[stored.offset : stored.offset + stored.num_bytes].tobytes()


def decode_bf16(raw: bytes) -> bytes:
    """lossless_bf16, decoded as the spec says (E.19)."""
    found: npt.NDArray[np.uint16] = reference(np.frombuffer(raw, np.uint8))
    return found.astype("<u2").tobytes()


DECODERS = {"lossless_bf16": decode_bf16}
