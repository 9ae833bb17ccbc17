"""KV cache groups: vLLM's own objects through layer_groups and group_view.

The configs and the buffer are made by the functions that the engine itself calls; the attention
layers are stand-ins with the attributes that an Attention has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import vllm
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    Layout,
    OutOfRangeError,
    UnsupportedError,
    describe,
    gather_kv,
    migrate,
    write_kv,
)
from tests.adapters.test_vllm import rows_of
from tests.facts import SAME_MODEL
from tests.fakes.vllm import LAYOUTS, D, H, N, needs_vllm, random_tokens
from tests.states import GDN_CONFIG

pytestmark = needs_vllm

VERSION = "0.32.0"
Groups = Sequence[tuple[Sequence[str], Any]]


def backend(name: str, **fields: Any) -> Any:
    return type(f"{name}Backend", (), {"get_name": staticmethod(lambda: name)} | fields)


def attention(spec: Any, name: str = "FLASH_ATTN", **fields: Any) -> Any:
    """What layer_groups and group_view ask an attention layer."""
    defaults = {
        "attn_backend": backend(name),
        "kv_cache_dtype": "auto",
        "sliding_window": getattr(spec, "sliding_window", None),
        "kv_sharing_target_layer_name": None,
        "_k_scale": torch.tensor(0.5),
        "_v_scale": torch.tensor(0.25),
    }
    return SimpleNamespace(**(defaults | fields))


def full(**fields: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        **({"block_size": N, "num_kv_heads": H, "head_size": D, "dtype": torch.bfloat16} | fields)
    )


def window(size: int, **fields: Any) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    defaults = {"block_size": N, "num_kv_heads": H, "head_size": D, "dtype": torch.bfloat16}
    return SlidingWindowSpec(sliding_window=size, **(defaults | fields))


@dataclass
class Engine:
    config: Any
    layers: dict[str, Any]
    kv_caches: dict[str, Tensor]

    def groups(self, version: str = VERSION) -> tuple[vllm.LayerGroup, ...]:
        return vllm.layer_groups(self.config, self.layers, version)

    def view(self, group: vllm.LayerGroup) -> tuple[Any, int]:
        return vllm.group_view(
            group, self.kv_caches, CacheFacts(engine="vllm", fingerprint="f"), self.layers
        )


def engine(
    groups: Groups,
    layout: str = "LBNHC",
    *,
    num_blocks: int = 11,
    kernel_block_sizes: list[int] | None = None,
    **fields: Any,
) -> Engine:
    """By get_kv_cache_config_from_groups and allocate_kv_cache, as an engine does it."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    resolved = KVCacheLayout[layout]
    settings = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: resolved,
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=None,
        ),
    )
    specs = [KVCacheGroupSpec(list(names), spec) for names, spec in groups]
    config = get_kv_cache_config_from_groups(settings, specs, 1 << 24)
    config.kv_cache_layout = layout
    sizes = kernel_block_sizes or [spec.block_size for _, spec in groups]
    return Engine(
        config,
        {name: attention(spec, **fields) for names, spec in groups for name in names},
        allocate_kv_cache(config, torch.device("cpu"), resolved, sizes),
    )


def names(*indices: int) -> list[str]:
    return [f"model.layers.{i}.self_attn.attn" for i in indices]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hybrid_groups_share_one_buffer(layout: str) -> None:
    """Gemma-like: two groups of a window and one of full attention lie over each other."""
    hybrid = engine(
        [(names(0, 3), window(32)), (names(1, 4), window(32)), (names(2, 5), full())], layout
    )
    groups = hybrid.groups()
    assert [group.layers for group in groups] == [(0, 3), (1, 4), (2, 5)]
    assert [group.window for group in groups] == [32, 32, 0]
    assert [group.encoding for group in groups] == ["values"] * 3
    views = []
    for group in groups:
        view, kernel_blocks = hybrid.view(group)
        assert kernel_blocks == 1
        assert view.null_block_id == vllm.NULL_BLOCK_ID
        assert view.facts == CacheFacts(
            engine="vllm",
            fingerprint="f",
            window=group.window,
            num_layers=2,
            first_layer=None,  # they do not follow each other
        )
        views.append(view)
    assert views[0].layers[0].k.data == views[1].layers[0].k.data == views[2].layers[0].k.data

    # A block belongs to one group at a time: block 3 to the first, 4 to the last.
    slots = torch.arange(N)
    tokens = {(g, i): random_tokens(N, torch.bfloat16) + 10 * g + i for g in (0, 2) for i in (0, 1)}
    for (g, i), key in tokens.items():
        write_kv(views[g].layers[i], key, -key, slots + (3 if g == 0 else 4) * N)
    for (g, i), key in tokens.items():
        cache = hybrid.kv_caches[groups[g].layer_names[i]]
        theirs_k, theirs_v = cache.transpose(1, 2).split(D, dim=-1)
        assert torch.equal(theirs_k[3 if g == 0 else 4], key)
        assert torch.equal(theirs_v[3 if g == 0 else 4], -key)


