"""A Llama as an ONNX graph with the inputs, outputs and attention of onnxruntime-genai's.

Source: onnxruntime-genai 0.18.0 models/builders/base.py, make_attention_op
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from kvx_adapters.cli.engines import Model

CONTRIB = "com.microsoft"


class Graph:
    """Nodes and weights, added one after the other.

    epsilon: of its norms
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def add(self, kind: str, *inputs: str, outputs: tuple[str, ...] = (), **options: Any) -> str:
        """A node; returns the name of its first output."""
        outputs = outputs or (f"{kind}_{len(self.nodes)}",)
        self.nodes.append(helper.make_node(kind, list(inputs), list(outputs), **options))
        return outputs[0]

    def weight(self, name: str, values: Tensor | np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def linear(self, x: str, name: str, weight: Tensor) -> str:
        return self.add("MatMul", x, self.weight(name, weight.T))

    def norm(self, x: str, name: str, weight: Tensor) -> str:
        scale = self.weight(name, weight)
        return self.add("SimplifiedLayerNormalization", x, scale, epsilon=self.epsilon)


@cache
def model_bytes(source: Model) -> bytes:
    """The model, as InferenceSession takes it."""
    model, config = source.llama, source.config
    g = Graph(config.rms_norm_eps)
    angles = torch.arange(config.max_position_embeddings)[:, None] * model.model.rotary_emb.inv_freq
    cos, sin = g.weight("cos", angles.cos()), g.weight("sin", angles.sin())
    axis, one = g.weight("axis", np.array([1])), g.weight("one", np.array(1, np.int32))
    counted = g.add("ReduceSum", "attention_mask", axis, keepdims=0)
    last = g.add("Sub", g.add("Cast", counted, to=TensorProto.INT32), one)
    length = g.add("Gather", g.add("Shape", "attention_mask"), g.weight("at", np.array(1)))
    total = g.add("Cast", length, to=TensorProto.INT32)
    x = g.add("Gather", g.weight("embed", model.model.embed_tokens.weight), "input_ids")
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", extent])
        for name, extent in (("input_ids", "new"), ("attention_mask", "all"))
    ]
    shape: list[str | int | None] = ["batch", config.num_key_value_heads, "room", config.head_dim]
    outputs = [
        helper.make_tensor_value_info(
            "logits", TensorProto.FLOAT, ["batch", "new", config.vocab_size]
        )
    ]
    for i, layer in enumerate(model.model.layers):
        at, own = layer.self_attn, f"layer{i}."
        y = g.norm(x, own + "norm1", layer.input_layernorm.weight)
        q, k, v = (
            g.linear(y, own + name, part.weight)
            for name, part in (("q", at.q_proj), ("k", at.k_proj), ("v", at.v_proj))
        )
        past = [f"past_key_values.{i}.{kv}" for kv in ("key", "value")]
        present = [f"present.{i}.{kv}" for kv in ("key", "value")]
        y = g.add(
            "GroupQueryAttention",
            *(q, k, v, *past, last, total, cos, sin),
            outputs=(f"attention{i}", *present),
            domain=CONTRIB,
            num_heads=config.num_attention_heads,
            kv_num_heads=config.num_key_value_heads,
            do_rotary=1,
            rotary_interleaved=0,
        )
        inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in past]
        outputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in present]
        x = g.add("Add", x, g.linear(y, own + "o", at.o_proj.weight))
        y = g.norm(x, own + "norm2", layer.post_attention_layernorm.weight)
        gate = g.linear(y, own + "gate", layer.mlp.gate_proj.weight)
        up = g.linear(y, own + "up", layer.mlp.up_proj.weight)
        gate = g.add("Mul", gate, g.add("Sigmoid", gate))
        y = g.linear(g.add("Mul", gate, up), own + "down", layer.mlp.down_proj.weight)
        x = g.add("Add", x, y)
    x = g.norm(x, "norm", model.model.norm.weight)
    g.add("MatMul", x, g.weight("head", model.lm_head.weight.T), outputs=("logits",))
    graph = helper.make_graph(g.nodes, "llama", inputs, outputs, g.weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(CONTRIB, 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    serialized: bytes = made.SerializeToString()
    return serialized
