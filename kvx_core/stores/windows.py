"""Windows: how many tokens before the end of a prefix a reader needs of each layer.

Spec: docs/store_format.md, "What a prefix needs".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from kvx_core.argument_checks import bad_argument, int64s

ALL = 1 << 62  # more than a prompt has


@dataclass(frozen=True, slots=True)
class Windows:
    """The last tokens of a prefix that a reader needs of each layer of a model.

    reach: for each layer, how many tokens before the end of a prefix; ALL: every token of it
    """

    reach: tuple[int, ...]

    @classmethod
    def of(cls, windows: Any, num_layers: int) -> Self:
        """windows: a number of tokens for each layer, 0 for all; None: all tokens of every layer

        Raises InvalidArgumentError.
        """
        found = (0,) * num_layers if windows is None else tuple(int64s("windows", windows))
        if len(found) != num_layers or min(found) < 0:
            raise bad_argument(
                "windows",
                windows,
                f"for each of the {num_layers} layers how many tokens before the end of a prefix "
                "are needed, 0 for all",
            )
        return cls(tuple(min(each, ALL) or ALL for each in found))

    def split(self, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Returns groups of layers that are needed equally far back.

        The files of a group live and die together.
        """
        return _split(self.reach, tuple(layers))


@lru_cache(maxsize=64)
def _split(reach: tuple[int, ...], layers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    found = sorted({reach[layer] for layer in layers}, reverse=True)
    return tuple(tuple(layer for layer in layers if reach[layer] == one) for one in found)