def test_layers_that_do_not_follow_each_other_have_no_first() -> None:
    """Layers 0 and 2 are not layers 0 and 1, of which an engine may have as many."""
    split = engine([(names(0, 2), window(32)), (names(1, 3), full())])
    windows, _ = split.view(split.groups()[0])
    one = engine([(names(0, 1), window(32))])
    both, _ = one.view(one.groups()[0])
    assert [view.facts.first_layer for view in (windows, both)] == [None, 0]
    with pytest.raises(FactsMismatchError, match="first_layer is 0 at the destination"):
        migrate(windows.at([[3]]), both.at([[4]]), [N])


def test_evicted_blocks_of_a_window_are_left_alone() -> None:
    """The scheduler's ids of a windowed request begin with the null block."""
    src, dst = (engine([(names(0, 1), window(32))], num_blocks=n) for n in (9, 12))
    (src_group,), (dst_group,) = src.groups(), dst.groups()
    for i, name in enumerate(src_group.layer_names):
        src.kv_caches[name].copy_(torch.randn(src.kv_caches[name].shape) + i)
    ids = [[0, 0, 5, 7]], [[0, 0, 2, 11]]
    migrate(
        src.view(src_group)[0].at(vllm.block_table(ids[0]).with_holes()),
        dst.view(dst_group)[0].at(vllm.block_table(ids[1]).with_holes()),
        [3 * N + 4],
    )
    for name in src_group.layer_names:
        one, other = src.kv_caches[name], dst.kv_caches[name]
        assert torch.equal(other[2], one[5])
        assert torch.equal(other[11, :, :4], one[7, :, :4])
        assert not other[11, :, 4:].any()
        assert not other[[0, 1, *range(3, 11)]].any()


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_kernel_blocks_of_a_group(layout: str) -> None:
    cut = engine([(names(0, 1), full(block_size=48))], layout, kernel_block_sizes=[16])
    (group,) = cut.groups()
    view, kernel_blocks = cut.view(group)
    assert kernel_blocks == 3
    assert (view.layers[0].num_blocks, view.layers[0].block_size) == (33, 16)
    key = random_tokens(70, torch.bfloat16)
    slots = torch.cat([torch.arange(48) + 4 * 48, torch.arange(22) + 2 * 48])
    write_kv(view.layers[1], key, key, slots)
    table = vllm.block_table([[4, 2]], kernel_blocks_per_block=kernel_blocks)
    assert torch.equal(gather_kv(view.layers[1], table, [70])[0][0], key)


def test_layers_that_are_cut_into_kernel_blocks_otherwise_are_refused() -> None:
    cut, whole = (
        engine([(names(0, 1), full(block_size=48))], "LBHNC", kernel_block_sizes=[size])
        for size in (16, 48)
    )
    cut.kv_caches[names(1)[0]] = whole.kv_caches[names(1)[0]]
    (group,) = cut.groups()
    with pytest.raises(UnsupportedError, match=r"one group have \[1, 3\] kernel blocks per block"):
        cut.view(group)


def test_a_live_block_table_counts_kernel_blocks() -> None:
    """Of an engine with kernel blocks of 16 and blocks of 48, none of which runs on a CPU."""
    (name,) = names(0)
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(
            num_blocks=11, kv_cache_groups=[SimpleNamespace(layer_names=[name])]
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={name: SimpleNamespace(kv_cache=torch.empty(33, 1))}
        ),
    )
    manager = SimpleNamespace(get_block_ids=lambda request: ([4, 2],))
    core = SimpleNamespace(
        scheduler=SimpleNamespace(requests={"a"}, kv_cache_manager=manager),
        model_executor=SimpleNamespace(
            driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        ),
    )
    found = vllm.live_block_table(
        SimpleNamespace(
            llm_engine=SimpleNamespace(
                engine_core=SimpleNamespace(engine_core=core),
                vllm_config=SimpleNamespace(parallel_config=SimpleNamespace()),
            )
        ),
        ["a"],
    )
    assert rows_of(found) == [[12, 13, 14, 6, 7, 8]]


