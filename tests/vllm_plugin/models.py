"""Tiny models on disk, as both engines load them, and prompts for them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvx_conformance.connectors import vllm_models

PLACEHOLDER = 511
VOCAB_SIZE = vllm_models.VOCAB_SIZE
PLACEHOLDER = VOCAB_SIZE - 1  # of an image
WINDOW = 48  # of the hybrid model's sliding layers
SIZES = vllm_models.SIZES | {"max_position_embeddings": 512}  # three layers


def llama(directory: Path, seed: int = 0, **sizes: Any) -> Path:
    """A Llama of random weights; sizes: in place of SIZES and three layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(LlamaForCausalLM, LlamaConfig(**SIZES | sizes), directory, seed)


def with_another_layer(model: Path, directory: Path) -> Path:
    """The same model, but for one layer's o_proj: embeddings, norms and config are equal."""
    path = Path(shutil.copytree(model, directory))
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    generator = torch.Generator().manual_seed(5)
    tensors[name] = torch.randn(tensors[name].shape, generator=generator) * 0.2
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def gemma(directory: Path) -> Path:
    """A Gemma 3 of random weights: of six layers the third and the sixth see everything, the others
    the last WINDOW tokens.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        sliding_window=WINDOW,
        query_pre_attn_scalar=64,
        pad_token_id=None,
        **SIZES | {"num_hidden_layers": 6},
    )
    return _save(Gemma3ForCausalLM, config, directory, 0)


def phi3(directory: Path) -> Path:
    """A Phi-3 of random weights, trained for 256 tokens and stretched to 512 by longrope."""
    vllm_models.phi3(directory)
    return directory


def deepseek(directory: Path) -> Path:
    """A DeepSeek-V2 of random weights without experts: latents (MLA), and four KV heads by its
    config.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        first_k_dense_replace=2,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        **{name: size for name, size in SIZES.items() if name != "head_dim"}
        | {"num_key_value_heads": 4, "num_hidden_layers": 2},
    )
    return _save(DeepseekV2ForCausalLM, config, directory, 0)


def gemma4(directory: Path, num_shared: int = 0) -> Path:
    """A Gemma 4 of random weights: every second layer sees the last WINDOW tokens with two KV heads
    of 64, the others everything with one of 128, whose values are its keys before they are rotated.
    num_shared: more layers, which use the keys and values of the last two before them
    """
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        layer_types=["sliding_attention", "full_attention"] * (2 + num_shared // 2),
        sliding_window=WINDOW,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        global_head_dim=128,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=num_shared,
        pad_token_id=None,
        **SIZES | {"num_hidden_layers": 4 + num_shared},
    )
    return _save(Gemma4ForCausalLM, config, directory, 0)


def gemma4_that_shares(directory: Path) -> Path:
    """A Gemma 4 with two more layers, which use the keys and values of the third and the fourth."""
    return gemma4(directory, num_shared=2)


def blip2(directory: Path) -> Path:
    """A BLIP-2 of random weights: an image is four tokens in front of the prompt."""
    vllm_models.blip2(directory)
    return directory


def qwen2_audio(directory: Path) -> Path:
    """A Qwen2-Audio of random weights: a sound stands where the prompt has PLACEHOLDER, with 25
    tokens for a second, and one in front of and behind these.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    encoder = {
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "d_model": 64,
        "max_source_positions": 1500,
    }
    config = Qwen2AudioConfig(
        audio_config=encoder | {"model_type": "qwen2_audio_encoder"},
        text_config=SIZES | {"model_type": "qwen2"},
        audio_token_index=PLACEHOLDER,
    )
    special = {"<|AUDIO|>": PLACEHOLDER, "<|audio_bos|>": 510, "<|audio_eos|>": 509}
    words = {f"<{i}>": i for i in range(509)} | special
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<1>")), eos_token="<0>"
    )
    tokenizer.add_tokens(list(special), special_tokens=True)
    path = _save(Qwen2AudioForConditionalGeneration, config, directory, 0) / "model.safetensors"
    tensors = load_file(path)  # transformers 5.19 does not name them as checkpoints do
    names = {name: name.replace(".model.model.", ".model.") for name in tensors}
    save_file({names[name]: tensor for name, tensor in tensors.items()}, path, {"format": "pt"})
    Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=16), tokenizer=tokenizer
    ).save_pretrained(directory)
    return directory


def adapter(directory: Path, name: str) -> Path:
    """A LoRA adapter for a model of `llama`, as PEFT saves it. Names have other random weights."""
    directory.mkdir(exist_ok=True)
    vllm_models.save_adapter(directory, name)
    return directory


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Random tokens; the same seed gives the same beginning."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (512,), generator=generator)[:num_tokens].tolist()


def same_keys_and_values(directory: Path, prompts: Sequence[Sequence[int]], loads: Path) -> None:
    """Asserts that what `keep_raw_loads` has kept of each prompt is, token by token, what
    transformers computes of it. Its answer would not notice another order of rotated keys.

    Tokens that transformers' windows have left, and null blocks, are not compared.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for i, tokens in enumerate(prompts):
        found = torch.load(loads / str(i))
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([list(tokens)]), past_key_values=cache)
        for layer, held in enumerate(cache.layers):
            for kv, expected in (("k", held.keys[0]), ("v", held.values[0])):
                stop = len(tokens) - 1
                first = len(tokens) - expected.shape[1]
                loaded = found[f"layers.{layer}.{kv}"][first:stop]
                wanted = expected.transpose(0, 1)[: stop - first]
                assert loaded.shape == wanted.shape
                is_there = ~loaded.isnan().any(-1).any(-1)
                assert is_there[-WINDOW // 2 :].all()
                wrong = (loaded - wanted).abs().amax((1, 2)) > 1e-3
                at = (wrong & is_there).nonzero().flatten().tolist()
                assert not at, f"prompt {i}, {kv} of layer {layer}: token {first + at[0]} differs"


def _save(kind: Any, config: Any, directory: Path, seed: int) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(seed)
    kind(config).save_pretrained(directory)
    words = {f"<{i}>": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<1>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<0>").save_pretrained(directory)
    return directory
