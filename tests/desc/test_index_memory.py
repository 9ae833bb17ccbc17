"""Tables, slots and starts whose memory torch has replaced: refused, by what keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheSpan,
    CacheView,
    InvalidArgumentError,
    Layout,
    Plan,
    describe,
    migrate,
)

LENGTH = 8


def view(fill: Callable[..., Tensor]) -> CacheView:
    k = fill(512, dtype=torch.float32).view(8, 4, 2, 8)
    return CacheView((CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD)),), CacheFacts())


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# What finds tokens: the tensor that will be replaced, and the end that it makes.
ENDS: dict[str, Callable[[CacheView, Tensor], CacheSpan]] = {
    "block_table": lambda view, ids: view.at(BlockTable.packed(ids.view(1, -1))),
    "slots": lambda view, ids: view.at(slots=ids),
    "starts": lambda view, ids: view.at([[0, 1, 2, 3, 4, 5, 6, 7]], starts=ids[:1]),
    "indptr": lambda view, ids: view.at(
        BlockTable.ragged(torch.zeros(LENGTH, dtype=torch.int32), ids[:2])
    ),
}
NUMBERS = {"indptr": (0, LENGTH, 0, 0, 0, 0, 0, 0)}


@pytest.mark.parametrize("kept", ["end", "plan"])
@pytest.mark.parametrize("name", ENDS)
def test_replaced_index_memory_is_refused(name: str, kept: str) -> None:
    numbers = ints(*NUMBERS.get(name, range(8)))
    src = ENDS[name](view(torch.arange), numbers)
    dst = view(torch.zeros).at([[0, 1, 2, 3, 4, 5, 6, 7]])
    run: Callable[[], Any]
    if kept == "plan":
        plan = Plan.migrate(src, dst, [LENGTH], same_model=True)
        run = plan.run
    else:
        run = lambda: migrate(src, dst, [LENGTH], same_model=True)  # noqa: E731
    run()
    written = dst.view.layers[0].k.owner
    assert isinstance(written, Tensor)
    before = written.clone()
    owner = numbers
    for held in (src.block_table, src.slots, src.starts):
        for one in () if held is None else _tensors(held.owner):
            if one.untyped_storage().data_ptr() == numbers.untyped_storage().data_ptr():
                owner = one
    owner.data = torch.full_like(owner, 3)
    with pytest.raises(InvalidArgumentError, match="describes memory that its tensor no longer"):
        run()
    assert torch.equal(written, before)


def _tensors(owner: object) -> list[Tensor]:
    if isinstance(owner, (tuple, list)):
        return [tensor for one in owner for tensor in _tensors(one)]
    return [owner] if isinstance(owner, Tensor) else []
