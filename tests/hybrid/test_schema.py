"""The shapes of DeepSeek-V4's caches: kvx_core/hybrid/schema.py and sizes.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError
from math import lcm

import pytest

from kvx_core import InvalidArgumentError
from kvx_core.hybrid import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    AttentionType,
    DSV4Config,
    LayerSpec,
    build_schema,
    bytes_per_token,
    compute_block_budget,
    gqa_bytes_per_token,
    schedule_of,
)

CSA, HCA, SWA = AttentionType.CSA, AttentionType.HCA, AttentionType.SWA

# compress_ratios of the published config.json files; the last 0 is the layer that predicts a second
# token.
PRO = [128, 128, *[4, 128] * 29, 4, 0]
FLASH = [0, 0, *[4, 128] * 20, 4, 0]


@pytest.mark.parametrize(
    ("attn", "entries", "indexer", "tails"),
    [(CSA, 32, (32, 128), (4, 4, 8)), (HCA, 1, (0, 0), (128, 0, 128)), (SWA, 0, (0, 0), (0, 0, 0))],
)
def test_schema(
    attn: AttentionType, entries: int, indexer: tuple[int, int], tails: tuple[int, int, int]
) -> None:
    schema = build_schema(DSV4Config(), LayerSpec(5, attn))
    assert (schema.layer_idx, schema.attn_type) == (5, attn)
    assert schema.entries_per_block == entries
    assert (schema.indexer_entries_per_block, schema.indexer_head_dim) == indexer
    assert (schema.entry_head_dim, schema.rope_dim, schema.nope_dim) == (512, 64, 448)
    assert schema.swa_window_size == 128
    found = schema.tail_buffer_size_a, schema.tail_buffer_size_b, schema.tail_buffer_size
    assert found == tails
    assert schema.needs_inv_scale
    assert schema.compression_ratio == {CSA: 4, HCA: 128, SWA: 0}[attn]
    with pytest.raises(FrozenInstanceError):
        schema.layer_idx = 6  # type: ignore[misc]


def test_a_block_holds_complete_entries_of_both_types() -> None:
    assert lcm(4, 128) == BLOCK_SIZE_ORIGINAL_TOKENS == 128


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        ((3, 128), "csa_compression_ratio is 3, expected a divisor of 128"),
        ((4, 256), "hca_compression_ratio is 256, expected a divisor of 128"),
        ((4, 64), "least common multiple of csa_compression_ratio 4 and .* 64 is 64, expected 128"),
    ],
)
def test_ratios_that_no_block_fits(ratios: tuple[int, int], says: str) -> None:
    config = DSV4Config(csa_compression_ratio=ratios[0], hca_compression_ratio=ratios[1])
    with pytest.raises(InvalidArgumentError, match=says):
        build_schema(config, LayerSpec(0, CSA))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"head_dim": 0}, "head_dim is 0, expected 1 to"),
        ({"rope_dim": 512}, "rope_dim is 512, expected less than head_dim, 512"),
        ({"indexer_head_dim": 24}, "indexer_head_dim is 24, expected a multiple of 16"),
        ({"sliding_window": 1.5}, "sliding_window is 1.5, expected an integer"),
    ],
)
def test_configurations_that_no_model_has(fields: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        DSV4Config(**fields)


def test_a_layer_has_a_type() -> None:
    with pytest.raises(InvalidArgumentError, match="attn is 'mla', expected an AttentionType"):
        LayerSpec(0, "mla")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratios", "layers", "counts"), [(PRO, 61, (30, 31, 0)), (FLASH, 43, (21, 20, 2))]
)
def test_schedules(ratios: list[int], layers: int, counts: tuple[int, int, int]) -> None:
    assert len(ratios) == layers + 1
    schedule = schedule_of(ratios, layers)
    found = Counter(spec.attn for spec in schedule)
    assert (found[CSA], found[HCA], found[SWA]) == counts
    assert [spec.layer_idx for spec in schedule] == list(range(layers))
    assert (schedule[2].attn, schedule[3].attn, schedule[-1].attn) == (CSA, HCA, CSA)


def test_schedules_that_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="has 2 numbers, expected at least 3"):
        schedule_of([4, 128], 3)
    with pytest.raises(InvalidArgumentError, match=r"compress_ratios\[1\] is 8, expected one of 0"):
        schedule_of([4, 8], 2)


@pytest.mark.parametrize(
    ("context", "requests", "blocks"),
    [
        (4096, 8, 281),
        (1048576, 4, 36044),
        (131072, 16, 18022),
        (1280, 1, 11),
        (1_000_000, 1, 8593),
        (128, 1, 1),
        (127, 1, 0),
    ],
)
def test_budget(context: int, requests: int, blocks: int) -> None:
    both = [LayerSpec(0, SWA), LayerSpec(1, CSA), LayerSpec(2, HCA), LayerSpec(3, CSA)]
    config = DSV4Config()
    assert compute_block_budget(config, both, context, requests) == {"csa": blocks, "hca": blocks}
    assert compute_block_budget(config, both[:1], context, requests) == {}
    assert compute_block_budget(config, both[:2], context, requests) == {"csa": blocks}


# --- bytes per token ---------------------------------------------------------------------------

V32 = 61 * (656 + 132)  # DeepSeek-V3.2: a latent of 656 bytes and an indexer key of 132 per layer


@pytest.mark.parametrize(
    ("entry", "indexer", "pro", "flash"),
    [
        (584, 68, 5031.44, 3514.25),  # as engines keep them, with MXFP4 indexer keys
        (584, 132, 5511.44, 3850.25),  # with FP8 indexer keys
        (580, 72, 5030.47, 3513.63),  # PagedCache
        (1024, 256, 9848.00, 6880.00),  # BF16
    ],
)
def test_bytes_per_token(entry: int, indexer: int, pro: float, flash: float) -> None:
    for ratios, layers, wanted in ((PRO, 61, pro), (FLASH, 43, flash)):
        found = bytes_per_token(
            schedule_of(ratios, layers), entry_bytes=entry, indexer_bytes=indexer
        )
        assert found == pytest.approx(wanted, abs=0.01)


def test_headline() -> None:
    """9.55 and 13.68 times smaller than DeepSeek-V3.2; 2 % of eight KV heads of 128 in BF16."""
    sizes = [bytes_per_token(schedule_of(ratios, n)) for ratios, n in ((PRO, 61), (FLASH, 43))]
    assert [round(V32 / size, 2) for size in sizes] == [9.55, 13.68]
    dense = [gqa_bytes_per_token(61), gqa_bytes_per_token(43)]
    assert dense == [249_856, 176_128]
    shares = [100 * size / whole for size, whole in zip(sizes, dense, strict=True)]
    assert [round(share, 2) for share in shares] == [2.01, 2.0]
    assert round(sizes[0] * 2**20 / 2**30, 2) == 4.91
    assert round(sizes[1] * 2**20 / 2**30, 2) == 3.43
