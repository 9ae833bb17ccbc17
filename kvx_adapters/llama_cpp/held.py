"""The tokens that a context holds of a sequence.

llama.h gives the first and the last position. The bytes of a state say how many tokens there are.

Source: llama.cpp v0.5.0 src/llama-kv-cache.cpp, state_write, seq_rm; src/llama-kv-cache-iswa.cpp,
        state_write; src/llama-context.cpp, state_seq_get_size
"""

from __future__ import annotations

from kvx_adapters.llama_cpp.memory import Memory
from kvx_core import CacheView, InvalidArgumentError
from kvx_core.argument_checks import plural

_HEADER = 8  # bytes of a state: magic, sequence
_OF_CELL = 12  # position, number of sequences, sequence
_OF_LAYER = 24  # what is said of its K and of its V


def positions_held(memory: Memory, view: CacheView, sequence: int) -> range:
    """The positions of a sequence's tokens in the cache that a view describes: it has each of them.

    From 0 on where the view does not have all layers of the cache: it may lack some then.

    view: facts.window says whether it is of windows, where a model has two caches
    Raises InvalidArgumentError where tokens in the middle were removed and none moved up.
    """
    found = memory.positions(sequence)
    every, windows = memory.state_bytes(sequence), memory.state_bytes(sequence, windows=True)
    # A model with windows has two caches. Of the windows' a state has what they still see.
    seen, window = found, view.facts.window
    if every == windows:
        num_bytes = every - _HEADER
    elif window:
        num_bytes, seen = windows - _HEADER, found[-window:]
    else:
        num_bytes, seen = every - windows, range(found.stop)
    count = _num_tokens(num_bytes, view)
    if count is None or count > len(seen):  # a view of some of its layers, or of more than K and V
        return range(found.stop)
    is_chunk = every != windows and window and count == (found.stop - 1) % window + 1
    if count != len(seen) and not is_chunk:
        raise InvalidArgumentError(
            f"sequence {sequence} has {plural(count, 'token')} at the positions {seen.start} to "
            f"{seen.stop - 1}, expected one at each: some were removed (llama_memory_seq_rm), and "
            "K of those behind is rotated for where they stand. Close the gap with "
            "llama_memory_seq_add"
        )
    return found if window else seen


def _num_tokens(num_bytes: int, view: CacheView) -> int | None:
    """The cells in a cache's part of a state; None if it is not of a cache like the view's."""
    layers = view.layers
    head = 4 + 4 * layers[0].num_blocks + 8 + _OF_LAYER * len(layers)  # a block is a stream
    count, rest = divmod(num_bytes - head, _OF_CELL + view.bytes_per_token())
    return None if rest or count < 0 else count
