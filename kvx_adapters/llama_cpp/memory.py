"""What llama.cpp itself says of a context's cache, asked through the caller's library by ctypes.

llama_memory_seq_add changes positions at once and rotates keys in the next llama_decode;
llama_memory_seq_cp from one stream to another copies keys and values then. Until then positions and
keys do not belong together, and neither a state nor a tensor shows it.
Source: llama.cpp v0.5.0 src/llama-kv-cache.cpp, seq_add, seq_cp, update; src/llama-context.cpp,
        memory_update, decode
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvx_core import InvalidArgumentError, UnsupportedError
from kvx_core.argument_checks import integer

_P, _I, _Z = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
# llama_context::memory_update(bool): what llama_decode calls before it computes. No function of
# llama.h does it.
_UPDATE = "_ZN13llama_context13memory_updateEb"
_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # result, arguments
    _UPDATE: (ctypes.c_bool, _P, ctypes.c_bool),
    "llama_synchronize": (None, _P),
    "llama_n_seq_max": (ctypes.c_uint32, _P),
    "llama_get_memory": (_P, _P),
    "llama_memory_seq_pos_min": (_I, _P, _I),
    "llama_memory_seq_pos_max": (_I, _P, _I),
    "llama_state_seq_get_size": (_Z, _P, _I),
    "llama_state_seq_get_size_ext": (_Z, _P, _I, ctypes.c_uint32),
    "llama_state_seq_get_data": (_Z, _P, _P, _Z, _I),
}


class Memory:
    """The memory of a context: its sequences, and what waits to be done to them.

    library: ctypes.CDLL of libllama; it is not changed
    context: the llama_context, a pointer or its address. It must live as long as Memory is used
    Raises UnsupportedError for a library that lacks a function of v0.5.0.
    """

    def __init__(self, library: Any, context: Any) -> None:
        self._context = ctypes.cast(context, _P)
        self.num_settled = 0  # times that something waited
        self._functions: dict[str, Any] = {}
        for name, (result, *arguments) in _FUNCTIONS.items():
            try:
                # A prototype of its own: argtypes of the caller's functions stay as they are.
                found = ctypes.CFUNCTYPE(result, *arguments)((name, library))
            except (AttributeError, TypeError):
                raise UnsupportedError(
                    f"library has no {name}, expected ctypes.CDLL of the libllama of llama.cpp "
                    "v0.5.0, as a shared library that exports its C++ functions"
                ) from None
            self._functions[name] = found

    def settle(self) -> None:
        """Does what waits for the next llama_decode: shifts of positions, copies between streams.

        Mutates the context's cache as that llama_decode would. Does nothing if nothing waits.
        Raises InvalidArgumentError if llama.cpp fails to do it.
        """
        self._call("llama_synchronize")
        # It says whether something waited, not whether that succeeded: then nothing waits any more.
        waited = self._call(_UPDATE, False)
        self.num_settled += waited
        if waited and self._call(_UPDATE, False):
            raise InvalidArgumentError(
                "llama.cpp has not applied a shift of positions or a copy between streams: its log "
                "says why. Expected none to wait: call llama_decode first"
            )

    def positions(self, sequence: int) -> range:
        """First to last position of a sequence; empty for one without tokens.

        Tokens between may have been removed: llama_cpp.span asks how many there are.
        Of a model with sliding windows, those in the cells of its windows. Raises
        InvalidArgumentError.
        """
        chosen, memory = self._sequence(sequence), self._call("llama_get_memory")
        first, last = (
            self._functions[f"llama_memory_seq_pos_{end}"](memory, chosen) for end in ("min", "max")
        )
        return range(max(first, 0), last + 1)

    def state_bytes(self, sequence: int, *, windows: bool = False) -> int:
        """llama_state_seq_get_size: bytes of a state, which is not made. Raises
        InvalidArgumentError.

        windows: of a model with sliding windows, of the cache of these layers alone
        """
        chosen = self._sequence(sequence)
        return int(self._call("llama_state_seq_get_size_ext", chosen, int(windows)))

    def state(self, sequence: int = 0) -> bytes:
        """llama_state_seq_get_data, settled first: what State.read reads.

        Mutates the context's cache as `settle` does. Raises InvalidArgumentError.
        """
        chosen = self._sequence(sequence)
        self.settle()
        size = self._call("llama_state_seq_get_size", chosen)
        data = ctypes.create_string_buffer(size)
        written = self._call("llama_state_seq_get_data", data, size, chosen)
        if written != size:
            raise InvalidArgumentError(
                f"llama_state_seq_get_data wrote {written} bytes, expected {size}: llama.cpp's log "
                "says why"
            )
        return data.raw

    def _sequence(self, sequence: int) -> int:
        return integer("sequence", sequence, 0, self._call("llama_n_seq_max") - 1)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._functions[name](self._context, *arguments)
