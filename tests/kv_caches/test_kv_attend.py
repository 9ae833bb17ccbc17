"""Attention over the tokens of a KvCacheStore, which libkvx decodes as it goes. Spec: E.21

The oracle is attention in float64 over the decoded keys and values.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import kvx_core
from kvx_core import DType, InvalidArgumentError, KvCacheStore
from tests.kv_stores import DIM, FORMATS, HEADS, OTHERS, SEEDS, dim_of, fill, some, store_of
from tests.native import ROOT

BOUND = 1e-5

pytestmark = pytest.mark.usefixtures("one_thread")


def oracle(
    store: KvCacheStore,
    layer: int,
    query: Tensor,
    start: int = 0,
    end: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """In float64, one query head after the other."""
    end = store.layer_seq_len(layer) if end is None else end
    keys = store.read_keys(layer, start, end).double()
    values = store.read_values(layer, start, end).double()
    repeats = len(query) // store.num_heads
    scale = store.head_dim**-0.5 if scale is None else scale
    mixed = []
    for head, one in enumerate(query.double()):
        scores = keys[head // repeats] @ one * scale
        mixed.append(scores.softmax(0) @ values[head // repeats])
    return torch.stack(mixed).float()


def close(found: Tensor, wanted: Tensor, values: Tensor) -> None:
    """Within BOUND of the largest value, beyond which no weighted mean of values lies."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=BOUND * float(values.abs().max()))


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: dtype.name)
def test_every_format(dtype: DType) -> None:
    for seed, other in zip(SEEDS, OTHERS, strict=True):
        dim = dim_of(dtype, other)
        store = fill(store_of(dtype, other, 150), some(147, seed, dim=dim))
        random = torch.Generator().manual_seed(seed)
        for repeats in (1, 2, 5):
            query = torch.randn(repeats * HEADS, dim, generator=random) / 8
            found = store.attend(1, query)
            close(found, oracle(store, 1, query), store.read_values(1))
            pieces = store._attention.in_pieces(1, 0, 147, query.T.contiguous().T, dim**-0.5)
            close(pieces, found, store.read_values(1))


@pytest.mark.parametrize("dim", [1, 15, 16, 17, 80, 130])
def test_odd_sizes(dim: int) -> None:
    for heads, repeats, length in ((1, 1, 1), (2, 3, 129), (3, 7, 128), (1, 4, 600)):
        store = KvCacheStore(1, heads, dim, length, key_encoding="float16", value_encoding="F32")
        fill(store, some(length, dim, layers=1, heads=heads, dim=dim) / 4)
        query = torch.randn(heads * repeats, dim, generator=torch.Generator().manual_seed(dim))
        close(store.attend(0, query), oracle(store, 0, query), store.read_values(0))


def test_ranges() -> None:
    """Of all numbers of tokens around the sizes of tiles and chunks."""
    store = fill(store_of("Q8_0", "float8_e4m3fn", 800), some(800, 4))
    query = torch.randn(2 * HEADS, DIM, generator=torch.Generator().manual_seed(1)) / 4
    for count, start in itertools.product((1, 15, 16, 17, 127, 128, 129, 500), (0, 1, 299)):
        end = start + count
        found = store.attend(0, query, start=start, end=end)
        values = store.read_values(0, start, end)
        close(found, oracle(store, 0, query, start, end), values)
    close(store.attend(1, query, scale=2.0), oracle(store, 1, query, scale=2.0), values)
    assert torch.equal(store.attend(0, query), store.attend(0, query, start=0, end=800))


def test_many_chunks() -> None:
    """So many tokens that a chunk has more than the least."""
    store = KvCacheStore(1, 1, 8, 9000, key_encoding="bfloat16", value_encoding="float16")
    fill(store, some(8999, 5, layers=1, heads=1, dim=8) / 16)
    query = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    close(store.attend(0, query), oracle(store, 0, query), store.read_values(0))


