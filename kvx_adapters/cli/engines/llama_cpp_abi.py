"""The C API of llama.cpp v0.5.0, as far as live_llama_cpp.py and tests call it, by ctypes.

Source: llama.cpp v0.5.0 include/llama.h, ggml/include/ggml.h
"""

from __future__ import annotations

import ctypes as c
from functools import cache
from typing import Any

from kvx_adapters.cli.engines import llama_cpp_library
from kvx_adapters.cli.engines.llama_cpp_library import LIBGGML, LIBLLAMA, folder

I64 = 27  # GGML_TYPE_I64


class Tensor(c.Structure):
    """ggml_tensor"""


Tensor._fields_ = [
    ("type", c.c_int32),
    ("buffer", c.c_void_p),
    ("ne", c.c_int64 * 4),
    ("nb", c.c_size_t * 4),
    ("op", c.c_int32),
    ("op_params", c.c_int32 * 16),
    ("flags", c.c_int32),
    ("src", c.POINTER(Tensor) * 10),
    ("view_src", c.POINTER(Tensor)),
    ("view_offs", c.c_size_t),
    ("data", c.c_void_p),
    ("name", c.c_char * 64),
    ("extra", c.c_void_p),
    ("padding", c.c_char * 8),
]
EvalCallback = c.CFUNCTYPE(c.c_bool, c.POINTER(Tensor), c.c_bool, c.c_void_p)
LogCallback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)


class ModelParams(c.Structure):
    """llama_model_params"""

    _fields_ = (
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int32),
        ("load_mode", c.c_int32),
        ("lazy_mode", c.c_int32),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("booleans", c.c_bool * 6),
    )


class ContextParams(c.Structure):
    """llama_context_params"""

    _fields_ = (
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int32),
        ("rope_scaling_type", c.c_int32),
        ("pooling_type", c.c_int32),
        ("attention_type", c.c_int32),
        ("flash_attn_type", c.c_int32),
        ("rope_and_yarn", c.c_float * 6),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", EvalCallback),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("embeddings", c.c_bool),
        ("offload_kqv", c.c_bool),
        ("no_perf", c.c_bool),
        ("op_offload", c.c_bool),
        ("swa_full", c.c_bool),
        ("kv_unified", c.c_bool),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    )


class Batch(c.Structure):
    """llama_batch"""

    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


_P, _I, _Z, _B = c.c_void_p, c.c_int32, c.c_size_t, c.c_bool
_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # result, arguments
    "llama_model_default_params": (ModelParams,),
    "llama_context_default_params": (ContextParams,),
    "llama_model_load_from_file": (_P, c.c_char_p, ModelParams),
    "llama_model_free": (None, _P),
    "llama_model_rope_type": (_I, _P),
    "llama_model_n_layer": (_I, _P),
    "llama_model_n_head_kv": (_I, _P),
    "llama_model_n_swa": (_I, _P),
    "llama_model_meta_val_str": (_I, _P, c.c_char_p, c.c_char_p, _Z),
    "llama_init_from_model": (_P, _P, ContextParams),
    "llama_free": (None, _P),
    "llama_batch_init": (Batch, _I, _I, _I),
    "llama_batch_free": (None, Batch),
    "llama_decode": (_I, _P, Batch),
    "llama_get_logits_ith": (c.POINTER(c.c_float), _P, _I),
    "llama_get_memory": (_P, _P),
    "llama_memory_seq_rm": (_B, _P, _I, _I, _I),
    "llama_memory_seq_add": (None, _P, _I, _I, _I, _I),
    "llama_memory_seq_cp": (None, _P, _I, _I, _I, _I),
    "llama_state_seq_set_data": (_Z, _P, c.c_char_p, _Z, _I),
    "llama_state_seq_save_file": (_Z, _P, c.c_char_p, _I, c.POINTER(_I), _Z),
}


_no_log = LogCallback(lambda *_: None)


@cache
def library() -> Any:
    """libllama with its CPU backend, which picks the fastest variant for this processor."""
    at = folder()
    if not (at / LIBLLAMA).exists():
        raise FileNotFoundError(
            f"{at / LIBLLAMA} is missing: python -m {llama_cpp_library.__name__} installs it"
        )
    ggml = c.CDLL(str(at / LIBGGML), c.RTLD_GLOBAL)
    llama = c.CDLL(str(at / LIBLLAMA), c.RTLD_GLOBAL)
    llama.llama_log_set(_no_log, None)
    ggml.ggml_backend_load_all_from_path(str(at).encode())
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    return llama
