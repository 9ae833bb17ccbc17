"""Whole ways on a device: a model's cache to a paged one, to files, to a store, and back.

Each test also runs on the CPU, so that a machine without a GPU shows whether the test is right.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvx_core import (
    CacheDesc,
    CacheView,
    Directory,
    Layout,
    PackedKVCache,
    Precision,
    PrefixStore,
    Section,
    Snapshot,
    describe,
    device_status,
    migrate,
    verify,
)
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
    from tests.adapters.test_transformers import make_model

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
    Snapshot.capture(prompt[0, :known].cpu(), [section]).save(tmp_path / "prompt")
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("format", [None, "q8_0"])
@pytest.mark.parametrize("seed", range(3))
def test_a_store_gives_back_what_it_was_given(
    device: str, dtype: torch.dtype, format: str | None, seed: int, tmp_path: Path
) -> None:
    """From a cache with blocks of 16 to one with blocks of 5; the files are those of the CPU."""
    if format and dtype == torch.float8_e4m3fn:
        pytest.skip("FP8 needs scales to become q8_0")
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