def test_a_token_of_this_step_is_seen() -> None:
    store = fill(store_of("float32", "float32"), some(5, 1))
    key, value = torch.full((2, HEADS, DIM), 3.0)
    query = torch.full((HEADS, DIM), 50.0)
    store.append_token(0, key, value)
    torch.testing.assert_close(store.attend(0, query), value)
    assert not torch.allclose(store.attend(0, query, end=5), value)
    assert not torch.allclose(store.attend(1, query), value)


def test_queries_of_torch_and_numpy() -> None:
    store = fill(store_of(), some(20, 1))
    query = torch.randn(6, DIM, generator=torch.Generator().manual_seed(3))
    wanted = store.attend(0, query)
    assert wanted.dtype == torch.float32
    found = store.attend(0, query.numpy())
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, wanted.numpy())
    assert torch.equal(store.attend(0, query.T.contiguous().T), wanted)
    assert torch.equal(store.attend(0, query.clone().requires_grad_()), wanted)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        given = query.to(dtype)
        found = store.attend(0, given)
        assert found.dtype == dtype
        assert torch.equal(found, store.attend(0, given.float()).to(dtype))
    fixed = query.numpy().copy()
    fixed.flags.writeable = False
    np.testing.assert_array_equal(store.attend(0, fixed), wanted.numpy())
    opposite = torch.complex(torch.zeros(6, DIM), -query).conj().imag  # has the negative bit
    assert torch.equal(store.attend(0, opposite), wanted)


