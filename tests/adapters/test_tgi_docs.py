"""docs/tgi.md: its snippets run one after the other, its tables agree with the adapter."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvx_adapters import tgi
from kvx_core import CacheView, SlotMapping
from tests.documents import Document
from tests.fakes.tgi import FLAVOURS, Batch, Cache, SimpleAllocator

ROOT = Path(__file__).parent.parent.parent
PAGE = Document("tgi.md")
TEXT = PAGE.text
NUM_LAYERS, LENGTHS = 3, [300, 7]


def test_the_snippets() -> None:
    caches = [Cache("flashdecoding", "cuda", "cuda") for _ in range(NUM_LAYERS)]
    other = [Cache("paged", "cuda", "cuda", num_blocks=40) for _ in range(NUM_LAYERS)]
    for layer_idx, cache in enumerate(caches):
        cache.key.normal_()
        cache.value.fill_(layer_idx)
    requests = [SimpleAllocator(caches[0]).allocate(n) for n in LENGTHS]
    batch: Any = Batch.of(requests, input_lengths=[1, 1], cache_lengths=[299, 6])
    batch.input_lengths_tensor = batch.input_lengths
    batch.cache_lengths_tensor = torch.tensor(LENGTHS)  # as generate_token has left them
    theirs_spec = other[0].spec()
    theirs_slots = torch.randperm(39 * 16)[: sum(LENGTHS)] + 16
    written: list[torch.Tensor] = []
    names: dict[str, Any] = {
        "batch": batch,
        "kv_cache": [
            SimpleNamespace(
                key=cache.key,
                value=cache.value,
                dtype=cache.dtype,
                store=lambda slots, **_: written.append(slots),
            )
            for cache in caches
        ],
        "num_blocks": caches[0].num_blocks,
        "theirs_slots": theirs_slots,
        "new_key": torch.randn(4, 2, 64),
        "new_value": torch.randn(4, 2, 64),
        "new_slots": torch.tensor([300, -1, 301]),
        "prefix_lens": torch.tensor([256, 0]),
        "window": 40,
    }
    assert len(PAGE.snippets()) == 4
    facts = tgi.cache_facts(
        theirs_spec,
        fingerprint="a model",
        rotary="half",
        rotary_dim=64,
        num_layers=NUM_LAYERS,
        window=0,
    )
    names["theirs"] = tgi.cache_view([(c.key, c.value) for c in other], theirs_spec, facts)
    PAGE.run(names)

    assert isinstance(names["view"], CacheView)
    first = requests[0][1]
    assert torch.equal(names["key"][0, 299], caches[0].load(first[299])[0])
    for i, slot in enumerate([*first, *requests[1][1]]):
        for src, dst in zip(caches, other, strict=True):
            assert torch.equal(dst.load(int(theirs_slots[i]))[0], src.load(slot)[0])
    assert [slots.tolist() for slots in written] == [[300, 301]]
    assert names["shared"].tolist() == first[:256]
    assert isinstance(names["slots"], SlotMapping)
    assert names["held"].tolist() == first[260:] + requests[1][1]


def test_the_table_of_caches() -> None:
    section = TEXT.partition("## What is described")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in re.findall(r"^\| `[a-z].*", section, re.M)]
    listed = set()
    for attention, systems, block_size, k_shape, v_shape, fp8 in rows:
        words = re.findall(r"`(\w+)`", systems)
        places = [tuple(words)] if words[0] == "ipex" else [(word, "") for word in words]
        for system, device in places:
            name = attention.strip(" `")
            cache = Cache(name, system, device, num_blocks=5, num_heads=3, head_size=80)
            listed.add((name, system, device))
            assert int(block_size) == cache.block_size
            sizes = {"B": 5, "N": cache.block_size, "H": 3, "D": 80, "x": cache.spec().pack}
            k, v = (re.findall(r"\[(.*?)\]", shape) for shape in (k_shape, v_shape))
            spec = cache.spec()
            if k:
                assert spec.k_shape == sized(k[0], sizes)
                assert spec.v_shape == sized((v or k)[0], sizes)
            for dtype, word in ((torch.float8_e4m3fn, "E4M3"), (torch.float8_e5m2, "E5M2")):
                assert (word in fp8) == is_described(name, system, device, dtype), (name, word)
    assert listed == {(a, s, d if s == "ipex" else "") for a, s, d in FLAVOURS}


def sized(shape: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """The numbers of "B, H, D/x, N, x"."""
    return tuple(eval(axis.replace("/", "//"), {}, sizes) for axis in shape.split(","))


def is_described(attention: str, system: str, device: str, dtype: torch.dtype) -> bool:
    try:
        Cache(attention, system, device, dtype=dtype).spec()
    except NotImplementedError:
        return False
    return True


def test_the_example_prints_what_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    runpy.run_path(str(ROOT / "examples" / "tgi_kv_cache_store.py"), run_name="__main__")
    shown = TEXT.partition("$ python examples/tgi_kv_cache_store.py\n")[2].partition("```")[0]
    assert capsys.readouterr().out == shown
