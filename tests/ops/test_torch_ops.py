"""torch.ops.kvx: registered as torch wants it, compiled in one graph, mutations in order."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.library import opcheck

import kvx_core.ops.torch_ops
from kvx_core import InvalidArgumentError, OutOfRangeError, UnsupportedError

NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM = 6, 8, 2, 16
INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)  # compiles C++


def new_kv(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((NUM_BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM), 7.0).to(dtype)


def halves(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = kv.split(DIM, dim=-1)
    return k, v


def tokens(n: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(n, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def written(kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> Any:
    """`kv` as it is after the write, by torch indexing."""
    kv = kv.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            kv[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = torch.cat([key[row], value[row]], -1)
    return kv


SLOTS = torch.tensor([3, 40, -1, 9, 0])
TABLE = torch.tensor([[1, 5], [0, -1]], dtype=torch.int32)
LENS = torch.tensor([13, 6])

SAMPLES: dict[str, Any] = {
    "write": lambda: (
        "write_kv",
        (tokens(5), tokens(5, 1), *halves(new_kv()), SLOTS, "BLOCK_HND"),
        {},
    ),
    "write without V": lambda: (
        "write_kv",
        (tokens(5), None, halves(new_kv())[0], None, SLOTS, "BLOCK_HND"),
        {},
    ),
    "write fp8 in uint8": lambda: (
        "write_kv",
        (tokens(5), tokens(5, 1), *halves(new_kv(torch.uint8)), SLOTS, "BLOCK_HND", "BLOCK_CUSTOM"),
        {
            "cache_dtype": torch.float8_e4m3fn,
            "k_scale": torch.tensor([0.5, 2.0]),
            "scale_granularity": "PER_HEAD",
        },
    ),
    "write layers": lambda: (
        "write_layers",
        (
            [tokens(5), tokens(5, 1)],
            [tokens(5, 2), tokens(5, 3)],
            [halves(new_kv())[0] for _ in range(2)],
            [halves(new_kv())[1] for _ in range(2)],
            SLOTS,
            "BLOCK_HND",
        ),
        {},
    ),
    "write layers fp8 without V": lambda: (
        "write_layers",
        (
            [tokens(5), tokens(5, 1)],
            [],
            [halves(new_kv(torch.uint8))[0] for _ in range(2)],
            [],
            SLOTS,
            "BLOCK_HND",
        ),
        {
            "cache_dtype": torch.float8_e4m3fn,
            "k_scales": [torch.tensor([0.5, 2.0]), torch.tensor([1.0, 4.0])],
            "scale_granularity": "PER_HEAD",
        },
    ),
    "gather": lambda: ("gather_kv", (*halves(new_kv()), TABLE, LENS, 13, "BLOCK_HND"), {}),
    "gather without V": lambda: (
        "gather_kv",
        (halves(new_kv())[0], None, TABLE, LENS, 13, "BLOCK_HND"),
        {"dtype": torch.float32, "null_block_id": 0, "zero_fill": True},
    ),
    "gather fp8 in uint8": lambda: (
        "gather_kv",
        (*halves(new_kv(torch.uint8)), TABLE, LENS, 9, "BLOCK_HND"),
        {"cache_dtype": torch.float8_e5m2, "v_scale": torch.tensor(3.0), "dtype": torch.float16},
    ),
    "gather out": lambda: (
        "gather_kv_out",
        (
            *halves(new_kv()),
            TABLE,
            LENS,
            torch.zeros(2, 13, HEADS, DIM),
            torch.zeros(2, 13, HEADS, DIM),
            "BLOCK_HND",
        ),
        {"zero_fill": True},
    ),
    "append": lambda: ("kvcache_append", (tokens(5), tokens(2, 1)), {"axis": 0}),
    "append with gradients": lambda: (
        "kvcache_append",
        tuple(torch.randn(2, n, 3, requires_grad=True) for n in (4, 1)),
        {},
    ),
    "migrate": lambda: (
        "migrate_kv",
        (
            *([half] for half in halves(new_kv())),
            [torch.zeros(2, 13, HEADS, DIM)],
            [torch.zeros(2, 13, HEADS, DIM)],
            LENS,
            "BLOCK_HND",
            "BLOCK_NHD",
        ),
        {"src_block_table": TABLE},
    ),
    "migrate without V": lambda: (
        "migrate_kv",
        (
            [halves(new_kv())[0], halves(new_kv())[1]],
            [],
            [torch.zeros(2, 13, 1, DIM) for _ in range(2)],
            [],
            LENS,
            "BLOCK_HND",
            "BLOCK_NHD",
        ),
        {"src_block_table": TABLE, "src_head_start": 1, "num_heads": 1, "zero_fill": True},
    ),
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck(sample: str) -> None:
    name, args, options = SAMPLES[sample]()
    results = opcheck(getattr(torch.ops.kvx, name).default, args, options)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


def test_schemas_name_what_is_mutated() -> None:
    mutated = {
        name: [a.name for a in getattr(torch.ops.kvx, name).default._schema.arguments if a.is_write]
        for name in kvx_core.ops.torch_ops._SCHEMAS
    }
    assert mutated == {
        "write_kv": ["k_cache", "v_cache"],
        "write_kv_find_scales": ["k_cache", "v_cache", "k_scale", "v_scale"],
        "write_layers": ["k_caches", "v_caches"],
        "gather_kv": [],
        "gather_kv_out": ["key", "value"],
        "migrate_kv": ["dst_k", "dst_v"],
    }


def step(
    kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """A write between a computation before it and a read after it, as in a model."""
    k, v = kv.split(DIM, dim=-1)
    torch.ops.kvx.write_kv(key * 2, value + 1, k, v, slots, "BLOCK_HND")
    return kv.float().sum(dim=(0, 2))


def step_on_halves(
    k: torch.Tensor, v: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    torch.ops.kvx.write_kv(key * 2, value + 1, k, v, slots, "BLOCK_HND")
    return torch.cat([k, v], dim=-1).float().sum(dim=(0, 2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.parametrize("dynamic", [False, True, None])
def test_compile_write(backend: str, dynamic: bool | None) -> None:
    """K and V are halves of one storage, made in the graph."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for n in (5, 3, 4):
        key, value, slots = tokens(n), tokens(n, 1), SLOTS[:n]
        expected = written(new_kv(), key * 2, value + 1, slots)
        kv = new_kv()
        torch.testing.assert_close(compiled(kv, key, value, slots), expected.float().sum((0, 2)))
        assert torch.equal(kv, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.parametrize("dynamic", [False, None])
def test_compile_write_to_given_halves(backend: str, dynamic: bool | None) -> None:
    """K and V are halves of one storage, given to the graph."""
    torch._dynamo.reset()
    compiled = torch.compile(step_on_halves, fullgraph=True, backend=backend, dynamic=dynamic)
    for n in (5, 3, 4):
        key, value, slots = tokens(n), tokens(n, 1), SLOTS[:n]
        expected = written(new_kv(), key * 2, value + 1, slots)
        kv = new_kv()
        total = compiled(*halves(kv), key, value, slots)
        torch.testing.assert_close(total, expected.float().sum((0, 2)))
        assert torch.equal(kv, expected)


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
def test_compile_write_layers(backend: str) -> None:
    """All layers in one op leave what one op for each leaves."""

    def run(kvs: list[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        k, v = zip(*(kv.split(DIM, dim=-1) for kv in kvs), strict=True)
        keys, values = [key * 2, key + 1, key], [value, value * 3, value - 1]
        torch.ops.kvx.write_layers(keys, values, k, v, SLOTS, "BLOCK_HND")
        return kvs[2].float().sum()

    torch._dynamo.reset()
    kvs, key, value = [new_kv() for _ in range(3)], tokens(5), tokens(5, 1)
    total = torch.compile(run, fullgraph=True, backend=backend)(kvs, key, value)
    pairs = [(key * 2, value), (key + 1, value * 3), (key, value - 1)]
    expected = [written(new_kv(), k, v, SLOTS) for k, v in pairs]
    assert all(map(torch.equal, kvs, expected))
    torch.testing.assert_close(total, expected[2].float().sum())


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_compile_gather_and_migrate(backend: str) -> None:
    """Write, migrate and gather in one graph: each reads what the one before it wrote."""

    def run(kv: torch.Tensor, dense: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = kv.split(DIM, dim=-1)
        torch.ops.kvx.write_kv(key, key + 1, k, v, slots, "BLOCK_HND")
        dense_k, dense_v = dense.unbind(0)
        torch.ops.kvx.migrate_kv(
            [k], [v], [dense_k], [dense_v], lens, "BLOCK_HND", "BLOCK_NHD", src_block_table=table
        )
        out_k, out_v = torch.ops.kvx.gather_kv(
            dense_k, dense_v, rows, lens, 13, "BLOCK_NHD", dtype=torch.float32
        )
        torch.ops.kvx.gather_kv_out(
            dense_k, dense_v, rows, lens, out_k, out_v, "BLOCK_NHD", zero_fill=True
        )
        return out_k + 1, out_v, dense.sum()

    slots, table, lens = torch.arange(8, 21), torch.tensor([[1, 2]]), torch.tensor([13])
    rows = torch.tensor([[0]])
    key = tokens(13)
    torch._dynamo.reset()
    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend=backend)):
        kv, dense = new_kv(), torch.zeros(2, 1, 16, HEADS, DIM, dtype=torch.bfloat16)
        results.append((*function(kv, dense, key), kv, dense))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    assert torch.equal(results[0][0][0], key.float() + 1)
    assert torch.equal(results[0][1][0], (key + 1).float())


def test_eager_results() -> None:
    kv = new_kv()
    k, v = halves(kv)
    key, value = tokens(5), tokens(5, 1)
    torch.ops.kvx.write_kv(key, value, k, v, SLOTS, "BLOCK_HND")
    assert torch.equal(kv, written(new_kv(), key, value, SLOTS))
    out_k, out_v = torch.ops.kvx.gather_kv(
        k, v, torch.tensor([[5, 0]]), torch.tensor([12]), 14, "BLOCK_HND"
    )
    assert torch.equal(out_k[0, :8], k[5].transpose(0, 1))
    assert torch.equal(out_v[0, 8:12], v[0, :, :4].transpose(0, 1))
    assert (out_v[0, 12:] == 0).all()
    out_k, out_v = torch.ops.kvx.gather_kv(
        k, None, torch.tensor([[5]]), torch.tensor([8]), 8, "BLOCK_HND"
    )
    assert out_v.shape == (1, 8, HEADS, 0)


def test_keys_of_a_model_in_training_mode() -> None:
    """Keys that require a gradient are written; the cache is no part of the graph."""
    kv = new_kv(torch.float32)
    key = tokens(1, dtype=torch.float32).requires_grad_()
    torch.ops.kvx.write_kv(key * 1, key * 1, *halves(kv), torch.tensor([0]), "BLOCK_HND")
    assert torch.equal(kv[0, :, 0, :DIM], key.detach()[0])


@pytest.mark.parametrize(
    ("change", "error", "expected"),
    [
        (
            {"layout": "HND"},
            InvalidArgumentError,
            "layout is 'HND', expected a kvx_core.Layout: BLOCK_NHD, BLOCK_HND, BLOCK_HND_PACKED, ",
        ),
        (
            {"k_scale": torch.tensor(1.0), "scale_granularity": "PER_TOKEN"},
            InvalidArgumentError,
            "scale_granularity is 'PER_TOKEN', expected a kvx_core.ScaleGranularity: PER_TENSOR",
        ),
        (
            {"slots": torch.tensor([48])},
            OutOfRangeError,
            "write.slots.slots[0] is 48, expected below num_blocks * block_size = 48 (spec 5.2)",
        ),
        (
            {"cache_dtype": torch.float8_e4m3fn},
            InvalidArgumentError,
            "dtype is F8_E4M3 of 1 bytes, expected one of the 2 bytes",
        ),
    ],
)
def test_errors_reach_the_caller(
    change: dict[str, Any], error: type[Exception], expected: str
) -> None:
    kv = new_kv()
    k, v = halves(kv)
    call = {
        "key": tokens(1),
        "value": tokens(1),
        "k_cache": k,
        "v_cache": v,
        "slots": torch.tensor([0]),
        "layout": "BLOCK_HND",
    }
    with pytest.raises(error) as raised:
        torch.ops.kvx.write_kv(**{**call, **change})
    assert str(raised.value).startswith(expected)
    assert (kv == 7).all()


def negative(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ones in memory, minus ones to torch."""
    return torch._neg_view(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize(
    ("op", "name", "place"),
    [
        ("write_kv", "key", 0),
        ("write_kv", "value", 1),
        ("write_kv", "k_cache", 2),
        ("write_kv", "v_cache", 3),
        ("write_kv", "slots", 4),
        ("gather_kv_out", "k_cache", 0),
        ("gather_kv_out", "block_table", 2),
        ("gather_kv_out", "seq_lens", 3),
        ("gather_kv_out", "key", 4),
        ("migrate_kv", "k_cache", 0),
        ("migrate_kv", "seq_lens", 4),
    ],
)
def test_negative_tensors_are_refused(op: str, name: str, place: int) -> None:
    """Their memory has the other sign, which only torch knows."""
    k, v, token = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), torch.ones(1, 1, 8)
    out, one = torch.zeros(1, 1, 1, 8), torch.ones(1, dtype=torch.int64)
    arguments: list[Any] = {
        "write_kv": [token, token, k, v, one, "BLOCK_NHD"],
        "gather_kv_out": [k, v, one[None], one, out, out.clone(), "BLOCK_NHD"],
        "migrate_kv": [[k[:1]], [], [v[:1]], [], one, "BLOCK_NHD", "BLOCK_NHD"],
    }[op]
    getattr(torch.ops.kvx, op)(*arguments)
    before = k.clone(), v.clone()
    right = arguments[place]
    like = right[0] if isinstance(right, list) else right
    wrong = negative(*like.shape, dtype=like.dtype)
    arguments[place] = [wrong] if isinstance(right, list) else wrong
    with pytest.raises(UnsupportedError, match=rf"^{name}\.is_neg\(\) is True"):
        getattr(torch.ops.kvx, op)(*arguments)
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])


def test_a_storage_that_shrank_is_seen() -> None:
    """What is remembered of a cache is not used after its storage was made smaller in place."""
    k = torch.zeros(64, 8, HEADS, DIM)
    call = tokens(1), None, k, None, torch.tensor([500]), "BLOCK_NHD"
    torch.ops.kvx.write_kv(*call)
    k.untyped_storage().resize_(64)
    with pytest.raises(InvalidArgumentError, match="k_cache has a storage of 64 bytes"):
        torch.ops.kvx.write_kv(*call)


def test_migrate_of_unequal_lists() -> None:
    k, v = halves(new_kv())
    out = torch.zeros(1, 8, HEADS, DIM)
    with pytest.raises(InvalidArgumentError) as raised:
        torch.ops.kvx.migrate_kv(
            [k, k], [v], [out], [out], torch.tensor([1]), "BLOCK_HND", "BLOCK_NHD"
        )
    assert str(raised.value) == "V has 1 layers, expected 2 as K, or none"


def test_the_op_keeps_no_cache_alive_and_no_stale_description() -> None:
    """What is remembered of a cache is not used for another kind of cache in the same place."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    for dtype, blocks in ((torch.float32, 2), (torch.bfloat16, 4), (torch.float16, 4)):
        shape = (blocks, 4, HEADS, DIM)
        k = memory.view(dtype)[: blocks * 4 * HEADS * DIM].view(shape)
        key = tokens(1, dtype=torch.float32)
        torch.ops.kvx.write_kv(key, None, k, None, torch.tensor([5]), "BLOCK_NHD")
        assert torch.equal(k[1, 1], key[0].to(dtype))
    cache = torch.zeros(2, 4, HEADS, DIM)
    alive = weakref.ref(cache)
    torch.ops.kvx.write_kv(tokens(1), None, cache, None, torch.tensor([5]), "BLOCK_NHD")
    del cache
    gc.collect()
    assert alive() is None


def test_descriptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvx_core.ops.torch_ops, "_MAX_PLANS", 3)
    kvx_core.ops.torch_ops._plans.clear()
    caches = [torch.zeros(2, 4, HEADS, DIM) for _ in range(7)]
    for cache in caches:
        torch.ops.kvx.write_kv(tokens(1), None, cache, None, torch.tensor([5]), "BLOCK_NHD")
        assert len(kvx_core.ops.torch_ops._plans) <= 3
    assert all(torch.equal(cache[1, 1], tokens(1)[0].float()) for cache in caches)
