"""Plans of libkvx, called through their C structs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvx_core._c import abi, abi_plan
from kvx_core._c.abi_plan import (
    kvx_end_lookup_t,
    kvx_plan_info_t,
    kvx_plan_lookups_t,
    kvx_plane_info_t,
    kvx_take_ranges_t,
)
from tests.caches import Cache
from tests.calls import Backend, View
from tests.reference import End

Range = tuple[int, int, int, int]  # plane, src, dst, bytes


class Migration:
    """A kvx_migrate_desc_t and everything that it points to."""

    def __init__(
        self,
        on: Backend,
        src: tuple[Cache, End],
        dst: tuple[Cache, End],
        lengths: torch.Tensor,
        *,
        starts: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        flags: int = 0,
    ) -> None:
        self.reader = on.reader(flags)
        self.views = [
            View(on, cache, end, start, 0, self.reader)
            for (cache, end), start in zip((src, dst), starts, strict=True)
        ]
        self.lens = self.reader.seq_lens(lengths)
        self.kept = (src, dst, lengths, starts)
        self.desc = abi.kvx_migrate_desc_t(
            flags=flags,
            seq_lens=ctypes.pointer(self.lens),
            src=ctypes.pointer(self.views[0].desc),
            dst=ctypes.pointer(self.views[1].desc),
        )

    def lookups(self) -> kvx_plan_lookups_t:
        """Where its sequences lie, for a plan that was made of another."""
        ends = [
            kvx_end_lookup_t(view.desc.block_table, view.desc.slots, view.desc.starts)
            for view in self.views
        ]
        return kvx_plan_lookups_t(seq_lens=self.desc.seq_lens, src=ends[0], dst=ends[1])


class Plan:
    """A kvx_plan_t."""

    def __init__(self, on: Backend, *structs: Any, create: str = "kvx_plan_create") -> None:
        self.on, self.library = on, abi_plan.declare(on.library())
        self.handle = ctypes.c_void_p(1)
        status = getattr(self.library, create)(*structs, ctypes.byref(self.handle))
        assert bool(self.handle) == (status == 0)
        abi.check(status, self.library)

    def run(self, lookups: kvx_plan_lookups_t | None = None) -> None:
        on = self.on
        stream = on.stream if on.mirror is None else on.mirror.stream
        if on.mirror is not None:
            on.mirror.upload()
        status = self.library.kvx_plan_run(self.handle, lookups, stream)
        if on.mirror is not None:
            on.mirror.download()
        abi.check(status, self.library)
        if not on.looks_first:
            abi.check(self.library.kvx_device_status(ctypes.c_void_p(stream)), self.library)

    def describe(
        self, lookups: kvx_plan_lookups_t | None = None
    ) -> tuple[kvx_plan_info_t, list[kvx_plane_info_t]]:
        def call(*arguments: Any) -> None:
            status = self.library.kvx_plan_describe(self.handle, lookups, *arguments)
            abi.check(status, self.library)

        info, again = kvx_plan_info_t(), kvx_plan_info_t()
        call(info, None, 0)
        planes = (kvx_plane_info_t * info.num_planes)(*[kvx_plane_info_t()] * info.num_planes)
        call(again, planes, len(planes))
        assert bytes(info) == bytes(again)
        return info, list(planes)

    def ranges(self, lookups: kvx_plan_lookups_t | None = None) -> list[Range]:
        found: list[Range] = []

        @kvx_take_ranges_t
        def take(context: int, ranges: Any, count: int) -> int:
            assert 0 < count <= 4096
            found.extend((r.plane, r.src or 0, r.dst, r.bytes) for r in ranges[:count])
            return 0

        status = self.library.kvx_plan_ranges(self.handle, lookups, take, None)
        abi.check(status, self.library)
        return found

    def free(self) -> None:
        self.library.kvx_plan_free(self.handle)


@contextmanager
def planned(on: Backend, *structs: Any, create: str = "kvx_plan_create") -> Iterator[Plan]:
    plan = Plan(on, *structs, create=create)
    try:
        yield plan
    finally:
        plan.free()


def carry_out(ranges: Iterable[Range]) -> None:
    """Makes the copies."""
    for _, src, dst, num_bytes in ranges:
        if src:
            ctypes.memmove(dst, src, num_bytes)
        else:
            ctypes.memset(dst, 0, num_bytes)


def bury(desc: Any, buried: set[int] | None = None) -> None:
    """Overwrites a struct and all structs that it points to, and tables of pointers to them."""
    buried = set() if buried is None else buried
    if ctypes.addressof(desc) in buried:
        return
    buried.add(ctypes.addressof(desc))
    counts = {name: getattr(desc, "num_layers", 0) for name, *_ in desc._fields_}
    counts["planes"] = getattr(desc, "num_planes", 0)
    for name, kind, *_ in desc._fields_:
        value = getattr(desc, name)
        if isinstance(value, ctypes._Pointer) and value:
            if issubclass(kind._type_, ctypes._Pointer):
                for i in range(counts[name]):
                    if value[i]:
                        bury(value[i].contents, buried)
                ctypes.memset(value, 0xA5, counts[name] * 8)
            else:
                bury(value.contents, buried)
    ctypes.memset(ctypes.addressof(desc), 0xA5, ctypes.sizeof(desc))
