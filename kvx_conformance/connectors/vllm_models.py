"""Tiny models and adapters on disk, of fixed random weights.

Their weights are wide enough (`_WIDTH`) that no two tokens come close to a tie in float32, and that
one wrong key changes the answer.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvx_conformance.connector import Family, Weights

VOCAB_SIZE = 512
IMAGE_SIZE = 28  # pixels, both ways
LONGEST = {"longrope": 512, "images": 512}  # tokens of a sequence; of other families 2048
HYBRID: tuple[Family, ...] = ("convolutions", "states")
_WIDTH = 0.2
_NUM_LAYERS = 3  # the second is the one that "layer" changes: keys of the third differ
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": _NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": _WIDTH,
    "bos_token_id": None,
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class Model:
    """The files of a model.

    epsilon: of the norms, in the config; None: the family's own
    """

    family: Family = "llama"
    weights: Weights = "first"
    epsilon: float | None = None

    def files(self, work: Path) -> Path:
        """The directory of these files in `work`; made on first use."""
        weights = "first" if self.weights == "random" else self.weights
        return _made(work / "models" / f"{self.family}-{weights}-{self.epsilon}", self._make)

    def put(self, work: Path, place: str) -> Path:
        """The directory `place` with these files. Each file is replaced atomically, if the files of
        another model are there.
        """
        directory = work / place
        marker = directory / "made_of.txt"
        if not marker.exists() or marker.read_text() != repr(self):
            directory.mkdir(exist_ok=True)
            marker.unlink(missing_ok=True)
            for path in self.files(work).iterdir():
                new = directory / f".{path.name}"
                shutil.copyfile(path, new)
                new.replace(directory / path.name)
            marker.write_text(repr(self))
        return directory

    def _make(self, directory: Path) -> None:
        if self.weights not in ("first", "random") or self.epsilon is not None:
            first = Model(self.family).files(directory.parent.parent)
            shutil.copytree(first, directory, dirs_exist_ok=True)
        else:
            _FAMILIES[self.family](directory)
        if self.weights == "layer":
            _change(directory, f"layers.{_NUM_LAYERS // 2}.self_attn.", _other_projection)
        if self.weights == "rows":
            _change(directory, "embed_tokens.weight", _other_rows)
        if self.epsilon is not None:
            path = directory / "config.json"
            config = json.loads(path.read_text())
            path.write_text(json.dumps(config | {"rms_norm_eps": self.epsilon}))


def changed_tensors(files: Path) -> dict[str, Any]:
    """The tensors of a model that `weights` may change, by their names in its file."""
    return {
        name: tensor
        for name, tensor in _tensors(files).items()
        if name.endswith("embed_tokens.weight")
        or (f"layers.{_NUM_LAYERS // 2}.self_attn." in name and _is_projection(name))
    }


def embeddings(files: Path) -> Any:
    """(VOCAB_SIZE, hidden size): what the first layer sees of ids."""
    return _tensors(files)["model.embed_tokens.weight"]


def adapter(work: Path, name: str) -> Path:
    """A LoRA adapter for the family "llama", as PEFT saves it. Names have different weights."""
    return _made(work / "adapters" / name, lambda directory: save_adapter(directory, name))


def _llama(directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _save(LlamaForCausalLM, LlamaConfig(**SIZES), directory)


def phi3(directory: Path) -> None:
    """Trained for 256 tokens and stretched to 512 by longrope."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + i / 64 for i in range(32)],
            "long_factor": [1.0 + i for i in range(32)],
        },
        pad_token_id=None,
        **SIZES | {"max_position_embeddings": LONGEST["longrope"]},
    )
    _save(Phi3ForCausalLM, config, directory)


def _gemma3(directory: Path) -> None:
    """The third and the sixth layer see everything, the others the last 48 tokens."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        sliding_window=48,
        query_pre_attn_scalar=64,
        tie_word_embeddings=False,  # tied random ones repeat the last token
        pad_token_id=None,
        **SIZES | {"num_hidden_layers": 2 * _NUM_LAYERS},
    )
    _save(Gemma3ForCausalLM, config, directory)


def _deepseek_v2(directory: Path) -> None:
    """Without experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    sizes = SIZES | {"num_key_value_heads": 4}
    del sizes["head_dim"]
    config = DeepseekV2Config(
        first_k_dense_replace=_NUM_LAYERS,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        **sizes,
    )
    _save(DeepseekV2ForCausalLM, config, directory)


