"""The model that the connector derives from TensorRT-LLM's arguments and config, and refusals."""

from __future__ import annotations

import json
import re
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvx_core import DType, InvalidArgumentError, ModelRecord, UnsupportedError, model_files_digest
from tests.fakes.tensorrt_llm_executor import KvCacheConfig, Sizes, TorchLlmArgs
from tests.tensorrt_llm_plugin.conftest import Factory, fingerprint_of
from tests.vllm_plugin.models import prompt

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("trtllm")


def model_of(args: TorchLlmArgs, **settings: Any) -> Any:
    from kvx_adapters.tensorrt_llm_plugin.model import Model
    from kvx_adapters.tensorrt_llm_plugin.settings import Settings

    return Model.of(args, Settings(path=Path("unused"), **settings))


def config_dir(path: Path, name: str, **fields: Any) -> Path:
    """A directory with nothing but a config."""
    config = getattr(transformers, f"{name}Config")(**fields)
    config.save_pretrained(path)
    return path


def args_for(directory: Path, **kv_cache: Any) -> TorchLlmArgs:
    return TorchLlmArgs(directory, KvCacheConfig(**kv_cache))


def test_a_llama(model_dir: Path) -> None:
    model = model_of(args_for(model_dir, tokens_per_block=64))
    assert model.fingerprint == fingerprint_of(model_dir)
    assert model.compute_dtype is DType.F32
    assert (model.num_layers, model.total_kv_heads, model.head_dim) == (3, 2, 10)
    assert (model.kv_factor, model.tokens_per_block, model.dtype) == (2, 64, "FLOAT")
    assert (model.is_neox, model.rotary_dim) == (True, 10)


def test_heads_that_a_config_does_not_size(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    directory = config_dir(tmp_path, "Qwen2", dtype="bfloat16", **sizes)
    assert "head_dim" not in json.loads((directory / "config.json").read_text())
    model = model_of(args_for(directory), fingerprint="f")
    assert (model.total_kv_heads, model.head_dim) == (2, 24)
    wide = config_dir(tmp_path, "Qwen3", dtype="bfloat16", head_dim=40, **sizes)
    assert model_of(args_for(wide), fingerprint="f").head_dim == 40


@pytest.mark.parametrize("where", ["rope_parameters", "config", "nowhere"])
def test_keys_of_which_a_part_turns(where: str, model_dir: Path, tmp_path: Path) -> None:
    """Older configs have the part beside their rope's parameters."""
    config = json.loads((model_dir / "config.json").read_text())
    part = {"partial_rotary_factor": 0.5}
    if where == "rope_parameters":
        config["rope_parameters"] |= part
    config |= part if where == "config" else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = model_of(args_for(tmp_path), fingerprint="f")
    assert model.rotary_dim == (10 if where == "nowhere" else 5)


def test_latent_attention(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 96, "qk_rope_head_dim": 32, "num_hidden_layers": 5}
    directory = config_dir(tmp_path, "DeepseekV3", dtype="bfloat16", **sizes)
    model = model_of(args_for(directory), fingerprint="f")
    assert (model.num_layers, model.total_kv_heads, model.head_dim) == (5, 1, 128)
    assert (model.kv_factor, model.dtype) == (1, "BF16")
    assert (model.is_neox, model.rotary_dim) == (False, 32)
    spec = model.spec(9, model.heads_of(0))
    assert spec.pool_shape == (9, 5, 1, 32 * 128)


def test_latent_attention_is_served(tmp_path: Path, serve: Factory) -> None:
    serve.model = config_dir(
        tmp_path / "mla",
        "DeepseekV3",
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        num_hidden_layers=2,
        dtype="bfloat16",
    )
    serve.set(fingerprint="f")
    sizes = Sizes(num_layers=2, total_kv_heads=1, head_dim=32, kv_factor=1, dtype=torch.bfloat16)
    tokens = prompt(100, 0)
    engine = serve(sizes=sizes)
    engine.ask(tokens)
    engine.close()
    # All ranks hold the same rows.
    assert serve(8, sizes=sizes, args={"tensor_parallel_size": 2}).ask(tokens).computed == 4


@pytest.mark.parametrize(
    ("total", "ranks", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 2, [(0, 1), (0, 1)]),
    ],
)
def test_heads_of_ranks(
    tmp_path: Path, total: int, ranks: int, expected: list[tuple[int, int]]
) -> None:
    sizes = {"num_key_value_heads": total, "num_attention_heads": 8, "hidden_size": 64}
    args = args_for(config_dir(tmp_path, "Llama", dtype="float16", **sizes))
    args.tensor_parallel_size = ranks
    model = model_of(args, fingerprint="f")
    assert [model.heads_of(rank) for rank in range(ranks)] == expected


