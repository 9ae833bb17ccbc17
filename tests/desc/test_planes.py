"""Plane and views with planes: described zero-copy, migrated, refused by name. Spec: E.11"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from kvx_core import (
    Axis,
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    FactsMismatchError,
    InvalidArgumentError,
    Plane,
    Role,
    ScaleDesc,
    describe,
    migrate,
    verify,
)

SENTINEL = 7
FACTS = CacheFacts(fingerprint="a", rotary="none", rotary_dim=0, rope_applied=False)


def latent(num_blocks: int, block_size: int, *, layer: int = 0) -> torch.Tensor:
    return torch.full((num_blocks, block_size, 16), SENTINEL, dtype=torch.int16).view(
        torch.bfloat16
    )


def view(*planes: Plane, layers: tuple[CacheDesc, ...] = (), dense: bool = False) -> CacheView:
    return CacheView(layers=layers, facts=FACTS, planes=planes, dense=dense)


def test_a_plane_is_its_tensor_described() -> None:
    pages = torch.zeros(3, 2, 2, 32, 16, 2, dtype=torch.bfloat16)[:, :, 1]
    tiles = pages.unflatten(2, (2, 16))
    plane = Plane.of(tiles, ("block", "head", "token", "dim", "token", "dim"), "k", 4)
    assert plane.data == pages.data_ptr()
    assert plane.role == Role.K
    assert plane.layer == 4
    assert [plane.extent(name) for name in ("block", "token", "head", "dim")] == [3, 32, 2, 32]
    struct = plane.to_c()
    found = [(part.axis, part.extent, part.stride_bytes) for part in struct.axes[: struct.num_axes]]
    strides = [2 * stride for stride in tiles.stride()]
    axes = [Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.DIM, Axis.TOKEN, Axis.DIM]
    assert found == list(zip(axes, tiles.shape, strides, strict=True))
    assert struct.dtype == DType.BF16
    assert struct.flags == 0
    assert repr(plane).startswith("Plane(3 x 2 x 2 x 16 x 16 x 2, bfloat16, K of layer 4 [block, ")


@pytest.mark.parametrize("seed", range(3))
def test_planes_and_layers_migrate_in_one_call(seed: int) -> None:
    """vLLM's indexer page, FP8 data of all tokens and then their scales, beside a layer's K."""
    generator = torch.Generator().manual_seed(seed)
    table, lengths = {4: [[2, 0], [1, -1]], 2: [[1, 3, 0, 2], [4, -1, -1, -1]]}, [7, 2]

    def engine(n: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, CacheView]:
        page = torch.full((blocks, n * 20), SENTINEL, dtype=torch.uint8)
        data = page.as_strided((blocks, n, 16), (n * 20, 16, 1))
        scales = page.view(torch.float32).as_strided((blocks, n), (n * 5, 1), n * 4)
        k = latent(blocks, n)
        return (
            page,
            k,
            view(
                Plane.of(data, ("block", "token", "dim"), "index_k", dtype="F8_E4M3"),
                Plane.of(scales, ["block", "token"], Role.INDEX_K_SCALE),
                layers=(CacheDesc.from_kv(describe(k[:, :, None], "BLOCK_NHD"), None),),
            ),
        )

    src_page, src_k, src = engine(4, 3)
    dst_page, dst_k, dst = engine(2, 5)
    src_page[:] = torch.randint(0, 255, src_page.shape, generator=generator, dtype=torch.uint8)
    src_k[:] = torch.randn(src_k.shape, generator=generator).to(torch.bfloat16)
    expected_page, expected_k = dst_page.clone(), dst_k.clone()
    for s, length in enumerate(lengths):
        for t in range(length):
            (a, i), (b, j) = (table[4][s][t // 4], t % 4), (table[2][s][t // 2], t % 2)
            expected_page[b, j * 16 : j * 16 + 16] = src_page[a, i * 16 : i * 16 + 16]
            expected_page[b, 32 + j * 4 : 36 + j * 4] = src_page[a, 64 + i * 4 : 68 + i * 4]
            expected_k[b, j] = src_k[a, i]
    moved = migrate(src.at(table[4]), dst.at(table[2]), lengths)
    assert moved == sum(lengths) * (16 + 4 + 32)
    assert torch.equal(dst_page, expected_page)
    assert torch.equal(dst_k.view(torch.int16), expected_k.view(torch.int16))


def test_a_view_of_planes_alone_may_be_dense() -> None:
    src = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    dst = np.zeros((2, 4, 5), np.float32)
    ends = (
        view(Plane.of(src, ("block", "token", "dim"), 40), dense=True),
        view(Plane.of(dst, ("block", "dim", "token"), 40), dense=True),
    )
    assert migrate(*ends, [3, 2]) == 5 * 16
    assert np.array_equal(dst[0, :, :3], src[0].T)
    assert np.array_equal(dst[1, :, :2], src[1, :2].T)
    assert not dst[0, :, 3:].any()
    assert not dst[1, :, 2:].any()


def test_scales_of_planes_convert() -> None:
    stored = torch.ones(1, 4, 8).to(torch.float8_e4m3fn)
    dst = torch.zeros(1, 4, 8)
    src = Plane.of(stored, ("block", "token", "dim"), 4, scale=ScaleDesc.of(0.5))
    migrate(
        view(src, dense=True),
        view(Plane.of(dst, ("block", "token", "dim"), 4), dense=True),
        [3],
    )
    assert torch.equal(dst[0, :3], torch.full((3, 8), 0.5))
    assert not dst[0, 3].any()


def test_what_planes_refuse() -> None:
    tensor = torch.zeros(2, 4, 8)
    with pytest.raises(InvalidArgumentError, match=r"axes has 2 names, expected 3, one per axis"):
        Plane.of(tensor, ("block", "token"), "k")
    with pytest.raises(InvalidArgumentError, match=r"axes\[1\] is 'TOKENS', expected a kvx_core"):
        Plane.of(tensor, ("block", "tokens", "dim"), "k")
    with pytest.raises(InvalidArgumentError, match="role is 'keys', expected a kvx_core"):
        Plane.of(tensor, ("block", "token", "dim"), "keys")
    with pytest.raises(InvalidArgumentError, match="axes is 'block', expected a list or tuple"):
        Plane.of(tensor, "block", "k")
    with pytest.raises(InvalidArgumentError, match=r"planes\[0\] is .*, expected a Plane"):
        view(tensor)  # type: ignore[arg-type]
    plane = Plane.of(tensor, ("block", "token", "dim"), "k")
    read_only = replace(plane, writable=False, data=plane.data)
    other = Plane.of(torch.zeros(2, 4, 8), ("block", "token", "dim"), "k")
    with pytest.raises(InvalidArgumentError, match=r"^dst\.planes\[0\] is read-only memory"):
        migrate(view(other, dense=True), view(read_only, dense=True), [1])
    with pytest.raises(InvalidArgumentError, match=re.escape("no plane of dst has; leave it out")):
        migrate(view(other, dense=True), view(replace(plane, role=3), dense=True), [1])
    assert verify(view(other, dense=True), view(plane, dense=True), [1])


def test_planes_are_not_reordered() -> None:
    """K's rotary dims in another order: a plane may hold them, and which is not known."""
    k = describe(torch.zeros(1, 4, 1, 16), "BLOCK_NHD")
    ends = []
    for rotary in ("half", "interleaved"):
        plane = Plane.of(torch.zeros(1, 4, 8), ("block", "token", "dim"), "latent")
        facts = replace(FACTS, rotary=rotary, rotary_dim=8, rope_applied=True, hadamard=False)
        made = view(plane, layers=(CacheDesc.from_kv(k, None),), dense=True)
        ends.append(replace(made, facts=facts))
    with pytest.raises(FactsMismatchError, match="the views have planes, which are not reordered"):
        migrate(*ends, [1])


def test_memory_that_has_moved_is_refused() -> None:
    tensor, other = torch.zeros(2, 4, 8), torch.zeros(2, 4, 8)
    axes = ("block", "token", "dim")
    src = view(Plane.of(tensor, axes, "k"), dense=True)
    dst = view(Plane.of(other, axes, "k"), dense=True)
    migrate(src, dst, [1])
    tensor.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentError, match=r"^src\.planes\[0\] describes memory"):
        migrate(src, dst, [1])


def test_planes_at_one_end_and_layers_at_the_other() -> None:
    k, v = torch.zeros(2, 2, 4, 2, 8)
    cache = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
    facts = CacheFacts(first_kv_head=0)
    plane = Plane.of(k, ("block", "token", "head", "dim"), "k", 0)
    ends = CacheView((cache,), facts), CacheView((), facts, planes=(plane,))
    for src, dst in (ends, ends[::-1]):
        for call in (partial(migrate, same_model=True), verify):
            with pytest.raises(InvalidArgumentError, match=r"layers that both hold \(spec E\.3\)"):
                call(src.at([[0]]), dst.at([[1]]), [3])