KDA = {
    "model_type": "kimi_linear",
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(
    ("mla", "layers", "expected"),
    [
        (False, None, [8, 8]),
        (False, [{}, {"head_size": 128}], [8, 8]),
        (False, [{}, {"total_num_kv_heads": 2}], [8, 2]),
        (True, [{}, {"total_num_kv_heads": 2}], [1, 1]),  # one latent in each
    ],
)
def test_layers_with_other_numbers_of_heads(
    mla: bool, layers: list[dict[str, int]] | None, expected: list[int]
) -> None:
    model = SimpleNamespace(
        dtype=torch.float16,
        hf_text_config=SimpleNamespace(),
        is_hybrid=False,
        is_attention_free=False,
        is_encoder_decoder=False,
        use_mla=mla,
        model_arch_config=SimpleNamespace(per_layer_overrides=layers),
        get_total_num_kv_heads=lambda: 8,
    )
    assert vllm.model_refusal(model) == ""
    for name, text, refused in (
        ("is_hybrid", GDN_CONFIG, False),
        ("is_hybrid", {"model_type": "lfm2", "hidden_size": 8, "conv_L_cache": 3}, False),
        ("is_hybrid", KDA, True),
        ("is_hybrid", GDN_CONFIG | {"linear_key_head_dim": None}, True),
        ("is_hybrid", {"model_type": "x"}, True),
        ("is_attention_free", {"model_type": "mamba2"}, True),
    ):
        of = {name: True, "hf_text_config": SimpleNamespace(**text)}
        other = SimpleNamespace(**(vars(model) | of))
        assert vllm.model_refusal(other) == ("layers keep a state" if refused else "")
    assert [vllm.total_kv_heads(model, layer) for layer in range(2)] == expected
    assert vllm.total_kv_heads(model) == expected[0]
    for layer, total in enumerate(expected):
        ranks = [vllm.kv_heads_of(model, rank, 4, layer) for rank in range(4)]
        per_rank = max(1, total // 4)
        assert ranks == [(r * total // 4, r * total // 4 + per_rank) for r in range(4)]
        facts = vllm.cache_facts(
            model, [], version=VERSION, fingerprint=None, first_kv_head=0, layer=layer
        )
        assert facts.total_kv_heads == total


def test_reasons_not_to_share_stand_side_by_side() -> None:
    assert vllm.refusal() == ""
    assert (
        vllm.refusal(states=True, indexed=True, other=True, is_chunked=True, has_encoder=True)
        == "layers keep a state, an indexer's keys are not described, some layers are unknown, "
        "chunked attention, an encoder"
    )


@pytest.mark.parametrize(
    ("embeddings", "expected"),
    [
        ([], (None, None)),
        ([{"is_neox_style": True, "rotary_dim": 64}] * 2, ("half", 64)),
        ([{"is_neox_style": False, "rotary_dim": 32}], ("interleaved", 32)),
        ([{"is_neox_style": True, "rotary_dim": 64}, {"rotary_dim": 7}], ("half", 64)),
        (
            [{"is_neox_style": True, "rotary_dim": n} for n in (32, 64)],
            (None, None),
        ),
    ],
)
def test_the_rotary_embedding_that_all_layers_share(
    embeddings: list[dict[str, Any]], expected: tuple[str | None, int | None]
) -> None:
    model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: 2, dtype=torch.float16)
    modules = [SimpleNamespace(**fields) for fields in embeddings]
    arguments = {"version": VERSION, "fingerprint": "f", "first_kv_head": 1}
    facts = vllm.cache_facts(model, modules, **arguments)
    assert (facts.rotary, facts.rotary_dim) == expected
    assert facts.rope_applied is (True if expected[0] else None)
    assert (facts.total_kv_heads, facts.first_kv_head) == (2, 1)


def test_phi_3_has_no_attribute_that_says_its_style() -> None:
    model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: 2, dtype=torch.float16)
    named = type("Phi3LongRoPEScaledRotaryEmbedding", (), {"rotary_dim": 96})()
    facts = vllm.cache_facts(model, [named], version=VERSION, fingerprint=None, first_kv_head=0)
    assert (facts.rotary, facts.rotary_dim) == ("half", 96)


def test_layers_come_in_the_order_of_the_model() -> None:
    ten = engine([(names(10, 2, 0), full())])
    (group,) = ten.groups()
    assert group.layers == (0, 2, 10)
    assert group.layer_names == tuple(names(0, 2, 10))
    assert group.specs[0].num_layers == 3


def test_layers_that_reuse_a_cache_are_left_out() -> None:
    """The model runner adds them to the group of the layer whose cache they read."""
    shared = engine([(names(0, 1), full())])
    shared.config.kv_cache_groups[0].layer_names += names(2)
    (target, *_) = names(1)
    shared.layers[names(2)[0]] = attention(full(), kv_sharing_target_layer_name=target)
    (group,) = shared.groups()
    assert group.layers == (0, 1)


def test_windows_that_differ_are_unknown() -> None:
    """Without the hybrid manager a merged spec states one window for all of its layers."""
    merged = engine([(names(0, 1), full(sliding_window=32))])
    merged.layers[names(1)[0]].sliding_window = None
    assert merged.groups()[0].window is None
    merged.layers[names(1)[0]].sliding_window = 32
    assert merged.groups()[0].window == 32
    chunked = engine([(names(0), full(attention_chunk_size=64))])
    assert chunked.groups()[0].window is None


def test_layers_of_different_sizes_in_one_group() -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    wide, narrow = full(num_kv_heads=4), full(head_size=64)
    both = UniformTypeKVCacheSpecs(
        block_size=N, kv_cache_specs=dict(zip(names(0, 1, 2), (wide, narrow, wide), strict=True))
    )
    for layout in ("LBNHC", "BLHNC"):
        mixed = engine([(names(0, 1, 2), both)], layout)
        (group,) = mixed.groups()
        view, _ = mixed.view(group)
        assert [layer.num_kv_heads for layer in view.layers] == [4, H, 4]
        assert [layer.head_dim for layer in view.layers] == [D, 64, D]
        assert [spec.num_layers for spec in group.specs] == [2, 1, 2]


def test_fp8_scales_are_those_of_the_layers() -> None:
    spec = full(dtype=torch.uint8)
    fp8 = engine([(names(0, 1), spec)], kv_cache_dtype="fp8_e5m2")
    fp8.layers[names(1)[0]]._v_scale = torch.tensor([0.5, 0.75])
    (group,) = fp8.groups()
    view, _ = fp8.view(group)
    assert view.k_scales is not None
    assert view.v_scales is not None
    assert view.k_scales[0] is not None
    assert view.k_scales[0].data == fp8.layers[names(0)[0]]._k_scale.data_ptr()
    assert view.v_scales[1] is not None
    assert view.v_scales[1].shape == (2,)


def test_a_layer_that_skips_fp8_has_no_scale() -> None:
    """--kv-cache-dtype-skip-layers."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    specs = {names(0)[0]: full(dtype=torch.uint8), names(1)[0]: full()}
    mixed = engine([(names(0, 1), UniformTypeKVCacheSpecs(block_size=N, kv_cache_specs=specs))])
    mixed.layers[names(0)[0]].kv_cache_dtype = "fp8"
    view, _ = mixed.view(mixed.groups()[0])
    assert view.k_scales is not None
    assert [scale is None for scale in view.k_scales] == [False, True]


def test_a_backend_of_ones_own_says_whose_cache_it_keeps() -> None:
    own = engine([(names(0), full())], attn_backend=backend("CUSTOM"))
    with pytest.raises(UnsupportedError, match="backend is 'CUSTOM', expected one of FLASH_ATTN"):
        own.groups()
    own.layers[names(0)[0]].attn_backend = backend("CUSTOM", kvx_cache_of="FLASH_ATTN")
    assert own.groups()[0].specs[0].backend == "FLASH_ATTN"


def test_aiter_calls_itself_flash_attn() -> None:
    from vllm.v1.attention.backends.rocm_aiter_fa import AiterFlashAttentionBackend

    assert AiterFlashAttentionBackend.get_name() == "FLASH_ATTN"
    rocm = engine([(names(0), full())], "LBHNC", attn_backend=AiterFlashAttentionBackend)
    assert rocm.groups()[0].specs[0].backend == "ROCM_AITER_FA"


@pytest.mark.parametrize("name", ["_use_interleaved_v_cache", "_shuffle_kv_layout"])
def test_an_impl_that_writes_tokens_of_v_in_groups(name: str) -> None:
    found = engine([(names(0), full())])
    impl = found.layers[names(0)[0]].impl = SimpleNamespace(**{name: False})
    assert not found.groups()[0].specs[0].interleaved_v
    setattr(impl, name, True)
    with pytest.raises(UnsupportedError, match="FLASH_ATTN keeps V in groups of tokens of 16 byt"):
        found.groups()


def test_mla_group() -> None:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=N, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    mla = engine([(names(0, 1), spec)], name="TRITON_MLA")
    view, _ = mla.view(mla.groups()[0])
    assert [(layer.head_dim, layer.v) for layer in view.layers] == [(576, None)] * 2


def test_before_0_29_the_layout_is_an_argument() -> None:
    """KVCacheTensor.shared_by and no layout in the config: as in 0.26."""
    spec = SimpleNamespace(
        block_size=N,
        num_kv_heads=H,
        head_size=D,
        dtype=torch.bfloat16,
        page_size_bytes=H * N * 2 * D * 2,
    )
    old_spec = type("FullAttentionSpec", (SimpleNamespace,), {})(**vars(spec))
    config = SimpleNamespace(
        num_blocks=5,
        kv_cache_groups=[SimpleNamespace(layer_names=names(0, 1), kv_cache_spec=old_spec)],
        kv_cache_tensors=[
            SimpleNamespace(shared_by=[name], offset=0, block_stride=0) for name in names(0, 1)
        ],
    )
    isas = {names(0)[0]: {"isa": "vec"}, names(1)[0]: {"impl": SimpleNamespace(isa="vec16")}}
    layers = {name: attention(spec, **isas[name]) for name in names(0, 1)}
    with pytest.raises(
        InvalidArgumentError, match="kv_cache_layout is None, expected the resolved"
    ):
        vllm.layer_groups(config, layers, "0.26.0")
    (group,) = vllm.layer_groups(config, layers, "0.26.0", layout="NHD")
    caches = {name: torch.zeros(5, N, H, 2 * D, dtype=torch.bfloat16) for name in names(0, 1)}
    view, kernel_blocks = vllm.group_view(
        group, {name: cache.transpose(1, 2) for name, cache in caches.items()}, CacheFacts(), layers
    )
    assert kernel_blocks == 1
    assert [spec.num_layers for spec in group.specs] == [1, 1]
    assert [spec.isa for spec in group.specs] == ["vec", "vec16"]
    assert view.layers[0].k.stride == (N * H * 2 * D, 2 * D, H * 2 * D, 1)


def test_before_0_26_objects_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"vllm is 0\.25\.1, expected 0\.26 to 0\.33"):
        engine([(names(0), full())]).groups("0.25.1")


def test_what_keeps_no_tokens_is_refused() -> None:
    from vllm.v1.kv_cache_interface import CrossAttentionSpec, MambaSpec

    mamba = MambaSpec(block_size=N, shapes=((4, 4),), dtypes=(torch.float32,))
    cross = CrossAttentionSpec(block_size=N, num_kv_heads=H, head_size=D, dtype=torch.bfloat16)
    for spec, kind in ((mamba, "MambaSpec"), (cross, "CrossAttentionSpec")):
        with pytest.raises(
            UnsupportedError, match=f"has a {kind}, expected one of FullAttentionSpec"
        ):
            engine([(names(0), spec)]).groups()


def test_the_caches_of_deepseek_v4_are_refused() -> None:
    """vLLM's own classes: none of them is an attention layer, and none says what its pages hold."""
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    shared: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}
    window = SlidingWindowMLASpec(
        block_size=64,
        head_size=512,
        dtype=torch.uint8,
        sliding_window=128,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=584,
        model_version="deepseek_v4",
        **shared,
    )
    keys = MLAAttentionSpec(
        block_size=256, head_size=132, dtype=torch.uint8, tokens_per_state=4, **shared
    )
    for kind, spec, entry in ((DeepseekV4SWACache, window, 1), (CompressorStateCache, keys, 4)):
        name = "model.layers.3.self_attn.cache"
        found = engine([([name], spec)])
        found.layers[name] = kind.__new__(kind)
        says = (
            f"layer '{name}' is a {kind.__name__} with a {type(spec).__name__}, {entry} tokens per "
            "entry, expected an attention layer .* kvx_core.hybrid describes pages of DeepSeek-V4"
        )
        with pytest.raises(UnsupportedError, match=says):
            found.groups()


def test_two_caches_of_one_layer_are_refused() -> None:
    twice = engine([(["model.layers.0.attn", "model.layers.0.indexer"], full())])
    with pytest.raises(UnsupportedError, match="both have index 0, expected one cache per layer"):
        twice.groups()


@pytest.mark.parametrize("name", ["model.layers.0.experts.3.attn", "attn"])
def test_a_layer_without_an_index_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="expected one number in it, the layer's index"):
        engine([([name], full())]).groups()


