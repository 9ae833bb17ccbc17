"""The shapes of DeepSeek-V4's caches: kvx_core/hybrid/schema.py and sizes.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError, replace
from enum import Enum
from math import lcm

import pytest

from kvx_core import InvalidArgumentError
from kvx_core.hybrid import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    AttentionType,
    DSV4Config,
    KVCacheManager,
    LayerSpec,
    build_schema,
    bytes_per_token,
    compute_block_budget,
    gqa_bytes_per_token,
    hf_config,
    schedule_of,
)
from tests.hybrid.schemas import FLASH, PRO

CSA, HCA, SWA = AttentionType.CSA, AttentionType.HCA, AttentionType.SWA


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
    ("attn", "ratio", "says"),
    [
        (CSA, 3, "csa_compression_ratio is 3, expected a divisor of 128"),
        (HCA, 256, "hca_compression_ratio is 256, expected a divisor of 128"),
    ],
)
def test_ratios_that_no_block_fits(attn: AttentionType, ratio: int, says: str) -> None:
    """Only the ratio of the layer's own type is read."""
    config = DSV4Config(**{f"{attn}_compression_ratio": ratio})
    with pytest.raises(InvalidArgumentError, match=says):
        build_schema(config, LayerSpec(0, attn))
    assert build_schema(config, LayerSpec(0, HCA if attn is CSA else CSA)).entries_per_block
    assert build_schema(config, LayerSpec(0, SWA)).entries_per_block == 0


@pytest.mark.parametrize("ratios", [(4, 64), (16, 32), (8, 8), (1, 2), (128, 4)])
def test_any_ratios_that_divide_a_block(ratios: tuple[int, int]) -> None:
    """Whatever their least common multiple: 128 // ratio entries, as many rows in the tails."""
    config = DSV4Config(csa_compression_ratio=ratios[0], hca_compression_ratio=ratios[1])
    for attn, ratio, b in ((CSA, ratios[0], ratios[0]), (HCA, ratios[1], 0)):
        schema = build_schema(config, LayerSpec(0, attn))
        assert schema.entries_per_block == 128 // ratio == schema.entries(128)
        assert (schema.tail_buffer_size_a, schema.tail_buffer_size_b) == (ratio, b)
        assert schema.compression_ratio == ratio
        assert schema.blocks(129) == (2 if ratio == 1 else 1)


class Foreign:
    """An object of another library with some fields."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


SIX = {
    "head_dim": 96,
    "rope_dim": 32,
    "indexer_head_dim": 48,
    "sliding_window": 7,
    "csa_compression_ratio": 8,
    "hca_compression_ratio": 64,
}


class Theirs(Enum):
    """An AttentionType of another library."""

    CSA, HCA, SWA = range(3)


@pytest.mark.parametrize("attn", [CSA, HCA, SWA])
def test_configs_of_others(attn: AttentionType) -> None:
    """Any object with the fields: those that are read, and no others."""
    spec = LayerSpec(3, attn)
    wanted = build_schema(DSV4Config(**SIX), spec)
    assert build_schema(Foreign(**SIX), spec) == wanted  # type: ignore[arg-type]
    theirs = Foreign(layer_idx=3, attn=Theirs[attn.name])
    assert build_schema(Foreign(**SIX), theirs) == wanted  # type: ignore[arg-type]
    names = {"head_dim", "rope_dim", "sliding_window"}
    names |= {CSA: {"csa_compression_ratio", "indexer_head_dim"}, SWA: set()}.get(
        attn, {"hca_compression_ratio"}
    )
    read = {name: value for name, value in SIX.items() if name in names}
    assert build_schema(Foreign(**read), spec) == wanted  # type: ignore[arg-type]
    for name in read:
        without = {other: value for other, value in read.items() if other != name}
        with pytest.raises(InvalidArgumentError, match=f"config is a Foreign.* with {name}"):
            build_schema(Foreign(**without), spec)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match=f"{name} is 0, expected 1 to"):
            build_schema(Foreign(**read | {name: 0}), spec)  # type: ignore[arg-type]
    assert schedule_of([8, 64, 0], 3, Foreign(**SIX)) == [  # type: ignore[arg-type]
        LayerSpec(0, CSA),
        LayerSpec(1, HCA),
        LayerSpec(2, SWA),
    ]
    caches = KVCacheManager(Foreign(**SIX), [theirs], 1, 200)  # type: ignore[arg-type, list-item]
    assert caches.schemas == {3: wanted}


def test_a_config_of_transformers() -> None:
    """Its own class, with compress_ratios, which it keeps as layer_types, and without any."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this transformers has no DeepSeek-V4")
    pro = transformers.DeepseekV4Config(num_hidden_layers=61, compress_ratios=PRO)
    assert hf_config(pro) == (DSV4Config(), schedule_of(PRO, 61))
    default = transformers.DeepseekV4Config()
    numbers, schedule = hf_config(default)
    assert numbers == DSV4Config()
    assert [spec.attn for spec in schedule] == [HCA, HCA, *[HCA, CSA] * 20, HCA]
    other = transformers.DeepseekV4Config(
        num_hidden_layers=3,
        head_dim=128,
        qk_rope_head_dim=32,
        index_head_dim=64,
        sliding_window=24,
        compress_rate_csa=8,
        compress_rate_hca=64,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
    )
    same = DSV4Config(128, 32, 64, 24, 8, 64)
    assert hf_config(other) == (same, [LayerSpec(i, a) for i, a in enumerate((SWA, CSA, HCA))])
    for attn in (CSA, HCA, SWA):
        spec = LayerSpec(0, attn)
        assert build_schema(other, spec) == build_schema(same, spec)
    assert schedule_of([8, 64], 2, other) == schedule_of([8, 64], 2, same)
    caches = KVCacheManager(other, hf_config(other)[1], 1, 200)
    assert [schema.compression_ratio for schema in caches.schemas.values()] == [0, 8, 64]


