"""A decoder and an encoder of lossless bfloat16 that follow the spec. Spec: E.19"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]


Bytes = npt.NDArray[np.uint8]


BLOCK = 4096


def bits_of_planes(planes: Bytes, width: int, count: int) -> npt.NDArray[np.int64]:
    """The code of each symbol: bit b of a word of plane p is bit p of symbol b of its group."""
    words = planes.view("<u4").reshape(-1, width)
    bits = words[:, None, :] >> np.arange(32, dtype=np.uint32)[:, None] & 1
    codes = (bits << np.arange(width, dtype=np.uint32)).sum(2).reshape(-1)
    assert not codes[count:].any()
    return codes[:count].astype(np.int64)


def reference_block(block: Bytes, count: int) -> Bits:
    """The numbers of a block."""
    widths, firsts = (int(block[0]), int(block[2])), (int(block[1]), int(block[3]))
    if widths[0] == 0:
        return block[8:].view("<u2").copy()
    others = block[4:8].view("<u2").astype(int)
    rest, at = block[8 : 8 + count], 8 + count
    levels = []
    for width, symbols in zip(widths, (count, others[0]), strict=True):
        size = (symbols + 31) // 32 * 4 * width
        levels.append(bits_of_planes(block[at : at + size].copy(), width, symbols))
        at += size
    raw = block[at:]
    assert len(raw) == others[1]
    most = [2**width - 1 for width in widths]
    places, exponents = [], []
    for code in levels[1]:
        if code == most[1]:
            places.append(int(raw[0]))
            raw = raw[1:]
        else:
            places.append(firsts[1] + int(code))
    for code in levels[0]:
        if code == most[0]:
            place = places.pop(0)
            exponents.append(place - most[0] if place < firsts[0] + most[0] else place)
        else:
            exponents.append(firsts[0] + int(code))
    signs = (rest & 0x80).astype(np.uint16) << 8
    return signs | np.array(exponents, np.uint16) << 7 | (rest & 0x7F)


def reference(encoded: Bytes) -> Bits:
    """All numbers of an encoded array."""
    assert encoded[:8].tobytes() == b"KVXL\x01\x02\0\0"
    numbers, length = (int(n) for n in encoded[8:24].view("<u8"))
    assert length == len(encoded)
    blocks = -(-numbers // BLOCK)
    ends = encoded[24 : 24 + 8 * blocks].view("<u8").astype(int).tolist()
    begins = [24 + 8 * blocks, *ends][:-1]
    found = [
        reference_block(encoded[begin:end], min(BLOCK, numbers - i * BLOCK))
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]
    return np.concatenate([np.empty(0, np.uint16), *found])