def test_rows_of_bytes_are_named_and_not_mixed() -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    quantised = full(dtype=torch.uint8, state_content_bytes=2 * (D // 2 + 4))
    rows = engine([(names(0), quantised)], name="TRITON_ATTN", kv_cache_dtype="int4_per_token_head")
    assert rows.groups()[0].encoding == "vllm 0.32 int4_per_token_head"
    whole = full(dtype=torch.int8, state_content_bytes=2 * (D + 4))
    values = engine([(names(0), whole)], name="TRITON_ATTN", kv_cache_dtype="int8_per_token_head")
    assert values.groups()[0].encoding == "values"
    both = UniformTypeKVCacheSpecs(
        block_size=N, kv_cache_specs={names(0)[0]: quantised, names(1)[0]: full()}
    )
    mixed = engine([(names(0, 1), both)], name="TRITON_ATTN")
    mixed.layers[names(0)[0]].kv_cache_dtype = "int4_per_token_head"
    with pytest.raises(
        UnsupportedError, match=r"one group store values and vllm 0\.32 int4_per_token_head, ex"
    ):
        mixed.groups()


def test_scales_of_the_layers_that_have_them_in_the_cache() -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    whole = full(dtype=torch.int8, state_content_bytes=2 * (D + 4))
    specs = {names(0)[0]: full(), names(1)[0]: whole}
    both = UniformTypeKVCacheSpecs(block_size=N, kv_cache_specs=specs)
    mixed = engine([(names(0, 1), both)], name="TRITON_ATTN")
    mixed.layers[names(1)[0]].kv_cache_dtype = "int8_per_token_head"
    view, _ = mixed.view(mixed.groups()[0])
    for scales in (view.k_scales, view.v_scales):
        assert scales is not None
        assert [scale is None for scale in scales] == [True, False]


def test_a_live_span_asks_the_scheduler_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that a request has computed; those of a step under way do not count."""
    from kvx_adapters.vllm import live

    k, v = torch.randn(2, 6, 4, 2, 16)
    cache = CacheDesc.from_kv(*(describe(half, Layout.BLOCK_NHD) for half in (k, v)))
    blocks = {"a": [4, 2], "b": [5]}
    requests = {
        "a": SimpleNamespace(num_computed_tokens=7, num_output_placeholders=1),
        "b": SimpleNamespace(num_computed_tokens=3),
    }
    manager = SimpleNamespace(get_block_ids=lambda request: (blocks[request],))
    core = SimpleNamespace(scheduler=SimpleNamespace(requests=requests, kv_cache_manager=manager))
    monkeypatch.setattr(live, "engine_core", lambda llm: core)
    monkeypatch.setattr(live, "live_view", lambda llm, **_: CacheView((cache,), SAME_MODEL))
    table = BlockTable.packed([[4, 2], [5, -1]])
    monkeypatch.setattr(live, "live_block_table", lambda *_: table)
    span = vllm.live_span(None, ["a", "b"])
    there = torch.zeros(2, 2, 8, 2, 16)
    dst = CacheView(
        (CacheDesc.from_kv(*(describe(half, Layout.BLOCK_NHD) for half in there)),),
        SAME_MODEL,
        dense=True,
    )
    migrate(span, dst, [6, 3])
    assert torch.equal(there[0, 0, :6], torch.cat([k[4], k[2]])[:6])
    for more in ([7, 3], [6, 4]):
        with pytest.raises(OutOfRangeError, match="by its engine's own count"):
            migrate(span, dst, more)
    blocks["a"] = [4, 2, 1]  # a step that needs one more
    requests["a"].num_computed_tokens = 8
    migrate(span, dst, [7, 3])
    blocks["b"] = [0]  # preempted, and computed anew
    with pytest.raises(InvalidArgumentError, match=r"request 'b' has the blocks \[0\], expected"):
        migrate(span, dst, [6, 3])
    requests["b"].num_computed_tokens, requests["b"].num_output_placeholders = 0, 1
    blocks["b"] = [5]
    with pytest.raises(OutOfRangeError, match="src holds 0 tokens of sequence 1"):
        migrate(span, dst, [6, 1])
    del requests["b"]
    with pytest.raises(InvalidArgumentError, match="request 'b' is finished, and its blocks are"):
        migrate(span, dst, [6, 3])