EIGHT = {"csa_compression_ratio": 8, "hca_compression_ratio": 64}
JSON = {
    "num_hidden_layers": 43,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_ratios": FLASH,
}
NAMES = ["sliding_attention"] * 2 + [
    "compressed_sparse_attention",
    "heavily_compressed_attention",
] * 20


def test_a_config_json() -> None:
    names = [*NAMES, "compressed_sparse_attention"]
    wanted = DSV4Config(), schedule_of(FLASH, 43)
    assert hf_config(JSON) == hf_config(Foreign(**JSON)) == wanted
    assert hf_config(JSON | {"compress_ratios": None, "layer_types": names}) == wanted
    assert hf_config(JSON | {"layer_types": names}) == wanted
    plain = {key: value for key, value in JSON.items() if key != "compress_ratios"}
    assert hf_config(plain | {"layer_types": names, "model_type": "deepseek_v4"}) == wanted
    with pytest.raises(InvalidArgumentError, match=r"config is .* with csa_compression_ratio"):
        hf_config(plain | {"layer_types": names, "model_type": "llama"})
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64}
    given = plain | {"layer_types": names, "compress_rates": rates}
    assert hf_config(given)[0] == replace(DSV4Config(), **EIGHT)
    assert hf_config(given | {"compress_rate_csa": 16})[0].csa_compression_ratio == 16
    share = {key: value for key, value in JSON.items() if key != "qk_rope_head_dim"}
    assert hf_config(share | {"partial_rotary_factor": 0.125}) == wanted


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"compress_ratios": None}, "config has neither compress_ratios nor layer_types"),
        ({"compress_ratios": [4]}, "compress_ratios has 1 numbers, expected at least 43"),
        ({"layer_types": NAMES[:3]}, "layer_types is a list, expected a list of at least 43 names"),
        ({"layer_types": ["mla"] * 43}, r"layer_types\[0\] is 'mla', expected 'sliding_attention'"),
        (
            {"layer_types": ["heavily_compressed_attention"] * 43},
            r"layer_types\[0\] is 'heavily_compressed_attention' and compress_ratios says a layer "
            "of type SWA, expected one type",
        ),
        ({"num_hidden_layers": None}, "num_hidden_layers is None, expected an integer"),
        ({"qk_rope_head_dim": None}, "config is a SimpleNamespace, .* with rope_dim"),
        ({"index_head_dim": 24}, "indexer_head_dim is 24, expected a multiple of 16"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        hf_config(JSON | fields)


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
    with pytest.raises(InvalidArgumentError, match=r"compress_ratios is None, .* hf_config"):
        schedule_of(None, 2)  # type: ignore[arg-type]
    for csa, hca, says in (
        (8, 8, "hca_compression_ratio is 8, the ratio of CSA layers, too"),
        (1, 8, "csa_compression_ratio is 1, the ratio of SWA layers, too"),
    ):
        config = DSV4Config(csa_compression_ratio=csa, hca_compression_ratio=hca)
        with pytest.raises(InvalidArgumentError, match=says):
            schedule_of([8], 1, config)


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
