"""Snapshots copy tokens of a sequence from a cache to memory or a safetensors file, and back.

section         the layers and blocks of a sequence that one engine holds
snapshot        captures, restores, reads and saves a snapshot
capture         lists the tensors of a snapshot, copies between caches and snapshots
contents        describes the contents of a snapshot
precision       the numbers that stored values can be
memory          allocates memory, assigns offsets to tensors
scales          scales in the shapes of a snapshot
planes          planes of a section
dense           views the tensors of a snapshot as caches
storage_format  the format that K and V are converted to
rows            copies K and V in units that span heads
pool            memory that snapshots reuse
chunks          captures the chunks of one sequence
nulls           finds tokens that lie in null blocks
side_by_side    restores several snapshots with one copy
restore         copies a snapshot into a cache
room            memory that snapshots are read into
threaded        runs work on many bytes in several threads

Files of stores and of snapshots:
chunk_file      writes and reads the file of a chunk
chunk_reads     reads files of chunks with few system calls
kind            the layout that files share
kind_text       writes and parses the text of a kind, which is not trusted
snapshot_file   writes and reads the file of a snapshot, which contains its kind
file_layout     the position of every part of a file
record          the part of a header that differs between files
pieces          the units in which a file is checked
coding          lossless encodings of tensors in files
sealing         checks and encrypts records and pieces
secrets         the keys of a process
"""

from kvx_core.errors import CorruptError, StoreError, UnsignedError
from kvx_core.snapshot.capture import precision_of, token_ids
from kvx_core.snapshot.chunks import Chunks
from kvx_core.snapshot.contents import Header, Part, PlaneKind, Stored
from kvx_core.snapshot.nulls import Nulls
from kvx_core.snapshot.pool import MemoryPool
from kvx_core.snapshot.precision import VALUES, Accept, Precision, Precisions
from kvx_core.snapshot.record import MAX_HEADER_BYTES
from kvx_core.snapshot.room import Room
from kvx_core.snapshot.secrets import Key, read_key
from kvx_core.snapshot.section import Section
from kvx_core.snapshot.side_by_side import can_join, restore_all
from kvx_core.snapshot.snapshot import Snapshot
from kvx_core.snapshot.storage_format import StorageFormat

__all__ = [
    "MAX_HEADER_BYTES",
    "VALUES",
    "Accept",
    "Chunks",
    "CorruptError",
    "Header",
    "Key",
    "MemoryPool",
    "Nulls",
    "Part",
    "PlaneKind",
    "Precision",
    "Precisions",
    "Room",
    "Section",
    "Snapshot",
    "StorageFormat",
    "StoreError",
    "Stored",
    "UnsignedError",
    "can_join",
    "precision_of",
    "read_key",
    "restore_all",
    "token_ids",
]
