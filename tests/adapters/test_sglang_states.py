"""kvx_adapters.sglang on the wheel's MambaPool: states of requests, alone and with K and V."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import sglang
from kvx_core import (
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    Plane,
    Role,
    UnsupportedError,
    migrate,
    verify,
)
from kvx_core.model.recurrent import recurrent_state
from tests import sglang_wheel as wheel
from tests.documents import Document
from tests.facts import SAME_MODEL
from tests.sglang_pools import SEEDS, SENTINEL, bytes_of, filled, random_rows
from tests.states import GDN_CONFIG as GDN
from tests.ways_out import WayOut, leads_out

every_seed = pytest.mark.parametrize("seed", SEEDS)
LAYERS = [0, 1, 3]
config = wheel.mamba_config


def shape_of_states(num_ranks: int = 1) -> Any:
    """What the wheel's Mamba-2 layers ask for: 4 heads of 5 x 7, and a convolution of 34."""
    return config.Mamba2StateShape.create(
        tp_world_size=num_ranks,
        intermediate_size=20,
        n_groups=1,
        num_heads=4,
        head_dim=5,
        state_size=7,
        conv_kernel=4,
    )


MAMBA2 = {
    "model_type": "mamba2",
    "num_heads": 4,
    "head_dim": 5,
    "n_groups": 1,
    "state_size": 7,
    "conv_kernel": 4,
}


def states(*, size: int = 6, envelope: bool = False, convs: int = 1, shape: Any = None) -> Any:
    """A MambaPool of Mamba-2: conv bfloat16 of 3 tokens, state float32 of 4 heads."""
    if shape is None:
        shape = replace(shape_of_states(), conv=[(34 + 6 * i, 3) for i in range(convs)])
    dtype = config.Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    pool = wheel.device.MambaPool(
        size=size,
        spec_state_size=0,
        cache_params=config.Mamba2CacheParams(shape=shape, dtype=dtype, layers=LAYERS),
        mamba_layer_ids=LAYERS,
        device="cpu",
        envelope_layout=envelope,
    )
    for raw in raw_of(pool):
        raw.fill_(SENTINEL)
    return pool


def raw_of(pool: Any) -> list[Tensor]:
    return [bytes_of(tensor) for tensor in (*pool.mamba_cache.conv, pool.mamba_cache.temporal)]


def randomize(pool: Any, slots: list[int], seed: int) -> None:
    for i, tensor in enumerate((*pool.mamba_cache.conv, pool.mamba_cache.temporal)):
        for j, slot in enumerate(slots):
            found = random_rows(seed + 10 * i + j, *tensor[:, slot].shape, dtype=tensor.dtype)
            tensor[:, slot] = found


@every_seed
@pytest.mark.parametrize("envelopes", [(False, False), (False, True), (True, False)])
def test_states_go_to_other_slots(envelopes: tuple[bool, bool], seed: int) -> None:
    """Each layer apart, or all states of a slot together, in whole memories."""
    src, found, expected = (states(envelope=e) for e in (*envelopes, envelopes[1]))
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)) + 1
    here, there = order[:2].tolist(), order[2:4].tolist()
    randomize(src, here, seed)
    randomize(expected, there, seed)
    a = sglang.state_view(src, here, SAME_MODEL)
    b = sglang.state_view(found, torch.tensor(there), SAME_MODEL)
    assert [plane.layer for plane in a.planes] == LAYERS * 2
    migrate(a.at(), b.at(), [9, 1])
    assert all(torch.equal(x, y) for x, y in zip(raw_of(found), raw_of(expected), strict=True))
    assert verify(a, b, [9, 1]).ok


@every_seed
def test_convolutions_in_tensors_of_their_own(seed: int) -> None:
    found, expected, src = (states(convs=3) for _ in range(3))
    randomize(src, [2], seed)
    randomize(expected, [6], seed)
    a, b = (sglang.state_view(*of, SAME_MODEL) for of in ((src, [2]), (found, [6])))
    assert {plane.role for plane in a.planes} == {Role.CONV_STATE, 1001, 1002, Role.STATE}
    migrate(a, b, [1])
    assert all(torch.equal(x, y) for x, y in zip(raw_of(found), raw_of(expected), strict=True))