@pytest.mark.parametrize(("total", "ranks"), [(6, 4), (4, 6)])
def test_heads_that_ranks_cannot_share_out(tmp_path: Path, total: int, ranks: int) -> None:
    sizes = {"num_key_value_heads": total, "num_attention_heads": 12, "hidden_size": 96}
    args = args_for(config_dir(tmp_path, "Llama", dtype="float16", **sizes))
    args.tensor_parallel_size = ranks
    with pytest.raises(
        UnsupportedError,
        match=f"tensor_parallel_size is {ranks} with {total} KV heads, expected one to be a",
    ):
        model_of(args, fingerprint="f").heads_of(0)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_dtypes(serve: Factory, name: str) -> None:
    dtype = getattr(torch, name)
    sizes = Sizes(num_layers=3, total_kv_heads=2, head_dim=10, dtype=dtype)
    tokens = prompt(60, 1)
    engine = serve(args={"dtype": name}, sizes=sizes)
    engine.ask(tokens)
    engine.close()
    assert serve(8, args={"dtype": name}, sizes=sizes).ask(tokens).computed == 4


def test_fp8_pools(serve: Factory) -> None:
    """Of the same factor byte for byte; of another one requantised, as the numbers are exact."""
    fp8 = {"kv_cache_config": {"dtype": "fp8"}}
    sizes = Sizes(num_layers=3, total_kv_heads=2, head_dim=10, dtype=torch.float8_e4m3fn)
    tokens = prompt(60, 2)
    serve.set(kv_scaling_factor=0.25)
    engine = serve(args=fp8, sizes=sizes)
    engine.ask(tokens)
    engine.close()
    assert serve(8, args=fp8, sizes=sizes).ask(tokens).computed == 4

    serve.set(kv_scaling_factor=0.5)
    stored = engine.compute

    def compute(ids: list[int]) -> torch.Tensor:
        return (stored(ids).float() * 0.25 / 0.5).to(torch.float8_e4m3fn)

    assert serve(8, args=fp8, sizes=sizes, compute=compute).ask(tokens).computed == 4


def test_a_factor_is_for_fp8_only(model_dir: Path) -> None:
    assert model_of(args_for(model_dir, dtype="fp8")).kv_scaling_factor == 1.0
    sentence = "kv_scaling_factor is 0.5 and the pool is FLOAT, expected 1.0"
    with pytest.raises(UnsupportedError, match=sentence):
        model_of(args_for(model_dir), kv_scaling_factor=0.5)


def test_nvfp4_is_refused_with_its_reason(model_dir: Path) -> None:
    model = model_of(args_for(model_dir, dtype="nvfp4"))
    with pytest.raises(UnsupportedError, match="dtype is 'NVFP4', expected one of HALF, BF16"):
        model.spec(1, (0, 2))


