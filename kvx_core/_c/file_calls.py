"""Calls of libkvx_python that open, read, write and name files, without the GIL."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import c_char_p, c_size_t, c_uint64, c_void_p, py_object
from functools import cache

from kvx_core._c.bound import library

# For this processor, or for all of its sort.
_XXH3 = ("XXH3_128bits_dispatch", "XXH3_128bits")


class _Hash(ctypes.Structure):
    """XXH128_hash_t. Source: https://github.com/Cyan4973/xxHash/blob/dev/xxhash.h"""

    _fields_ = (("low", c_uint64), ("high", c_uint64))

    @property
    def digest(self) -> bytes:
        return int(self.high << 64 | self.low).to_bytes(16, "big")


def read_file() -> Callable[..., tuple[int, int, int]]:
    """(folder, path, least, most, views) -> (handle, size, bytes read): opens a regular file for
    reading and marks it as used. Fills the views, a tuple of at most 64 writable buffers, with its
    first bytes if its size is `least` to `most`. The GIL is free meanwhile.

    folder: a handle, or AT_FDCWD; path: bytes, relative to it or absolute, without a symbolic link
    Returns minus an errno in place of a handle or of bytes; ENXIO for what is no regular file.
    """
    make = library().kvx_python_read_file
    make.argtypes, make.restype = (), py_object
    function: Callable[..., tuple[int, int, int]] = make()
    return function


def write_files() -> Callable[..., bytes]:
    """(folder, names, mode, contents, root, paths) -> files: makes new files in a folder and writes
    their contents, each a tuple of buffers that follow one another. The files are open and locked,
    and have this mode whatever the umask is. The GIL is free meanwhile.

    folder, root: handles; names, contents, paths: tuples, of bytes but for the contents
    paths: below the root, that the files are for: no file is made for one that exists
    files: two int64 for each file: its handle, and its bytes on the disk. Minus an errno in place
           of the handle: there is no such file. EEXIST: its path exists; EAGAIN: its name was
           there, or another process took it for abandoned before it was locked; try another name
    """
    make = library().kvx_python_write_files
    make.argtypes, make.restype = (), py_object
    function: Callable[..., bytes] = make()
    return function


def name_files() -> Callable[..., bytes]:
    """(folder, names, handles, root, paths) -> errors: links files of a folder to paths below a
    root, to which no symbolic link may lead; deletes their names in the folder and closes them. The
    GIL is free meanwhile.

    folder, root: handles; names, paths: tuples of bytes; handles: a tuple of the files' handles
    errors:       a C int for each file: 0, or minus an errno: that file is as it was. EEXIST: a
                  file has the path already
    """
    make = library().kvx_python_name_files
    make.argtypes, make.restype = (), py_object
    function: Callable[..., bytes] = make()
    return function


@cache
def read_chunks() -> Callable[..., tuple[bytes, bytes]] | None:
    """(folder, names, plans, starts, memory, places) -> (good, found): reads at most 64 files of
    chunks below a folder, checks all that is read and marks them as used, without the GIL.

    folder: a handle. To names, relative to it, no symbolic link may lead
    plans:  what is read of each: see Selection.plan of file_layout.py
    starts: the position of its first token that each must have
    places: where the data of each begin in memory, a writable buffer
    good:   of each file 1, or 0: nothing is said of it, and its place may have any bytes
    found:  of all files, one after another, parent and ids of those that are good
    None: the package xxhash shows C no XXH3.
    """
    from xxhash import xxh3_128_digest  # which GPU machines may not have

    package = ctypes.CDLL(sys.modules[xxh3_128_digest.__module__].__file__)
    for name in _XXH3:
        xxh3 = getattr(package, name, None)
        if xxh3 is not None:
            xxh3.argtypes, xxh3.restype = (c_char_p, c_size_t), _Hash
            texts = [bytes(range(n)) for n in (0, 7, 250)]
            if all(xxh3(text, len(text)).digest == xxh3_128_digest(text) for text in texts):
                make = library().kvx_python_read_chunks
                make.argtypes, make.restype = (c_void_p, py_object), py_object
                function: Callable[..., tuple[bytes, bytes]] = make(
                    ctypes.cast(xxh3, c_void_p), package
                )
                return function
    return None