@every_seed
def test_as_the_pool_copies_itself(seed: int) -> None:
    """MambaPool.copy_from, as for a hit of the radix cache."""
    found, expected = states(), states()
    for pool in (found, expected):
        randomize(pool, [2, 5], seed)
    expected.copy_from(torch.tensor([2, 5]), torch.tensor([6, 1]))
    a, b = (sglang.state_view(found, slots, SAME_MODEL) for slots in ([2, 5], [6, 1]))
    migrate(a.at(), b.at(), [3, 3])
    assert all(torch.equal(x, y) for x, y in zip(raw_of(found), raw_of(expected), strict=True))


@every_seed
def test_ranks_of_two_pools(seed: int) -> None:
    """One rank's pool to those of two, in the shapes that SGLang asks for, and back."""

    def pools(count: int) -> list[Any]:
        return [states(shape=shape_of_states(count)) for _ in range(count)]

    def views(of: list[Any], slot: int) -> list[CacheView]:
        known = {"config": MAMBA2, "num_tokens": [8], "num_ranks": len(of)}
        return [
            sglang.state_view(pool, [slot], SAME_MODEL, rank=rank, **known)
            for rank, pool in enumerate(of)
        ]

    one, two, back = pools(1), pools(2), pools(1)
    randomize(one[0], [2], seed)
    for src, dst in ((views(one, 2), views(two, 5)), (views(two, 5), views(back, 3))):
        for a in src:
            for b in dst:
                migrate(a, b, [8])
    conv, state = one[0].mamba_cache.conv[0][:, 2], one[0].mamba_cache.temporal[:, 2]
    for rank, pool in enumerate(two):
        parts = [conv[:, 10 * rank : 10 * rank + 10], conv[:, 20:]]  # B and C are on both
        assert torch.equal(pool.mamba_cache.conv[0][:, 5], torch.cat(parts, 1))
        assert torch.equal(pool.mamba_cache.temporal[:, 5], state[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(back[0].mamba_cache.conv[0][:, 3], conv)
    assert torch.equal(back[0].mamba_cache.temporal[:, 3], state)


def test_a_delta_net_is_stored_with_its_values_outermost() -> None:
    shape = config.Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=20,
        n_groups=2,
        num_heads=4,
        head_dim=5,
        state_size=6,
        conv_kernel=4,
    )
    pool = states(shape=shape)
    randomize(pool, [4], 1)
    view = sglang.state_view(pool, [4], SAME_MODEL, config=GDN, num_tokens=[3])
    found = torch.zeros(len(LAYERS), 1, 4, 6, 5)
    sizes = recurrent_state(GDN)
    planes = [
        Plane.of_state(found[i], ("block", "head", "key", "value"), sizes.state_facts(), layer)
        for i, layer in enumerate(LAYERS)
    ]
    states_alone = [plane for plane in view.planes if plane.role == Role.STATE]
    there = CacheView((), SAME_MODEL, planes=tuple(planes), dense=True)
    migrate(replace(view, planes=tuple(states_alone)), there, [3])
    assert torch.equal(found[:, 0], pool.mamba_cache.temporal[:, 4].transpose(-1, -2))


def test_what_is_known_of_states() -> None:
    pool = states()
    a = sglang.state_view(pool, [2], SAME_MODEL, config=MAMBA2, num_tokens=[9])
    with pytest.raises(FactsMismatchError, match="stand for 9 tokens at the source"):
        migrate(a, sglang.state_view(pool, [3], SAME_MODEL, config=MAMBA2), [8])
    counts = [9]
    asked = sglang.state_view(pool, [2], SAME_MODEL, config=MAMBA2, num_tokens=lambda: counts)
    there = sglang.state_view(pool, [3], SAME_MODEL, config=MAMBA2)
    migrate(asked, there, [9])
    counts[0] = 10  # the request goes on
    with pytest.raises(FactsMismatchError, match="stand for 10 tokens at the source"):
        migrate(asked, there, [9])
    with pytest.raises(FactsMismatchError, match="at one end alone"):
        migrate(a, sglang.state_view(pool, [3], SAME_MODEL), [9])
    with pytest.raises(InvalidArgumentError, match="num_tokens has 2 numbers, expected 1, one per"):
        sglang.state_view(pool, [2], SAME_MODEL, num_tokens=[9, 9])
    with pytest.raises(UnsupportedError, match="has several convolutions, expected one"):
        sglang.state_view(states(convs=2), [2], SAME_MODEL, config=MAMBA2, num_tokens=[9])


def test_a_state_moves_with_the_keys_and_values_of_its_request() -> None:
    mambas = [states(), states()]
    randomize(mambas[0], [4], 1)
    pools = []
    for mamba in mambas:
        pool = wheel.device.HybridLinearKVPool(
            size=48,
            dtype=torch.float16,
            page_size=16,
            head_num=2,
            head_dim=24,
            full_attention_layer_ids=[2],
            device="cpu",
            mamba_pool=mamba,
        )
        filled(pool.full_kv_pool)
        pools.append(pool)
    key, value = (random_rows(i, 20, 2, 24) for i in range(2))
    slots = [torch.arange(16, 36), torch.arange(32, 52)]
    pools[0].set_kv_buffer(SimpleNamespace(layer_id=2), slots[0], key, value)
    views = []
    for pool, mamba, slot in zip(pools, mambas, (4, 3), strict=True):
        (group,) = sglang.layer_groups(pool, SAME_MODEL)
        planes = sglang.state_view(mamba, [slot], SAME_MODEL).planes
        views.append(replace(group.view, planes=planes))
    src, dst = (view.at(slots=of) for view, of in zip(views, slots, strict=True))
    migrate(src, dst, [20])
    found_k, found_v = pools[1].get_kv_buffer(2)
    assert torch.equal(found_k[slots[1]], key)
    assert torch.equal(found_v[slots[1]], value)
    for a, b in zip(
        (*mambas[0].mamba_cache.conv, mambas[0].mamba_cache.temporal),
        (*mambas[1].mamba_cache.conv, mambas[1].mamba_cache.temporal),
        strict=True,
    ):
        assert torch.equal(a[:, 4], b[:, 3])


def test_refusals() -> None:
    pool = states()
    for slots, message in [
        ([0], r"slots\[0\] is 0, expected 1 to 6: slot 0 is that of padded requests"),
        ([3, 7], r"slots\[1\] is 7, expected 1 to 6"),
        ([3, 3], r"slots are \[3, 3\], expected each once"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            sglang.state_view(pool, slots, SAME_MODEL)
    with pytest.raises(UnsupportedError, match="mamba_pool is a SimpleNamespace, expected a Mamba"):
        sglang.state_view(SimpleNamespace(), [1], SAME_MODEL)
    a, b = (sglang.state_view(pool, [slot], SAME_MODEL) for slot in (1, 2))
    pool.mamba_cache.conv[0] = pool.mamba_cache.conv[0].clone()
    with pytest.raises(InvalidArgumentError, match="mamba_pool has its states elsewhere"):
        migrate(a.at(), b.at(), [1])
    pool.register_slot_state(object())
    with pytest.raises(UnsupportedError, match="1 further states of a slot"):
        sglang.state_view(pool, [1], SAME_MODEL)
    pool = states()
    pool.enable_linear_replayssm = True
    with pytest.raises(UnsupportedError, match=r"in a ring \(ReplaySSM\), expected whole states"):
        sglang.state_view(pool, [1], SAME_MODEL)


def moved_states(*, again: bool) -> None:
    """States that lie elsewhere than when they were described."""
    pool = states()
    randomize(pool, [1], 3)
    a, b = (sglang.state_view(pool, [slot], SAME_MODEL) for slot in (1, 2))
    pool.mamba_cache.conv[0] = pool.mamba_cache.conv[0].clone()
    if again:
        a, b = (sglang.state_view(pool, [slot], SAME_MODEL) for slot in (1, 2))
    migrate(a.at(), b.at(), [1])
    assert all(torch.equal(t[:, 1], t[:, 2]) for t in pool.mamba_cache.conv)


def with_a_ring(name: str | None) -> None:
    pool = states()
    if name:
        setattr(pool, name, True)
    sglang.state_view(pool, [1], SAME_MODEL)


def pool_of_requests() -> Any:
    """The wheel's HybridReqToTokenPool, whose requests 2 and 4 have the slots 5 and 1."""
    requests = wheel.device.HybridReqToTokenPool(
        size=4,
        mamba_size=6,
        mamba_spec_state_size=0,
        max_context_len=32,
        device="cpu",
        enable_memory_saver=False,
        cache_params=config.Mamba2CacheParams(shape=shape_of_states(), layers=LAYERS),
        mamba_layer_ids=LAYERS,
        enable_mamba_extra_buffer=False,
        speculative_num_draft_tokens=None,
    )
    requests.req_index_to_mamba_index_mapping[torch.tensor([2, 4])] = torch.tensor([5, 1]).int()
    return requests


def of_requests(*, of_the_pool: bool) -> None:
    requests = pool_of_requests()
    pool = requests.mamba_pool if of_the_pool else requests
    sglang.state_view(pool, requests.get_mamba_indices(torch.tensor([2, 4])), SAME_MODEL)


def of_slots(*slots: int) -> None:
    sglang.state_view(states(), list(slots), SAME_MODEL)


WAYS_OUT = [
    WayOut(
        "expected a MambaPool: HybridReqToTokenPool.mamba_pool",
        lambda: of_requests(of_the_pool=False),
        lambda: of_requests(of_the_pool=True),
    ),
    WayOut(
        "expected 1 to 6: slot 0 is that of padded requests. Give those of get_mamba_indices",
        lambda: of_slots(0, 5),
        lambda: of_requests(of_the_pool=True),
    ),
    WayOut(
        "expected each once: a request has a state of its own",
        lambda: of_slots(3, 3),
        lambda: of_slots(3, 4),
    ),
    *(
        WayOut(
            "expected whole states. Start SGLang without --enable-linear-replayssm and "
            "--enable-linear-replayssm-spec",
            lambda name=name: with_a_ring(name),  # type: ignore[misc]
            lambda: with_a_ring(None),
        )
        for name in ("enable_linear_replayssm", "enable_linear_replayssm_spec")
    ),
    WayOut(
        "mamba_pool has its states elsewhere. Call state_view again",
        lambda: moved_states(again=False),
        lambda: moved_states(again=True),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)


def test_the_page() -> None:
    """With the wheel's HybridReqToTokenPool, which gives each request a slot."""
    pool, other = states(), states()
    requests = pool_of_requests()
    randomize(pool, [5, 1], 3)
    to = sglang.state_view(other, [2, 3], SAME_MODEL, config=MAMBA2)
    Document("sglang.md").run(
        {
            "sglang": sglang,
            "migrate": migrate,
            "req_to_token_pool": requests,
            "req_pool_indices": torch.tensor([2, 4]),
            "mamba_pool": pool,
            "facts": SAME_MODEL,
            "config": MAMBA2,
            "other_states": to,
            "seq_lens": [7, 9],
        },
        Document("sglang.md").snippets()[4],
    )
    told = sglang.state_view(pool, [5, 1], SAME_MODEL, config=MAMBA2, num_tokens=[7, 9])
    assert verify(told, to, [7, 9]).ok
    assert torch.equal(pool.mamba_cache.temporal[:, 5], other.mamba_cache.temporal[:, 2])
