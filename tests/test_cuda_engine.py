"""Whole ways on a device: a model's cache to a paged one, to files, to a store, and back; lists of
numbers, stores in formats, packed caches, torch's operators.

Each test also runs on the CPU, so that a machine without a GPU shows whether the test is right.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import Tensor

import kvx_core.ops.torch_ops  # noqa: F401  torch.ops.kvx
from kvx_core import (
    CacheDesc,
    CacheView,
    Directory,
    KvCacheStore,
    Layout,
    PackedKVCache,
    Plan,
    Plane,
    Precision,
    PrefixStore,
    Section,
    Snapshot,
    StoreError,
    describe,
    device_status,
    gather_kv,
    migrate,
    verify,
    write_kv,
)
from kvx_core.stores.loads import Progress
from tests.calls import BACKENDS
from tests.facts import SAME_MODEL

LAYERS, HEADS, DIM = 3, 2, 32
FACTS = replace(SAME_MODEL, first_kv_head=0)
HAS_CUDA = "cuda" in [backend.name for backend in BACKENDS]


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(
                not HAS_CUDA, reason="needs a GPU, and a libkvx that was built with nvcc"
            ),
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def paged(
    device: str, blocks: int, size: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, CacheView]:
    """[layer, K | V, block, token, head, dim], as vLLM's FlashAttention has it; filled with 77."""
    storage = torch.full((LAYERS, 2, blocks, size, HEADS, DIM), 77.0, device=device).to(dtype)
    layers = [
        CacheDesc.from_kv(*[describe(half, Layout.BLOCK_NHD) for half in layer])
        for layer in storage
    ]
    return storage, CacheView(layers, FACTS)


def rows(storage: Tensor, table: Tensor, num_tokens: int) -> Tensor:
    """[layer, K | V, token, head, dim]: the tokens of a sequence, by torch's own indexing."""
    return storage[:, :, table].flatten(2, 3)[:, :, :num_tokens]


@torch.inference_mode()
def test_a_model_goes_on_with_what_a_paged_cache_has_kept(device: str, tmp_path: Path) -> None:
    """DynamicCache -> paged -> file -> DynamicCache; the same tokens as without the detour."""
    transformers = pytest.importorskip("transformers")
    from kvx_adapters import transformers as hf
    from tests.adapters.transformers_model import make_model

    model = make_model(num_hidden_layers=LAYERS, num_key_value_heads=HEADS, head_dim=DIM)
    model = model.to(device)
    prompt = torch.arange(3, 44, device=device)[None] % 97
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False)
    known = prompt.shape[1] - 1
    cache = transformers.DynamicCache(config=model.config)
    model(input_ids=prompt[:, :known], past_key_values=cache)
    held = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]

    storage, pages = paged(device, blocks=9, size=8)
    blocks = torch.randperm(9)[:6].to(device)
    middle = pages.at(pages.table_of(blocks[None]))
    assert migrate(hf.cache_view(cache, FACTS), middle, [known])
    assert verify(hf.cache_view(cache, FACTS), middle, [known]).ok
    for i, pair in enumerate(held):
        for kv, half in enumerate(pair):
            assert torch.equal(rows(storage, blocks, known)[i, kv], half[0].transpose(0, 1))
    assert (storage.flatten(2, 3)[:, :, _others(blocks, 8, known, 72)] == 77).all()

    section = Section(tuple(range(LAYERS)), pages, pages.table_of(blocks[None]))
    Snapshot.capture(prompt[0, :known], [section]).save(tmp_path / "prompt")
    again = transformers.DynamicCache(config=model.config)
    hf.reserve(again, model, batch_size=1, num_tokens=known)
    view = hf.cache_view(again, FACTS)
    with Snapshot.open(tmp_path / "prompt") as file:
        file.read(section.layers).restore(Section(section.layers, view, None), 0, known)
    for layer, pair in zip(again.layers, held, strict=True):
        assert torch.equal(layer.keys, pair[0])
        assert torch.equal(layer.values, pair[1])
    tokens = model.generate(prompt, past_key_values=again, max_new_tokens=12, do_sample=False)
    assert torch.equal(tokens, expected)
    if device == "cuda":
        device_status()


