"""The description of a plan: PlanInfo, a PlaneInfo for each plane, and RANGE. Spec: E.13"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvx_core._c import abi_plan
from kvx_core._c.abi_plan import (
    CONVERTS,
    EXACT,
    FINDS_SCALES,
    JOINED,
    OF_SCALES,
    OF_ZEROS,
    UNKNOWN,
)
from kvx_core.argument_checks import plural
from kvx_core.types import DType

# dtype of a plan's ranges; src 0 stands for zeros.
RANGE = np.dtype(
    [("plane", "u4"), ("reserved", "u4"), ("src", "u8"), ("dst", "u8"), ("bytes", "u8")]
)
_ROLES = (
    *("K", "V", "latent", "latent rope", "index K", "index K scale", "compressed"),
    *("conv state", "state"),
)


@dataclass(frozen=True, slots=True)
class PlaneInfo:
    """What a plan does with K, V or another plane of a layer. None: unknown to the host."""

    layer: int
    role: int  # 0: K, 1: V; see kvx_plane.h
    joined: bool  # the next plane's vectors (V's after K's) follow at both ends: one entry for both
    converts: bool  # numbers are converted; else bytes are copied
    exact: bool  # every finite source number can be had back
    finds_scales: bool
    src_dtype: DType
    dst_dtype: DType
    num_heads: int
    vector_size: int
    kernel: str  # on a device the kernel, else "copy", "transpose" or "convert"
    launch: int  # on a device: which launch moves it
    run_bytes: int  # the longest run that is contiguous at both ends, in a block; 0: converted
    num_vectors: int | None
    bytes_read: int | None
    bytes_written: int | None
    hadamard: int = 0  # numbers that are rotated together on their way; 0: none are
    # What it copies of a plane of U8_ZERO or U8_BIAS, beside its data; None: the data
    beside: Literal["scales", "zeros"] | None = None

    @property
    def name(self) -> str:
        """'K', 'V', 'K and V', 'latent', 'K scales', ..."""
        role = _ROLES[self.role] if self.role < len(_ROLES) else f"role {self.role}"
        if self.beside is not None:
            return f"{role} {self.beside}"
        return (f"{role} and V" if self.role == 0 else f"{role} and next") if self.joined else role


@dataclass(frozen=True, slots=True, repr=False)
class PlanInfo:
    """What a plan does; its repr is a table. None: unknown to the host."""

    planes: tuple[PlaneInfo, ...]
    on_device: bool
    num_launches: int
    num_threads: int
    exact: bool
    num_sequences: int  # 0: a write knows none
    num_tokens: int | None
    num_moved: int | None
    num_null_src: int | None
    num_null_dst: int | None
    bytes_read: int | None
    bytes_written: int | None
    copy_bytes_per_second: float | None  # of this machine or device
    seconds: float | None  # an estimate: bytes_written at that speed

    def __repr__(self) -> str:
        where = plural(self.num_launches, "launch").replace("launchs", "launches")
        parts = [
            *[plural(self.num_sequences, "sequence")] * bool(self.num_sequences),
            "tokens unknown to the host" if self.num_tokens is None else self._tokens(),
            "bytes unknown" if self.bytes_written is None else f"{self.bytes_written:,} bytes",
            where if self.on_device else plural(self.num_threads, "thread"),
            "exact" if self.exact else "not exact",
        ]
        if self.seconds is not None:
            parts.append(f"about {1e6 * self.seconds:,.0f} us")
        elif self.copy_bytes_per_second is None:
            parts.append("time unknown")
        rows = [("layers", "plane", "numbers", "from", "to", "by", "run bytes")]
        for plane in self.planes:
            row = (
                plane.name,
                f"{plane.num_heads} x {plane.vector_size}",
                plane.src_dtype.name,
                plane.dst_dtype.name + ("" if plane.exact else ", not exact"),
                plane.kernel + (f", rotates {plane.hadamard}" if plane.hadamard else ""),
                str(plane.run_bytes or "-"),
            )
            seen = [at for at, (_, *other) in enumerate(rows) if at and tuple(other) == row]
            if seen:
                first, _, _ = rows[seen[0]][0].partition("-")
                rows[seen[0]] = (f"{first}-{plane.layer}", *row)
            else:
                rows.append((str(plane.layer), *row))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n  ".join([f"PlanInfo({', '.join(parts)})", *lines])

    def _tokens(self) -> str:
        nulls = {"source": self.num_null_src, "destination": self.num_null_dst}
        without = [f"{count} without a {end}" for end, count in nulls.items() if count]
        tokens = plural(self.num_tokens or 0, "token")
        return f"{tokens} ({', '.join(without)})" if without else tokens


def _known(number: int) -> int | None:
    return None if number == UNKNOWN else number


def info_of(info: abi_plan.kvx_plan_info_t, planes: Sequence[Any]) -> PlanInfo:
    """Makes a PlanInfo of libkvx's description."""
    is_known = info.copy_bytes_per_second and info.bytes_written != UNKNOWN
    return PlanInfo(
        planes=tuple(map(_plane_info, planes)),
        on_device=bool(info.on_device),
        num_launches=info.num_launches,
        num_threads=info.num_threads,
        exact=bool(info.is_exact),
        num_sequences=info.num_sequences,
        num_tokens=_known(info.num_tokens),
        num_moved=_known(info.num_moved),
        num_null_src=_known(info.num_null_src),
        num_null_dst=_known(info.num_null_dst),
        bytes_read=_known(info.bytes_read),
        bytes_written=_known(info.bytes_written),
        copy_bytes_per_second=info.copy_bytes_per_second or None,
        seconds=info.seconds if is_known else None,
    )


def _plane_info(plane: abi_plan.kvx_plane_info_t) -> PlaneInfo:
    return PlaneInfo(
        layer=plane.layer,
        role=plane.role,
        joined=bool(plane.flags & JOINED),
        converts=bool(plane.flags & CONVERTS),
        exact=bool(plane.flags & EXACT),
        finds_scales=bool(plane.flags & FINDS_SCALES),
        src_dtype=DType(plane.src_dtype),
        dst_dtype=DType(plane.dst_dtype),
        num_heads=plane.num_heads,
        vector_size=plane.vector_size,
        kernel=plane.kernel.decode(),
        launch=plane.launch,
        run_bytes=plane.run_bytes,
        num_vectors=_known(plane.num_vectors),
        bytes_read=_known(plane.bytes_read),
        bytes_written=_known(plane.bytes_written),
        hadamard=plane.hadamard,
        beside="scales" if plane.flags & OF_SCALES else "zeros" if plane.flags & OF_ZEROS else None,
    )
