"""CacheDesc: K and V that share memory, pools that are one, and storages that were replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheView,
    GatherPlan,
    InvalidArgumentError,
    Layout,
    PoolDesc,
    ScaleDesc,
    TensorDesc,
    UnsupportedError,
    WritePlan,
    borrow,
    describe,
    gather_kv,
    migrate,
    verify,
    write_kv,
)
from kvx_core.desc.overlap import share_an_element
from tests.facts import SAME_MODEL

NHD = Layout.BLOCK_NHD


def desc(tensor: torch.Tensor, **options: Any) -> TensorDesc:
    return describe(tensor, NHD, **options)


def both(k: torch.Tensor, v: torch.Tensor | None = None) -> CacheDesc:
    return CacheDesc.from_kv(desc(k), None if v is None else desc(v))


# ---- K and V over the same memory ----

ROOM = torch.zeros(6, 8, 4, 32)


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (ROOM, ROOM),
        (ROOM, ROOM[..., :16]),  # the latent of MLA, and a part of it
        (ROOM, ROOM[..., 7:]),
        (ROOM[:-1], ROOM[1:]),
        (ROOM[:, :, :3], ROOM[:, :, 1:]),
        (ROOM, ROOM.transpose(1, 2).contiguous().set_(ROOM)),
        (ROOM[..., :16], ROOM.view(-1)[48:].as_strided((6, 8, 4, 16), (512, 64, 16, 1))),
    ],
    ids=["same", "first dims", "last dims", "shifted blocks", "shifted heads", "set", "strides"],
)
def test_k_and_v_in_one_memory_are_refused(k: torch.Tensor, v: torch.Tensor) -> None:
    for make in (both, lambda k, v: CacheDesc(6, 8, 4, 32, desc(k), desc(v))):
        with pytest.raises(InvalidArgumentError) as raised:
            make(k, v)
        assert str(raised.value) == (
            "v is in the memory of k, expected elements of its own: a write would store V over K. "
            "Pass v=None where there is no V (MLA), or shared_kv=True if both are meant to be the "
            "same memory"
        )
    assert CacheDesc.from_kv(desc(k), desc(v), shared_kv=True).shared_kv


@pytest.mark.parametrize(
    ("k", "v"),
    [
        tuple(ROOM.split(16, dim=-1)),  # halves of each row
        tuple(ROOM.transpose(0, 1).split(4)),
        (ROOM[..., ::2], ROOM[..., 1::2]),
        (ROOM[0::2], ROOM[1::2]),
        tuple(ROOM.view(6, 8, 2, 2, 32).unbind(2)),
        (ROOM, torch.zeros_like(ROOM)),
        (ROOM[:0], ROOM[:0]),
    ],
    ids=["halves", "tokens", "odd dims", "odd blocks", "heads", "apart", "empty"],
)
def test_k_and_v_side_by_side_are_welcome(k: torch.Tensor, v: torch.Tensor) -> None:
    assert both(k, v).v is not None


def test_overlap_is_what_the_addresses_say() -> None:
    """Every pair of small tensors, against the set of their addresses."""
    memory = torch.zeros(200, dtype=torch.float16)
    cases = itertools.product(
        [(1, 2), (2, 3), (3, 1)], [(7, 2), (6, 4), (5, 5), (12, 3)], range(12)
    )
    seen = set()
    for shape, stride, offset in cases:
        a = memory.as_strided((2, 1, *shape), (40, 1, *stride), 20)
        for other, steps in itertools.product(((2, 2), (1, 3)), ((40, *stride), (31, 9, 4))):
            b = memory.as_strided((2, 1, *other), (steps[0], 1, *steps[1:]), 14 + offset)
            found = [{t.data_ptr() + 2 * at for at in _offsets(t)} for t in (a, b)]
            expected = bool(found[0] & found[1])
            assert share_an_element(desc(a), desc(b)) is expected
            assert share_an_element(desc(b), desc(a)) is expected
            seen.add(expected)
    assert seen == {True, False}


def _offsets(tensor: torch.Tensor) -> list[int]:
    places = itertools.product(*map(range, tensor.shape))
    return [sum(i * step for i, step in zip(at, tensor.stride(), strict=True)) for at in places]


def test_the_two_pools_are_not_one() -> None:
    for make in (
        lambda: PoolDesc.of(ROOM, 64, ROOM),
        lambda: replace(PoolDesc.of(ROOM, 64), secondary=ROOM.data_ptr()),
    ):
        with pytest.raises(InvalidArgumentError) as raised:
            make()
        assert str(raised.value).startswith(
            "secondary is the memory of primary, expected a pool of its own"
        )
    assert PoolDesc.of(ROOM[:3], 64, ROOM[3:]).secondary


# ---- torch's negative bit ----


def negative(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ones in memory, minus ones to torch."""
    tensor = torch._neg_view(torch.ones(shape, dtype=dtype))
    assert (tensor == -1).all()
    return tensor


