"""Items of a prompt that are no tokens, as images and embeddings: their digests, and the ids under
which their positions are stored.

Spec: docs/store_format.md, "Files".
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core.desc.in_place import is_torch
from kvx_core.errors import InvalidArgumentError

# A shorter item has too few ids to be told apart from all others.
MIN_ITEM_TOKENS = 4


def item_digest(kind: str, data: Mapping[str, Any]) -> bytes:
    """A digest of an item as its model takes it: 32 bytes.

    kind: such as "image"
    data: by name what the model takes, such as pixel values: arrays, torch tensors, numbers, texts,
          bytes, None, and lists or mappings of these
    Names, dtypes, shapes and every byte count. Raises InvalidArgumentError for other values.
    """
    digest = hashlib.sha256(b"kvx item 1")
    for part in _parts([kind, data]):
        digest.update(part)
    return digest.digest()


def item_ids(digest: bytes, num_tokens: int) -> npt.NDArray[np.int64]:
    """The ids of an item's positions: negative, as no id of a vocabulary is.

    digest: of the item and of what else decides its keys and values
    """
    stream = hashlib.shake_256(b"kvx item ids" + digest).digest(8 * num_tokens)
    return np.frombuffer(stream, "<i8") | np.int64(-(2**63))


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    """A value as bytes: each part says what it is and how long, so that no two values are alike."""
    if value is None:
        yield b"N"
    elif isinstance(value, (bool, int, float)):
        text = repr(value).encode()
        yield b"%c%d:%s" % (type(value).__name__[0].encode(), len(text), text)
    elif isinstance(value, (str, bytes)):
        raw = value.encode() if isinstance(value, str) else value
        yield b"%c%d:" % (b"s" if isinstance(value, str) else b"y", len(raw))
        yield raw
    elif isinstance(value, (list, tuple)):
        yield b"L%d:" % len(value)
        for each in value:
            yield from _parts(each)
    elif isinstance(value, Mapping):
        yield b"M%d:" % len(value)
        for name in sorted(value):
            yield from _parts([name, value[name]])
    else:
        dtype, shape, array = _array(value)
        yield b"A"
        yield from _parts([dtype, list(shape), len(array)])
        yield array.data


def _array(value: Any) -> tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]:
    """Returns the dtype, the shape and the bytes of an array or a torch tensor."""
    if is_torch(value):
        flat = value.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(sys.modules["torch"].uint8).numpy()
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), raw
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return value.dtype.name, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    raise InvalidArgumentError(
        f"an item has a {type(value).__name__}, expected arrays, tensors, numbers, texts, bytes, "
        "None and lists or mappings of these"
    )
