"""A model in llama.cpp v0.5.0, its cache read and written in place."""

from __future__ import annotations

import ctypes as c
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from kvx_adapters import llama_cpp as adapter
from kvx_adapters.cli.engines import Model, gguf_model
from kvx_adapters.cli.engines.llama_cpp_abi import I64, EvalCallback, Tensor, library
from kvx_core import CacheSpan, CacheView

_FOLDER = tempfile.TemporaryDirectory()


@cache
def _loaded(model: Model, architecture: gguf_model.Architecture) -> int:
    """A loaded llama_model, kept until the process ends."""
    path = Path(_FOLDER.name) / f"{id(model)}-{architecture}.gguf"
    gguf_model.write(path, model, architecture)
    llama = library()
    found = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not found:
        raise RuntimeError(f"llama.cpp does not load {path.name}")
    return int(found)


class Context:
    """A llama_context with a model, and what its eval callback sees.

    cells:   of each token of each sequence in layer 0, in order of positions
    full_cells: the same in the last layer, which differ in a model with sliding windows
    indices: that the last batch has written to, of each cache tensor
    """

    def __init__(
        self,
        model: Model,
        num_tokens: int = 256,
        *,
        architecture: gguf_model.Architecture = "llama",
        k_dtype: str = "F32",
        v_dtype: str = "F32",
        flash_attention: bool = False,
        num_sequences: int = 1,
        unified: bool = False,
    ) -> None:
        self._source, self.architecture = model, architecture
        self.model = _loaded(model, architecture)
        self.k_dtype, self.v_dtype = k_dtype, v_dtype
        self.v_transposed: bool | None = None  # as seen in the graph
        self.cells: dict[int, list[int]] = {}
        self.full_cells: dict[int, list[int]] = {}
        self._tensors: dict[str, Tensor] = {}
        self.indices: dict[str, np.ndarray] = {}
        llama = self._llama = library()
        params = llama.llama_context_default_params()
        room = -(-num_tokens // 256) * 256
        params.n_ctx = room * num_sequences
        params.n_batch = params.n_ubatch = room
        params.n_threads = params.n_threads_batch = 1
        params.n_seq_max, params.kv_unified = num_sequences, unified
        params.flash_attn_type = int(flash_attention)
        params.type_k, params.type_v = adapter.ggml_type(k_dtype), adapter.ggml_type(v_dtype)
        indices, tensors = self.indices, self._tensors
        self._callback = params.cb_eval = EvalCallback(
            lambda node, ask, _: _see(node.contents, tensors, indices) and not ask
        )
        self.context = llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp makes no context of these options")
        self.close = finalize(self, llama.llama_free, self.context)
        self.memory = adapter.Memory(llama, self.context)

    def run(self, tokens: Sequence[int], sequence: int = 0) -> int:
        """Computes tokens of a sequence; returns the greedy next one."""
        llama, held = self._llama, self.cells.setdefault(sequence, [])
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, len(held) + i, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, i == len(tokens) - 1
        self.indices.clear()
        status = llama.llama_decode(self.context, batch)
        llama.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        k, v = (self.indices[f"cache_{kv}_l0"] for kv in "kv")
        self.v_transposed = adapter.v_transposed(len(k), len(v))
        held += k.tolist()
        last = self.indices[f"cache_k_l{self._source.config.num_hidden_layers - 1}"]
        self.full_cells.setdefault(sequence, []).extend(last.tolist())
        logits = llama.llama_get_logits_ith(self.context, len(tokens) - 1)
        return int(np.ctypeslib.as_array(logits, (self._source.config.vocab_size,)).argmax())

    def decode(self, count: int, *, after: int, sequence: int = 0) -> list[int]:
        """Greedy tokens, as LiveEngine.decode."""
        tokens = [after]
        for _ in range(count):
            tokens.append(self.run(tokens[-1:], sequence))
        return tokens[1:]

    def keep(self, num_tokens: int, sequence: int = 0) -> None:
        """Drops all tokens of a sequence but the first `num_tokens`, whose cells are then free."""
        memory = self._llama.llama_get_memory(self.context)
        assert self._llama.llama_memory_seq_rm(memory, sequence, num_tokens, -1)
        del self.cells[sequence][num_tokens:], self.full_cells[sequence][num_tokens:]

    def remove(self, sequence: int) -> None:
        """Forgets a sequence, whose cells are then free."""
        memory = self._llama.llama_get_memory(self.context)
        assert self._llama.llama_memory_seq_rm(memory, sequence, -1, -1)
        del self.cells[sequence], self.full_cells[sequence]

    @property
    def rotation(self) -> adapter.Rotation:
        dim = gguf_model.head_dim(self._source)
        return adapter.rotation(self.k_dtype, self.v_dtype, k_head_dim=dim, v_head_dim=dim)

    def facts(self, **changes: Any) -> Any:
        key = f"{self.architecture}.rope.dimension_count".encode()
        found = c.create_string_buffer(16)
        assert self._llama.llama_model_meta_val_str(self.model, key, found, len(found)) > 0
        facts = adapter.cache_facts(
            rope_type=self._llama.llama_model_rope_type(self.model),
            rotary_dim=int(found.value),
            num_layers=self._llama.llama_model_n_layer(self.model),
            num_kv_heads=self._llama.llama_model_n_head_kv(self.model),
            k_dtype=self.k_dtype,
            v_dtype=self.v_dtype,
            rotation=self.rotation,
            window=self._llama.llama_model_n_swa(self.model),
            fingerprint=self._source.fingerprint,
        )
        return replace(facts, **changes)

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer, as the graph of the last batch has them."""
        layers = range(self._llama.llama_model_n_layer(self.model))
        return [(self._tensors[f"cache_k_l{i}"], self._tensors[f"cache_v_l{i}"]) for i in layers]

    def cache(self, layers: slice = slice(None), **facts: Any) -> CacheView:
        """All cells of all layers, or of some, whose facts differ. A batch must have run."""
        assert self.v_transposed is not None
        return adapter.cache_view(
            self.tensors()[layers],
            self.facts(**facts),
            num_kv_heads=self._llama.llama_model_n_head_kv(self.model),
            v_transposed=self.v_transposed,
            memory=self.memory,
            owner=self,
            outdated=lambda: None if self.close.alive else "llama_free has freed the context",
        )

    def span(self, *sequences: int) -> CacheSpan:
        """The tokens of sequences, of 0 if none is given."""
        cells = {sequence: self.cells[sequence] for sequence in sequences or (0,)}
        return adapter.span(self.cache(), cells, memory=self.memory)

    def state(self, sequence: int = 0) -> bytes:
        """llama_state_seq_get_data"""
        return self.memory.state(sequence)

    def set_state(self, data: bytes, sequence: int = 0) -> int:
        """llama_state_seq_set_data: the bytes that it read, 0 if it refuses them. The cells that it
        took are unknown."""
        found = self._llama.llama_state_seq_set_data(self.context, data, len(data), sequence)
        return int(found)

    def save(self, path: Path, tokens: Sequence[int], sequence: int = 0) -> None:
        """llama_state_seq_save_file"""
        self.memory.settle()
        ids = (c.c_int32 * len(tokens))(*tokens)
        file = str(path).encode()
        assert self._llama.llama_state_seq_save_file(self.context, file, sequence, ids, len(ids))


def _see(node: Tensor, tensors: dict[str, Tensor], indices: dict[str, np.ndarray]) -> bool:
    """Notes the cache's tensors, and the indices of a node that writes into one."""
    for used in (node, *(source.contents for source in node.src[:3] if source)):
        root = used
        while root.view_src:
            root = root.view_src.contents
        name = root.name.decode()
        if name.startswith("cache_"):
            tensors[name] = root
            index = node.src[1]
            if used is node and index and index.contents.type == I64:
                pointer = c.cast(index.contents.data, c.POINTER(c.c_int64))
                found = np.ctypeslib.as_array(pointer, (index.contents.ne[0],))
                indices[name] = found.copy()
    return True


class Live:
    """See LiveEngine: architecture llama, whose K has interleaved dims, float32, V transposed."""

    def __init__(self, model: Model, num_tokens: int = 256) -> None:
        self.context = Context(model, num_tokens)
        self.context.cells[0] = []
        self._view: CacheView | None = None  # llama.cpp's tensors stay where they are

    @property
    def lengths(self) -> list[int]:
        return [len(self.context.cells[0])]

    def prefill(self, tokens: Sequence[int]) -> None:
        self.context.run(tokens)

    def reserve(self, num_tokens: int) -> None:
        """llama.cpp hands out cells when it computes, so it computes any tokens, the last of them
        alone: the next step finds its graph as it is then."""
        for count in filter(None, (num_tokens - 1, 1)):
            self.context.run([0] * count)
        for layer in self.context.cache().layers:
            for tensor in layer.tensors.values():
                np.asarray(tensor.owner)[:] = 0

    def keep(self, num_tokens: int) -> None:
        """Drops all tokens held but the first `num_tokens`."""
        self.context.keep(num_tokens)

    def view(self) -> CacheSpan:
        self._view = self._view or self.context.cache()
        return adapter.span(self._view, {0: self.context.cells[0]}, memory=self.context.memory)

    def decode(self, count: int, *, after: int) -> list[int]:
        return self.context.decode(count, after=after)
