"""A Llama for OpenVINO: traced, made stateful, and given paged attention."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import torch
import torch.nn.functional as F
from openvino._offline_transformations import (
    apply_make_stateful_transformation,
    paged_attention_transformation,
)
from torch import Tensor

from kvx_adapters.cli.engines import Model


class Traceable(torch.nn.Module):
    """The weights and modules of transformers in a graph whose caches are inputs and outputs."""

    def __init__(self, llama: Any) -> None:
        super().__init__()
        self.llama = llama

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        model, config = self.llama, self.llama.config
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        x = model.model.embed_tokens(input_ids)
        cos, sin = (part[:, None] for part in model.model.rotary_emb(x, position_ids))
        count, new = attention_mask.shape[1], input_ids.shape[1]
        seen = torch.arange(count)[None] <= torch.arange(count)[-new:, None]
        seen = seen & attention_mask[:, None, None].bool()
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        present = []
        for i, layer in enumerate(model.model.layers):
            attention, y = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                part(y).view(*y.shape[:2], heads, config.head_dim).transpose(1, 2)
                for part, heads in (
                    (attention.q_proj, num_heads),
                    (attention.k_proj, num_kv_heads),
                    (attention.v_proj, num_kv_heads),
                )
            )
            k = torch.cat([past[2 * i], rotated(k, cos, sin)], 2)
            v = torch.cat([past[2 * i + 1], v], 2)
            present += [k, v]
            each = num_heads // num_kv_heads
            y = F.scaled_dot_product_attention(
                rotated(q, cos, sin), repeated(k, each), repeated(v, each), attn_mask=mask
            )
            x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return model.lm_head(model.model.norm(x)), *present


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def repeated(x: Tensor, each: int) -> Tensor:
    """K or V for each query head."""
    batch, heads, count, dim = x.shape
    spread = x[:, :, None].expand(batch, heads, each, count, dim)
    return spread.reshape(batch, heads * each, count, dim)


@cache
def compiled(model: Model, precision: str) -> Any:
    """The compiled model. precision: KV_CACHE_PRECISION, or "default"."""
    hint = "bf16" if precision == "bf16" else "f32"
    options = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": 1}
    if precision != "default":
        options["KV_CACHE_PRECISION"] = precision
    return ov.Core().compile_model(_paged(model).clone(), "CPU", options)


@cache
def _paged(source: Model) -> Any:
    """Caches become states behind Gather(beam_idx), each with an initial value: the transformation
    to paged attention looks for that, and takes them out again."""
    config = source.config
    count = 2 * config.num_hidden_layers
    heads, dim = config.num_key_value_heads, config.head_dim
    example = (
        torch.ones(1, 2, dtype=torch.int64),
        torch.ones(1, 5, dtype=torch.int64),
        torch.tensor([[3, 4]]),
        [torch.zeros(1, heads, 3, dim)] * count,
    )
    with torch.no_grad():
        model = ov.convert_model(Traceable(source.llama), example_input=example)
    beam = op.parameter([-1], np.int32, name="beam_idx")
    beam.output(0).get_tensor().set_names({"beam_idx"})
    for i in range(count):
        past = model.inputs[3 + i]
        past.get_tensor().add_names({f"past.{i}"})
        model.outputs[1 + i].get_tensor().set_names({f"present.{i}"})
        users = list(past.get_target_inputs())
        gathered = op.gather(past, beam, op.constant(np.int64(0))).output(0)
        for user in users:
            user.replace_source_output(gathered)
    model.add_parameters([beam])
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, {f"past.{i}": f"present.{i}" for i in range(count)})
    for name, given in zip(
        ("input_ids", "attention_mask", "position_ids"), model.inputs, strict=False
    ):
        given.get_tensor().set_names({name})
        given.get_node().set_friendly_name(name)
    rows = op.gather(
        op.shape_of(model.input("input_ids"), "i64"),
        op.constant(np.array([0])),
        op.constant(np.int64(0)),
    )
    shape = op.concat([rows, op.constant(np.array([heads, 0, dim]))], 0)
    initial = op.broadcast(op.constant(np.float32(0)), shape)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([initial.output(0)])
    model.validate_nodes_and_infer_types()
    paged_attention_transformation(model)
    return model
