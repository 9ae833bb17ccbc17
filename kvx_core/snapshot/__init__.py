"""Tokens of a sequence at rest: any cache <-> memory <-> a safetensors file.

section    what an engine holds of a sequence            snapshot  captured, restored, read, saved
capture    what is copied between caches and a snapshot  file      reads without trust, and writes
contents   what a snapshot says that it holds            header    the header of a file
precision  which numbers stored values can be            seal      whether a header is as written
signing    keys                                          text      JSON that is not trusted
memory     where tensors lie                             scales    without blocks
"""

from kvx_core.snapshot.capture import token_ids
from kvx_core.snapshot.contents import Header, Part, Stored
from kvx_core.snapshot.errors import CorruptError, StoreError, UnsignedError
from kvx_core.snapshot.file import MAX_HEADER_BYTES
from kvx_core.snapshot.memory import host_memory
from kvx_core.snapshot.precision import VALUES, Accept, Precision
from kvx_core.snapshot.seal import FORMAT
from kvx_core.snapshot.section import Section
from kvx_core.snapshot.signing import Key, read_key
from kvx_core.snapshot.snapshot import Snapshot, read_tokens

__all__ = [
    "FORMAT",
    "MAX_HEADER_BYTES",
    "VALUES",
    "Accept",
    "CorruptError",
    "Header",
    "Key",
    "Part",
    "Precision",
    "Section",
    "Snapshot",
    "StoreError",
    "Stored",
    "UnsignedError",
    "host_memory",
    "read_key",
    "read_tokens",
    "token_ids",
]