def _others(blocks: Tensor, size: int, known: int, slots: int) -> Tensor:
    """The slots that the first `known` tokens of a sequence leave alone."""
    offsets = torch.arange(size, device=blocks.device)
    used = (blocks[:, None] * size + offsets).flatten()[:known]
    left = torch.ones(slots, dtype=torch.bool, device=blocks.device)
    left[used] = False
    return left.nonzero()[:, 0]


@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float8_e4m3fn, None),
        (torch.float32, "q8_0"),
        (torch.bfloat16, "q8_0"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_store_gives_back_what_it_was_given(
    device: str, dtype: torch.dtype, format: str | None, seed: int, tmp_path: Path
) -> None:
    """From a cache with blocks of 16 to one with blocks of 5; the files are those of the CPU."""
    torch.manual_seed(seed)
    num_tokens = 45
    values = torch.randn(LAYERS, 2, 6, 16, HEADS, DIM)
    blocks = torch.randperm(6)[:3]
    tokens = torch.randint(0, 1000, (num_tokens,))

    def through(device: str) -> tuple[Tensor, dict[str, bytes]]:
        folder = tmp_path / device
        storage, view = paged(device, 6, 16, dtype)
        storage.copy_(values)
        store = _store(folder, dtype, format)
        section = Section(tuple(range(LAYERS)), view, view.table_of(blocks[None].to(device)))
        for start, stop in store.spans(num_tokens):
            snapshot = store.capture(tokens, start, stop, [section])
            assert snapshot is not None
            assert store.commit(snapshot) > 0
        match = _store(folder, dtype, format).lookup(tokens)
        assert match.num_tokens == num_tokens
        out, other = paged(device, 11, 5, dtype)
        into = torch.randperm(11)[:9]
        section = Section(section.layers, other, other.table_of(into[None].to(device)))
        store.load(match, 0, num_tokens, [section])
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.stat().st_size > 1000
        }
        left = torch.ones(11, dtype=torch.bool)
        left[into] = False
        assert (out[:, :, left.to(device)].float() == torch.tensor(77.0).to(dtype).float()).all()
        return rows(out, into.to(device), num_tokens).cpu(), files

    found, files = through(device)
    if format is None:
        assert torch.equal(
            found.view(torch.uint8), rows(values.to(dtype), blocks, num_tokens).view(torch.uint8)
        )
    if device != "cpu":
        expected, files_of_cpu = through("cpu")
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        assert files == files_of_cpu


def _store(folder: Path, dtype: torch.dtype, format: str | None) -> PrefixStore:
    return PrefixStore(
        Directory(folder),
        fingerprint=FACTS.fingerprint or "",
        num_layers=LAYERS,
        total_kv_heads=HEADS,
        precision=Precision.of(str(dtype), str(dtype)),
        chunk_tokens=16,
        accept="lossy",
        format=format,
    )