@pytest.mark.parametrize(
    ("where", "name", "value", "sentence"),
    [
        ("args", "pipeline_parallel_size", 2, "pipeline_parallel_size is 2, expected 1"),
        ("args", "context_parallel_size", 2, "context_parallel_size is 2, expected 1"),
        ("args", "enable_attention_dp", True, "enable_attention_dp is True, expected False"),
        ("args", "attn_backend", "FLASHINFER", "attn_backend is 'FLASHINFER', expected 'TRTLLM'"),
        ("args", "dtype", "float64", "dtype is torch.float64, expected one of torch.float16, to"),
        ("args", "dtype", "nonsense", "dtype is nonsense, expected one of torch.float16, torch."),
        ("args", "max_beam_width", 4, "max_beam_width is 4, expected 1"),
        ("args", "speculative_config", "MTP", "speculative_config is 'MTP', expected None"),
        ("args", "sparse_attention_config", "DSA", "sparse_attention_config is 'DSA', expected"),
        ("kv", "enable_block_reuse", False, "kv_cache_config.enable_block_reuse is False, exp"),
        ("kv", "max_attention_window", [64], "kv_cache_config.max_attention_window is [64], exp"),
        ("kv", "sink_token_length", 4, "kv_cache_config.sink_token_length is 4, expected None"),
        ("kv", "host_cache_size", 1 << 30, "kv_cache_config.host_cache_size is 1073741824, exp"),
    ],
)
def test_arguments_that_are_refused(
    model_dir: Path, where: str, name: str, value: object, sentence: str
) -> None:
    args = args_for(model_dir)
    setattr(args if where == "args" else args.kv_cache_config, name, value)
    with pytest.raises(UnsupportedError, match=re.escape(sentence)):
        model_of(args)


def test_arguments_that_a_version_does_not_have(model_dir: Path) -> None:
    args = args_for(model_dir)
    for name in ("sparse_attention_config", "model_kwargs", "revision"):
        delattr(args, name)
    args.kv_cache_config.host_cache_size = 0
    assert model_of(args).num_layers == 3


def record_of(args: TorchLlmArgs, **settings: Any) -> ModelRecord:
    from kvx_adapters.tensorrt_llm_plugin import identity, model
    from kvx_adapters.tensorrt_llm_plugin.settings import Settings

    directory = Path(args.model)
    config = model._config(directory, args)
    return identity.model_record(args, Settings(path=Path("x"), **settings), directory, config)