def test_negative_tensors_are_not_described() -> None:
    imaginary = torch.ones(2, 3, dtype=torch.complex64).conj().imag
    for tensor in (negative(2, 3), imaginary):
        with pytest.raises(UnsupportedError) as raised:
            borrow(tensor)
        assert str(raised.value) == (
            "tensor.is_neg() is True, expected False: torch negates its numbers when it reads "
            "them, and in memory they have the other sign. Pass tensor.resolve_neg()"
        )
        assert (borrow(tensor.resolve_neg()).data) != 0


@pytest.mark.parametrize("way", ["plain", "plan", "described"])
def test_negative_tensors_are_refused_by_every_way_of_calling(way: str) -> None:
    k, v = torch.zeros(2, 2, 4, 1, 8)
    cache, key, out = both(k, v), torch.ones(1, 1, 8), torch.zeros(1, 1, 1, 8)
    slot, table, lens = torch.tensor([5]), torch.tensor([[1]]), torch.tensor([1])

    def write(key: Any, value: Any, slots: Any) -> None:
        if way == "plan":
            WritePlan(cache, torch.ones(1, 1, 8), torch.ones(1, 1, 8))(key, value, slots)
        else:
            write_kv(
                cache, key, value, slots, find_scales=False, stream=None if way == "plain" else 0
            )

    def gather(key: Any, value: Any, table: Any, lens: Any) -> None:
        if way == "plan":
            GatherPlan(cache, out, out)(key, value, table, lens)
        else:
            gather_kv(cache, table, lens, out=(key, value), zero_fill=way == "described")

    calls: list[tuple[str, Callable[[], None]]] = [
        ("key", lambda: write(negative(1, 1, 8), key, slot)),
        ("value", lambda: write(key, negative(1, 1, 8), slot)),
        ("slots", lambda: write(key, key, negative(1, dtype=torch.int64))),
        ("key", lambda: gather(negative(1, 1, 1, 8), out, table, lens)),
        ("value", lambda: gather(out, negative(1, 1, 1, 8), table, lens)),
        ("block_table", lambda: gather(out, out, negative(1, 1, dtype=torch.int64), lens)),
        ("seq_lens", lambda: gather(out, out, table, negative(1, dtype=torch.int64))),
    ]
    for name, call in calls:
        with pytest.raises(UnsupportedError, match=rf"^{name}\.is_neg\(\) is True"):
            call()
    for name, wrong in (("k", (negative(2, 4, 1, 8), v)), ("v", (k, negative(2, 4, 1, 8)))):
        with pytest.raises(UnsupportedError, match=rf"^{name}\.is_neg\(\)"):
            CacheDesc.from_kv(*(desc(t, name=n) for t, n in zip(wrong, "kv", strict=True)))
    with pytest.raises(UnsupportedError, match=r"^scale\.is_neg\(\)"):
        ScaleDesc.of(negative(1))
    assert not k.any()
    assert not v.any()


# ---- storages that were resized or replaced ----

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "freed": lambda t: t.untyped_storage().resize_(0),
    "shrunk": lambda t: t.untyped_storage().resize_(64),
    "freed and made smaller": lambda t: (
        t.untyped_storage().resize_(0),
        t.untyped_storage().resize_(64),
    ),
    "grown": lambda t: t.untyped_storage().resize_(1 << 20),
    "set_": lambda t: t.set_(torch.zeros(2, 4, 1, 8)),
    "resize_": lambda t: t.resize_(64, 64, 1, 8),
    "swap_tensors": lambda t: torch.utils.swap_tensors(t, torch.zeros(2, 4, 1, 8)),
}