def test_captures_of_a_device_take_turns_in_pinned_memory(device: str, tmp_path: Path) -> None:
    """While nobody has an earlier one. It goes with the cache; a cache of the host has none."""
    torch.manual_seed(0)
    storage, view = paged(device, 6, 16)
    storage.copy_(torch.randn(storage.shape))
    blocks, store = torch.randperm(6)[:3].to(device), _store(tmp_path, torch.float32, None)
    section = Section(tuple(range(LAYERS)), view, view.table_of(blocks[None]))
    expected = rows(storage, blocks, 48).cpu()
    addresses, kept = [], []
    for turn in range(6):
        start = turn % 3 * 16
        snapshot = store.capture(range(48), start, start + 16, [section])
        assert snapshot is not None
        assert snapshot.memory is not None
        assert (snapshot.lease is None) is (device == "cpu")
        for layer in range(LAYERS):
            for kv, name in enumerate("kv"):
                found = torch.from_numpy(snapshot.array(f"layers.{layer}.{name}"))
                assert torch.equal(found, expected[layer, kv, start : start + 16])
        addresses.append(snapshot.memory.ctypes.data)
        if turn == 2:
            kept.append((snapshot, snapshot.digest()))
        del snapshot, found
    assert [one.digest() for one, _ in kept] == [digest for _, digest in kept]
    assert addresses[2] not in addresses[3:]
    if device == "cuda":
        assert len(set(addresses)) == 2
    seen = ref(view)
    del section, view
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("bad", [None, 9, 17])
def test_long_prompts_have_large_files(device: str, bad: int | None, tmp_path: Path) -> None:
    """Files of 2 MiB: threads write them, and read some while others are copied to the device."""
    layers, chunk, size, heads, dim = 4, 128, 16, 8, 128
    num_tokens = 20 * chunk + 40
    count = -(-num_tokens // size)

    def cache(seed: int) -> tuple[Tensor, Tensor, Section]:
        shape = layers, 2, count + 5, size, heads, dim
        generator = torch.Generator().manual_seed(seed)
        storage = torch.randint(-9999, 9999, shape, dtype=torch.int16, generator=generator)
        storage = storage.to(device)
        each = [
            [describe(half, Layout.BLOCK_NHD) for half in layer]
            for layer in storage.view(torch.bfloat16)
        ]
        view = CacheView([CacheDesc.from_kv(k, v) for k, v in each], FACTS)
        blocks = torch.randperm(count + 5, generator=generator)[:count].to(device)
        return storage, blocks, Section(tuple(range(layers)), view, view.table_of(blocks[None]))

    store = PrefixStore(
        Directory(tmp_path),
        fingerprint=FACTS.fingerprint or "",
        num_layers=layers,
        total_kv_heads=heads,
        precision=Precision.of("bfloat16"),
        chunk_tokens=chunk,
    )
    storage, blocks, section = cache(0)
    tokens = torch.arange(num_tokens)
    captured = [store.capture(tokens, *span, [section]) for span in store.spans(num_tokens)]
    assert all(store.commit_all([one for one in captured if one is not None]))
    match = store.lookup(tokens)
    assert match.num_tokens == num_tokens
    good = num_tokens
    if bad is not None:
        good, path = bad * chunk, tmp_path / match.spans[bad].names[0]
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    out, into, section = cache(1)
    before, progress = out.clone(), Progress()
    if bad is None:
        store.load(match, 0, num_tokens, [section], progress=progress)
    else:
        with pytest.raises(StoreError, match="have changed since"):
            store.load(match, 0, num_tokens, [section], progress=progress)
        assert not path.exists()
    assert progress.stop == good
    assert torch.equal(rows(out, into, good), rows(storage, blocks, good))
    left = _others(into, size, good, (count + 5) * size)
    assert torch.equal(out.flatten(2, 3)[:, :, left], before.flatten(2, 3)[:, :, left])


@pytest.mark.parametrize("seed", range(3))
def test_a_packed_cache_grows_as_a_concatenation_does(device: str, seed: int) -> None:
    torch.manual_seed(seed)
    cache, keys, values = PackedKVCache(), [], []
    for step in (7, 1, 1, 300, 1, 2):
        k, v = torch.randn(2, 3, step, HEADS * DIM, device=device).bfloat16()
        cache.append_packed(k, v)
        keys.append(k)
        values.append(v)
    assert torch.equal(cache.packed_keys(), torch.cat(keys, 1))
    assert torch.equal(cache.packed_values(), torch.cat(values, 1))


@pytest.mark.parametrize("seed", range(3))
def test_numbers_may_be_lists(device: str, seed: int) -> None:
    """Tables, slots, starts and lengths as lists; on a stream that is not torch's, too."""
    torch.manual_seed(seed)
    (src, pages), (dst, others) = paged(device, 7, 4), paged(device, 5, 6)
    src.copy_(torch.randn(src.shape))
    table, into = torch.randperm(7)[:4].view(2, 2), torch.randperm(5)[:4].view(2, 2)
    ends = pages.at(table.tolist(), starts=[1, 0]), others.at(into.tolist(), starts=[0, 2])
    stream = _new_stream() if device == "cuda" else None
    if device == "cuda":
        torch.cuda.synchronize()
    for which in (None, stream):
        dst.fill_(77)
        if device == "cuda":
            torch.cuda.synchronize()
        assert migrate(*ends, [6, 3], stream=which, new_positions=True)
        if device == "cuda":
            device_status(which)
        for kv in range(2):
            for row, (first, to, count) in enumerate(((1, 0, 6), (0, 2, 3))):
                want = rows(src, table[row].to(device), 8)[:, kv, first : first + count]
                got = rows(dst, into[row].to(device), 12)[:, kv, to : to + count]
                assert torch.equal(got, want)
        assert int((dst != 77).sum()) <= 9 * LAYERS * 2 * HEADS * DIM
    with Plan.migrate(*ends, [6, 3], new_positions=True) as plan:
        dst.fill_(77)
        plan.run([3, 1], dst_block_table=into.tolist())
        want = rows(src, table[0].to(device), 8)[:, :, 1:4]
        assert torch.equal(rows(dst, into[0].to(device), 12)[:, :, :3], want)
    key, value = torch.randn(2, 3, HEADS, DIM, device=device)
    write_kv(pages.layers[1], key, value, [5, -1, 9])
    assert torch.equal(src[1, 0].flatten(0, 1)[[5, 9]], key[[0, 2]])
    gathered = gather_kv(pages.layers[1], [[2, 1]], [7])
    assert torch.equal(gathered[1][0], rows(src, torch.tensor([2, 1], device=device), 7)[1, 1])


def _new_stream() -> int:
    stream: int = torch.cuda.Stream().cuda_stream  # type: ignore[no-untyped-call]
    return stream


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "F8_E4M3", "BF16"])
def test_a_store_in_formats_holds_what_the_cpu_holds(device: str, encoding: str) -> None:
    torch.manual_seed(4)
    tokens, query = torch.randn(2, 41, HEADS, 64), torch.randn(2 * HEADS, 64)

    def store(device: str) -> KvCacheStore:
        made = KvCacheStore(
            1, HEADS, 64, 50, key_encoding=encoding, value_encoding="Q8_0", placement=device
        )
        made.append(0, tokens[0, :40].to(device), tokens[1, :40].to(device))
        made.append_token(0, tokens[0, 40].to(device), tokens[1, 40].to(device))
        return made

    one, other = store(device), store("cpu")
    for kind in ("read_key_storage", "read_value_storage"):
        assert torch.equal(getattr(one, kind)(0).data.cpu(), getattr(other, kind)(0).data)
    assert torch.equal(one.read_keys(0, 3, 39).cpu(), other.read_keys(0, 3, 39))
    mixed = one.attend(0, query.to(device)).cpu()
    torch.testing.assert_close(mixed, other.attend(0, query), rtol=1e-4, atol=1e-4)