def _lfm2(directory: Path) -> None:
    """vLLM gives it one matrix for both ends, whose answers would repeat the last token: the last
    norm changes signs.
    """
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = ["conv", "full_attention"] * 2
    sizes = SIZES | {"num_hidden_layers": len(kinds), "pad_token_id": None}
    config = Lfm2Config(layer_types=kinds, conv_L_cache=3, block_auto_adjust_ff_dim=False, **sizes)

    def with_signs(model: Any) -> None:
        weight = model.model.embedding_norm.weight
        weight.copy_(torch.randint(2, weight.shape) * 2.0 - 1)

    _save(Lfm2ForCausalLM, config, directory, with_signs)
    path = directory / "config.json"  # vLLM 0.32 reads names that transformers does not write
    names = {"conv_dim": sizes["hidden_size"], "block_dim": sizes["hidden_size"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))


def _granite4(directory: Path) -> None:
    """Its states keep 0.98 to 0.9998 of themselves per token. With the usual random numbers they
    forget a prompt within a few tokens, and a wrong one would not show.
    """
    import torch
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    kinds = ["mamba", "attention"] * 2
    config = GraniteMoeHybridConfig(
        layer_types=kinds,
        num_local_experts=0,
        shared_intermediate_size=SIZES["intermediate_size"],
        attention_multiplier=SIZES["head_dim"] ** -0.5,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        pad_token_id=None,
        **SIZES | {"num_hidden_layers": len(kinds)},
    )

    def slowly_decaying(model: Any) -> None:
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.logspace(-3.7, -1.7, len(weight)).log())
            elif name.endswith("dt_bias"):
                weight.zero_()

    _save(GraniteMoeHybridForCausalLM, config, directory, slowly_decaying)


def blip2(directory: Path) -> None:
    """A model for images: one is four tokens in front of the prompt."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        OPTConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    text = OPTConfig(
        num_hidden_layers=_NUM_LAYERS,
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=512,
        num_attention_heads=4,
        max_position_embeddings=LONGEST["images"],
        init_std=_WIDTH,
    )
    encoder = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    encoder["num_attention_heads"] = 2
    image_token, image_tokens = VOCAB_SIZE - 1, 4
    config = Blip2Config(
        text_config=text.to_dict(),
        vision_config=encoder | {"image_size": IMAGE_SIZE, "patch_size": 14},
        qformer_config=encoder | {"encoder_hidden_size": 64, "vocab_size": VOCAB_SIZE},
        num_query_tokens=image_tokens,
        image_token_index=image_token,
        initializer_range=_WIDTH,
    )
    _save(Blip2ForConditionalGeneration, config, directory)
    words = {f"<{i}>": i for i in range(image_token)} | {"<image>": image_token}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<1>")), eos_token="<0>"
    )
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    Blip2Processor(
        image_processor=BlipImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}),
        tokenizer=tokenizer,
        num_query_tokens=image_tokens,
    ).save_pretrained(directory)


_FAMILIES: dict[Family, Callable[[Path], None]] = {
    "llama": _llama,
    "longrope": phi3,
    "windows": _gemma3,
    "latents": _deepseek_v2,
    "images": blip2,
    "convolutions": _lfm2,
    "states": _granite4,
}


def save_adapter(directory: Path, name: str) -> None:
    """The files of an adapter: see `adapter`."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(sum(name.encode()))
    wide, narrow = SIZES["hidden_size"], SIZES["num_key_value_heads"] * SIZES["head_dim"]
    tensors = {}
    for layer in range(_NUM_LAYERS):
        for projection, size in (("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            for part, shape in (("A", (8, wide)), ("B", (size, 8))):
                values = torch.randn(shape, generator=random) * _WIDTH
                tensors[f"{prefix}.lora_{part}.weight"] = values
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))


def _save(
    kind: Any, config: Any, directory: Path, change: Callable[[Any], None] = lambda model: None
) -> None:
    """change: what the model's random weights are put through"""
    import torch

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = kind(config)
        change(model)
        model.save_pretrained(directory)


def _tensors(files: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(files / "model.safetensors")


def _change(directory: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Changes the one tensor of a model in whose name `name` is and which `weights` may change."""
    from safetensors.torch import save_file

    tensors = _tensors(directory)
    (found,) = (each for each in changed_tensors(directory) if name in each)
    tensors[found] = change(tensors[found])
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _is_projection(name: str) -> bool:
    return name.endswith((".o_proj.weight", ".out_proj.weight"))


def _other_projection(tensor: Any) -> Any:
    import torch

    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)) * _WIDTH


def _other_rows(tensor: Any) -> Any:
    """Every 32nd: 300 random tokens are hardly without one of these."""
    import torch

    changed = tensor.clone()
    rows = changed[1::32]
    rows[:] = torch.randn(rows.shape, generator=torch.Generator().manual_seed(6)) * _WIDTH
    return changed


def _made(directory: Path, make: Callable[[Path], None]) -> Path:
    """The directory, made unless it exists; several processes may do so at one time."""
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=directory.parent))
        make(new)
        with suppress(OSError):  # somebody else has made it
            os.rename(new, directory)
    return directory