@pytest.mark.parametrize("reader", ["DLPack", "no DLPack"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("half", ["k", "v"])
def test_a_storage_that_moved_is_refused(
    half: str,
    change: Callable[[torch.Tensor], object],
    reader: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if reader == "no DLPack":
        monkeypatch.setattr("kvx_core._c.bound._torch_reader", lambda: None)
    tensors = {name: torch.zeros(2, 4, 1, 8) for name in "kv"}
    cache = both(tensors["k"], tensors["v"])
    key, out = torch.ones(1, 1, 8), torch.zeros(1, 1, 1, 8)
    slot, table, lens = torch.tensor([5]), torch.tensor([[1]]), torch.tensor([1])
    view = CacheView((cache,), SAME_MODEL, dense=True)
    other = CacheView(
        (both(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)),), SAME_MODEL, dense=True
    )
    write_plan, gather_plan = WritePlan(cache, key, key), GatherPlan(cache, out, out)
    calls: dict[str, Callable[[], object]] = {
        "cache": lambda: write_kv(cache, key, key, slot),
        "cache ": lambda: write_kv(cache, key, key, [5]),
        "cache  ": lambda: gather_kv(cache, table, lens, out=(out, out.clone())),
        "cache   ": lambda: gather_kv(cache, table, lens),
        "cache    ": lambda: write_plan(key, key, slot),
        "cache     ": lambda: gather_plan(out, out.clone(), table, lens),
        "cache      ": lambda: WritePlan(cache, key, key),
        "src.layers[0]": lambda: migrate(view, other, [1, 1]),
        "dst.layers[0]": lambda: migrate(other, view, [1, 1]),
    }
    for call in calls.values():
        call()  # all is well
    kept = change(tensors[half])  # noqa: F841
    for name, call in calls.items():
        with pytest.raises(InvalidArgumentError) as raised:
            call()
        assert str(raised.value) == (
            f"{name.strip()}.{half} describes memory that its tensor no longer has: its storage "
            "was resized or replaced since describe(). Describe the tensor again"
        )
    with pytest.raises(InvalidArgumentError, match="describes memory that its tensor no longer"):
        verify(view, other, [1, 1])


def test_scales_that_moved_are_refused() -> None:
    k = torch.zeros(2, 4, 1, 8, dtype=torch.float8_e4m3fn)
    scales = torch.ones(1)
    cache, key, slot = both(k), torch.ones(1, 1, 8), torch.tensor([5])
    plan = WritePlan(cache, key, None, k_scale=ScaleDesc.of(scales))
    view = CacheView((cache,), SAME_MODEL, k_scales=[ScaleDesc.of(scales)], dense=True)  # type: ignore[arg-type]
    other = CacheView((both(torch.zeros(2, 4, 1, 8)),), SAME_MODEL, dense=True)
    plan(key, None, slot)
    migrate(view, other, [1, 1])
    scales.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentError, match=r"^k_scale describes memory that its tensor no"):
        plan(key, None, slot)
    with pytest.raises(InvalidArgumentError, match=r"^src\.k_scales\[0\] describes memory"):
        migrate(view, other, [1, 1])


def test_a_pool_that_moved_is_refused() -> None:
    pool, second = torch.zeros(2, 4, 2, 4, 1, 8)
    cache = CacheDesc.from_kv(
        desc(pool[:, 0]), desc(pool[:, 1]), pool=PoolDesc.of(pool, 128, second)
    )
    span = CacheView((cache,), SAME_MODEL).at(
        BlockTable.kv_offsets(torch.tensor([[[[0], [1]]]], dtype=torch.int32))
    )
    dst = CacheView((both(torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 8)),), SAME_MODEL, dense=True)
    assert migrate(span, dst, [3])
    second.set_(torch.zeros(4, 2, 4, 1, 8))
    with pytest.raises(InvalidArgumentError, match=r"^src\.layers\[0\]\.pool describes memory"):
        migrate(span, dst, [3])


def test_what_has_no_memory_is_not_described() -> None:
    for num_bytes in (0, 64):
        tensor = torch.zeros(2, 4, 1, 8)[1:]
        tensor.untyped_storage().resize_(num_bytes)
        with pytest.raises(InvalidArgumentError) as raised:
            desc(tensor)
        assert str(raised.value) == (
            f"tensor has a storage of {num_bytes} bytes, expected at least 256: it has been "
            "resized since the tensor was made"
        )
        assert borrow(tensor[:0]).shape == (0, 4, 1, 8)


def test_memory_that_came_back_is_used() -> None:
    """A storage of the same size in the same place is what was described."""
    k = torch.zeros(2, 4, 1, 8)
    cache, key = both(k), torch.ones(1, 1, 8)
    write_kv(cache, key, None, torch.tensor([0]))
    address = k.data_ptr()
    k.set_(k.untyped_storage(), 0, (2, 4, 1, 8), (32, 8, 8, 1))
    assert k.data_ptr() == address
    write_kv(cache, key, None, torch.tensor([5]))
    assert (k[1, 1] == 1).all()