def test_a_state_has_its_slot_as_a_list(device: str) -> None:
    """A plane with a slot of its own, in a snapshot and back."""
    states = torch.randn(5, 2, 9, device=device)
    axes = ("block", "dim", "dim")
    plane = Plane.of(states, axes, "state", 1, tokens_per_entry=0, slots=[3], replicated=True)
    facts = replace(FACTS, num_layers=1)
    view = CacheView((), facts, dense=True, planes=(plane,))
    section = Section((1,), view, None, state_tokens=7)
    kept, snapshot = states.clone(), Snapshot.capture(range(7), [section])
    assert snapshot is not None
    states.fill_(77)
    assert snapshot.restore(section, 0, 7) == kept[3].nbytes
    assert torch.equal(states[3], kept[3])
    assert (states[[0, 1, 2, 4]] == 77).all()


@torch.inference_mode()
def test_a_packed_model_says_the_same(device: str) -> None:
    pytest.importorskip("transformers")
    from kvx_adapters import transformers as hf
    from tests.adapters.transformers_model import make_model

    model = make_model(num_hidden_layers=LAYERS, num_key_value_heads=HEADS, head_dim=DIM)
    model = model.to(device)
    prompt = torch.arange(3, 44, device=device)[None] % 97
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False)
    with_packed = hf.use_packed(model)
    found = model.generate(prompt, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    with_packed.remove()
    layer = found.past_key_values.layers[0]
    assert layer.kv_cache.seq_len == prompt.shape[1] + 11
    assert torch.equal(found.sequences, expected)


@torch.inference_mode()
def test_operators_are_compiled(device: str) -> None:
    """torch.ops.kvx in one graph of torch.compile, and what it writes."""
    storage, _ = paged(device, 5, 4)
    key, value = torch.randn(2, 6, HEADS, DIM, device=device)
    slots = torch.tensor([3, 19, -1, 0, 8, 11], device=device)
    expected = storage.clone()
    for half, new in zip(expected[0], (key, value), strict=True):
        half.flatten(0, 1)[slots[slots >= 0]] = new[slots >= 0]

    def step(k: Tensor, v: Tensor) -> Tensor:
        torch.ops.kvx.write_kv(k + 0, v + 0, storage[0, 0], storage[0, 1], slots, "BLOCK_NHD")
        return storage[0].sum()

    total = torch.compile(step, fullgraph=True, backend="aot_eager")(key, value)
    assert torch.equal(storage, expected)
    assert torch.equal(total, expected[0].sum())