@pytest.mark.parametrize("tokens", [40, 300])
def test_scores_that_are_not_finite(tokens: int) -> None:
    """As torch's softmax has it: all weight to none, NaN from NaN, and huge scores no overflow."""
    store = KvCacheStore(1, 1, 16, 300, key_encoding="float32", value_encoding="float32")
    numbers = some(tokens, 6, layers=1, heads=1, dim=16) / 64
    query = torch.zeros(1, 16)
    query[0, 0] = 1
    for first, at in itertools.product((1e30, -1e30, -torch.inf, torch.nan), (0, 7, tokens - 1)):
        changed = numbers.clone()
        changed[0, 0, at, 0, 0] = first
        store.clear()
        fill(store, changed)
        found, wanted = store.attend(0, query), oracle(store, 0, query)
        torch.testing.assert_close(found, wanted, rtol=0, atol=BOUND, equal_nan=True)
    changed = numbers.clone()
    changed[0, 0, :, 0, 0] = -torch.inf
    store.clear()
    assert fill(store, changed).attend(0, query).isnan().all()
    changed[0, 0, tokens // 2 :, 0, 0] = 1.0  # whole chunks have no weight
    store.clear()
    fill(store, changed)
    torch.testing.assert_close(store.attend(0, query), oracle(store, 0, query), rtol=0, atol=BOUND)


def test_the_number_of_threads_changes_no_bit() -> None:
    store = KvCacheStore(1, 8, 128, 4096, key_encoding="Q8_0", value_encoding="Q8_0")
    fill(store, some(4000, 7, layers=1, heads=8, dim=128))
    query = torch.randn(32, 128, generator=torch.Generator().manual_seed(4)) / 8
    found = []
    for threads in (1, 2, 5):
        kvx_core.set_num_threads(threads)
        found += [store.attend(0, query) for _ in range(3)]
    kvx_core.set_num_threads(0)
    assert all(torch.equal(one, found[0]) for one in found)


def test_it_is_faster_than_to_decode_everything_first() -> None:
    """By processor time, of one thread; benchmarks/kv_store.py has the figures."""
    store = KvCacheStore(1, 8, 128, 4096, key_encoding="Q8_0", value_encoding="Q4_0")
    fill(store, some(4096, 8, layers=1, heads=8, dim=128))
    query = torch.randn(8, 4, 128, generator=torch.Generator().manual_seed(4)) / 8

    def decode_first() -> Tensor:
        scores = query @ store.read_keys(0).transpose(1, 2)
        return scores.softmax(-1) @ store.read_values(0)

    def seconds(call: Callable[[], object]) -> float:
        begin = time.process_time()
        call()
        return time.process_time() - begin

    kvx_core.set_num_threads(1)
    ours = min(seconds(lambda: store.attend(0, query.view(32, 128))) for _ in range(15))
    theirs = min(seconds(decode_first) for _ in range(15))
    kvx_core.set_num_threads(0)
    assert ours < 1.1 * theirs


DIGEST = """
import hashlib, torch
from tests.kv_stores import fill, some, store_of

store = fill(store_of("Q8_0", "Q4_0", 300), some(300, 1))
query = torch.randn(6, store.head_dim, generator=torch.Generator().manual_seed(1))
print(hashlib.sha256(store.attend(1, query).numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_the_instruction_set_changes_no_bit() -> None:
    digests = set()
    for isa in ("portable", "avx2", "avx512", "avx512vbmi"):
        run = subprocess.run(
            ["/usr/bin/env", f"KVX_CPU_ISA={isa}", sys.executable, "-c", DIGEST],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(run.stdout)
    assert len(digests) == 1


def test_what_is_refused() -> None:
    store = fill(store_of(), some(5, 1))
    good = torch.zeros(HEADS, DIM)
    for query, sentence in (
        (torch.zeros(4, DIM), r"query.shape is \(4, \d+\), expected \(num_q_heads, head_dim \d+\)"),
        (torch.zeros(HEADS, DIM - 1), "query.shape is"),
        (torch.zeros(0, DIM), "query.shape is"),
        (torch.zeros(DIM), "query.shape is"),
        (good.long(), "query.dtype is torch.int64, expected a float dtype"),
        (good.to("meta"), "query.device is meta, expected cpu, where the store is"),
        (np.full((HEADS, DIM), "x"), "query.dtype is"),
        ([1.0], "query is a list, expected a torch.Tensor"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"^{sentence}"):
            store.attend(0, query)
    for start, end in ((5, 5), (2, 2)):
        with pytest.raises(
            InvalidArgumentError, match=rf"^positions {start} to {end} are no token"
        ):
            store.attend(0, good, start=start, end=end)
    with pytest.raises(InvalidArgumentError, match=r"^end is 6, expected 0 to 5"):
        store.attend(0, good, end=6)
    for scale in (True, "1", torch.tensor(1.0)):
        with pytest.raises(InvalidArgumentError, match=r"^scale is"):
            store.attend(0, good, scale=scale)  # type: ignore[arg-type]
    for infinite in (float("inf"), float("nan"), 1e300):
        with pytest.raises(InvalidArgumentError, match=r"^attend\.scale is"):
            store.attend(0, good, scale=infinite)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_torch_s_defaults_do_not_matter(dtype: torch.dtype) -> None:
    query = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
    found = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            store = KvCacheStore(1, 2, 32, 8, key_encoding="Q8_0", value_encoding="float32")
            tokens = torch.linspace(-1, 1, 5 * 64, dtype=torch.float32).view(5, 2, 32)
            store.append(0, tokens, tokens)
            found.append((store.attend(0, query), store.read_keys(0)))
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype is torch.float32
        assert torch.equal(one, other)


def test_queries_of_numpy_in_any_order() -> None:
    store = KvCacheStore(1, 2, 32, 8, key_encoding="Q8_0", value_encoding="float32")
    tokens = torch.linspace(-1, 1, 5 * 64).view(5, 2, 32)
    store.append(0, tokens, tokens)
    query = np.random.default_rng(7).standard_normal((4, 32), np.float32)
    right = store.attend(0, query, scale=0.25)
    assert np.array_equal(store.attend(0, query[::-1][::-1], scale=np.float32(0.25)), right)
    assert np.array_equal(store.attend(0, query[:, ::-1].copy()[:, ::-1], scale=0.25), right)
    assert np.array_equal(store.attend(0, query.astype(">f4"), scale=0.25), right)
    with pytest.raises(InvalidArgumentError, match=r"query\.layout is .*sparse.*to_dense"):
        store.attend(0, torch.from_numpy(query).to_sparse())
    with pytest.raises(InvalidArgumentError, match=r"^scale is 1000.*float32"):
        store.attend(0, query, scale=10**400)
