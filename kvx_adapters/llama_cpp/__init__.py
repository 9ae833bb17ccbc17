"""llama.cpp: the KV cache of a context as KVX views, and its sequence states. Imports no llama.cpp.

`cache_view` describes the tensors of a context in place: an eval callback (llama_context_params
.cb_eval) sees them, and the cells that each batch takes. `Memory` asks llama.cpp what it holds, and
has it do first what waits for its next step. `State` reads and writes what
llama_state_seq_get_data, _set_data and _save_file exchange. `unrotated` and `migrate_rotated` are
for quantized caches, which llama.cpp stores Hadamard-rotated.
Source: llama.cpp v0.5.0
"""

from kvx_adapters.llama_cpp.cells import cache_desc, cache_view, slot_mapping, span, v_transposed
from kvx_adapters.llama_cpp.facts import VERSION, Rotation, cache_facts, rotation
from kvx_adapters.llama_cpp.ggml_types import dtype_of, ggml_type
from kvx_adapters.llama_cpp.memory import Memory
from kvx_adapters.llama_cpp.rotated import migrate_rotated, unrotated
from kvx_adapters.llama_cpp.state import State, StateCells

__all__ = [
    "VERSION",
    "Memory",
    "Rotation",
    "State",
    "StateCells",
    "cache_desc",
    "cache_facts",
    "cache_view",
    "dtype_of",
    "ggml_type",
    "migrate_rotated",
    "rotation",
    "slot_mapping",
    "span",
    "unrotated",
    "v_transposed",
]