def test_who_shares_with_whom(model_dir: Path) -> None:
    """What changes keys and values besides the files, each in a record of its own."""
    plain = ModelRecord(
        files=model_files_digest(model_dir),
        architecture="llama",
        rope={"": {"rope_type": "default", "rope_theta": 10000.0}},
    )
    assert record_of(args_for(model_dir)) == plain
    for name, value in (
        ("dtype", "bfloat16"),
        ("tensor_parallel_size", 2),
        ("trust_remote_code", True),
        ("load_format", 0),
    ):
        args = args_for(model_dir)
        setattr(args, name, value)
        assert record_of(args) == plain
    found = [plain.fingerprint]
    for name, value in (
        ("load_format", "LoadFormat.DUMMY"),
        ("model_kwargs", {"rms_norm_eps": 1e-3}),
        ("model_kwargs", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        ("quant_config", SimpleNamespace(quant_algo="FP8")),
        ("quant_config", SimpleNamespace(quant_algo="W4A16")),
    ):
        for settings in ({}, {"fingerprint": "f"}):
            args = args_for(model_dir)
            setattr(args, name, value)
            found.append(record_of(args, **settings).fingerprint)
            assert model_of(args, **settings).fingerprint == found[-1]
    assert len(set(found)) == len(found)


def test_random_weights_are_those_of_a_dtype_and_a_number_of_ranks(model_dir: Path) -> None:
    found = []
    for dtype in ("float32", "float16", "bfloat16"):
        for ranks in (1, 2):
            args = args_for(model_dir)
            args.load_format = "LoadFormat.DUMMY"
            args.dtype, args.tensor_parallel_size = dtype, ranks
            found.append(record_of(args))
    assert len({record.fingerprint for record in found}) == 6
    assert found[3].weights == "dummy of tensorrt_llm main (double), float16, 2 ranks"


def test_a_longer_config_by_model_kwargs(model_dir: Path) -> None:
    args = args_for(model_dir)
    args.model_kwargs = {"num_hidden_layers": 2}
    assert model_of(args).num_layers == 2


def test_weights_from_elsewhere_are_refused(model_dir: Path) -> None:
    args = args_for(model_dir)
    args.load_format = "LoadFormat.VISION_ONLY"
    with pytest.raises(UnsupportedError, match=r"load_format is 'LoadFormat\.VISION_ONLY', so the"):
        model_of(args)
    assert record_of(args, fingerprint="f").files == "f"


def test_an_argument_that_nobody_has_judged_salts_and_is_logged(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @dataclass
    class Newer(TorchLlmArgs):
        sharpness: int = 3
        force_dynamic_quantization: bool = False

    args = Newer(model_dir, KvCacheConfig())
    assert record_of(args) == record_of(args_for(model_dir))
    args.force_dynamic_quantization = True
    assert record_of(args).salts == {
        "engine": "tensorrt_llm main (double)",
        "force_dynamic_quantization": True,
    }
    assert not caplog.text
    args.sharpness = 4
    assert record_of(args).salts["sharpness"] == 4
    assert "does not know whether sharpness=4 matter" in caplog.text


@pytest.mark.parametrize(("max_seq_len", "is_shared"), [(None, False), (128, True), (129, False)])
def test_rope_that_depends_on_the_length(
    tmp_path: Path, max_seq_len: int | None, is_shared: bool
) -> None:
    """Within the config's length a dynamic embedding is the same everywhere."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    directory = config_dir(
        tmp_path, "Llama", dtype="float16", max_position_embeddings=128, rope_parameters=rope
    )
    args = args_for(directory)
    args.max_seq_len = max_seq_len  # type: ignore[attr-defined]
    assert bool(record_of(args, fingerprint="f").salts) is not is_shared


def test_a_checkpoint_that_is_quantised_on_disk(model_dir: Path, tmp_path: Path) -> None:
    for path in model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    args = args_for(tmp_path)
    args.quant_config = SimpleNamespace(quant_algo="FP8")
    assert record_of(args) == replace(
        record_of(args_for(model_dir)), files=model_files_digest(tmp_path)
    )
    assert model_files_digest(tmp_path) != model_files_digest(model_dir)


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("Mistral", {"sliding_window": 64}, "sliding_window 64, expected full attention in every"),
        (
            "Gemma3Text",
            {"num_hidden_layers": 6},
            "layer_types ['sliding_attention'] and sliding_window 4096, expected full attention",
        ),
        ("Gemma3", {}, "model is a gemma3, expected a text-only model"),
        ("GPTNeoX", {}, "model is a gpt_neox with rope_type 'default', expected one of deepseek"),
        (
            "Qwen2",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            "model is a qwen2 with rope_type 'yarn', expected one of deepseek_v3, llama, ",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalnum() else "",
)
def test_models_that_are_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], sentence: str
) -> None:
    directory = config_dir(tmp_path, name, dtype="bfloat16", **fields)
    with pytest.raises(UnsupportedError, match=re.escape(sentence)):
        model_of(args_for(directory), fingerprint="f")


def test_a_rope_type_under_its_older_name(model_dir: Path) -> None:
    """transformers renames it in files, and not in what TensorRT-LLM sets afterwards."""
    args = args_for(model_dir)
    args.model_kwargs = {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    with pytest.raises(UnsupportedError, match="model is a llama with rope_type 'yarn', expected"):
        model_of(args)


def test_what_the_settings_say_of_other_models(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2}
    directory = config_dir(tmp_path, "GPTNeoX", dtype="bfloat16", **sizes)
    model = model_of(args_for(directory), fingerprint="f", is_neox=True, rotary_dim=16)
    assert (model.is_neox, model.rotary_dim, model.total_kv_heads) == (True, 16, 8)


def test_a_model_that_is_not_here() -> None:
    with pytest.raises(
        UnsupportedError, match="model is 'no/such-model', of which no local copy was found"
    ):
        model_of(args_for(Path("no/such-model")), fingerprint="f")


@pytest.mark.parametrize(
    ("pool", "sentence"),
    [
        # Blocks of 32 tokens where 16 are expected.
        (torch.zeros(5, 3, 2, 2 * 32 * 10), "expected (5, 3, 2, 320)"),
        (torch.zeros(5, 2, 2, 2 * 16 * 10), "expected (5, 3, 2, 320)"),
        (torch.zeros(5, 3, 1, 2 * 16 * 10), "expected (5, 3, 2, 320)"),
        (
            torch.zeros(5, 3, 2, 2 * 16 * 10, dtype=torch.float8_e4m3fn),
            "kv_cache_tensor is of torch.float8_e4m3fn, expected torch.float32 by "
            "kv_cache_config.dtype and the model's config. Where the checkpoint decides, set",
        ),
        (torch.zeros(10, 3, 2, 2 * 16 * 10)[::2], "expected contiguous"),
    ],
    ids=["block_size", "layers", "kv_factor", "dtype", "strides"],
)
def test_pools_that_are_refused(serve: Factory, pool: torch.Tensor, sentence: str) -> None:
    worker = serve(16).ranks[0].worker
    with pytest.raises(InvalidArgumentError, match=re.escape(sentence)):
        worker.register_kv_caches(pool)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "TRTLLM_KVX: Invalid JSON"),
        ("[]", "TRTLLM_KVX: Input should be an object"),
        ("{}", "TRTLLM_KVX.tiers: Value error, neither path nor tiers is set"),
        ('{"path": "x", "colour": 1}', "TRTLLM_KVX.colour: Extra inputs are not permitted"),
        ('{"path": "x", "min_tokens": 0}', "TRTLLM_KVX.min_tokens: Input should be greater than"),
    ],
)
def test_settings(
    serve: Factory, monkeypatch: pytest.MonkeyPatch, text: str | None, sentence: str
) -> None:
    if text is None:
        monkeypatch.delenv("TRTLLM_KVX")
    else:
        monkeypatch.setenv("TRTLLM_KVX", text)
    with pytest.raises(InvalidArgumentError, match=re.escape(sentence)) as caught:
        serve()
    assert str(caught.value).endswith(
        'The environment needs at least TRTLLM_KVX=\'{"path": "/the/stores/directory"}\''
    )


@pytest.mark.parametrize(
    ("name", "least", "less"),
    [
        ("min_tokens", 1, 0),
        ("max_load_bytes", 1, 0),
        ("chunk_seconds", 0.0, -0.001),
        ("kv_scaling_factor", 0.001, 0.0),
        ("rotary_dim", 0, -1),
    ],
)
def test_the_least_that_settings_take(
    monkeypatch: pytest.MonkeyPatch, name: str, least: float, less: float
) -> None:
    from kvx_adapters.tensorrt_llm_plugin.settings import Settings

    monkeypatch.setenv("TRTLLM_KVX", json.dumps({"path": "x", name: least}))
    assert getattr(Settings.read(), name) == least
    monkeypatch.setenv("TRTLLM_KVX", json.dumps({"path": "x", name: less}))
    with pytest.raises(InvalidArgumentError, match=rf"TRTLLM_KVX\.{name}: Input should be greater"):
        Settings.read()


def test_a_store_that_the_group_may_read(model_dir: Path, tmp_path: Path) -> None:
    from kvx_adapters.tensorrt_llm_plugin.settings import Settings

    settings = Settings.model_validate({"path": tmp_path / "store", "group": "read"})
    model_of(args_for(model_dir)).store(settings)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o2750
    assert stat.S_IMODE((tmp_path / "store" / "kvx-store.json").stat().st_mode) == 0o640


def test_every_setting_is_documented_with_its_default(trtllm: ModuleType) -> None:
    from kvx_adapters.tensorrt_llm_plugin.settings import Settings

    text = (Path(__file__).parents[2] / "docs" / "tensorrt_llm.md").read_text()
    section = text.partition("### Settings")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.M))
    assert list(listed) == list(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        if isinstance(field.default, bool):
            assert listed[name] == f"`{json.dumps(field.default)}`", name
        elif name.startswith("max_") and field.default is not None:
            assert listed[name] == f"{field.default >> 30} GiB"
        elif isinstance(field.default, int):
            assert listed[name] == str(field.default), name
