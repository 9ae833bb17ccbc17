"""OwnKinds: how the files are laid out that a process captures from its caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvx_core.snapshot import Precisions, Section, StorageFormat
from kvx_core.snapshot.capture import check_sections, parts_of, to_capture_all
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets
from kvx_core.view import CacheView

_MOST = 64  # that are remembered


class _Known(NamedTuple):
    kind: Kind
    views: tuple[CacheView, ...]  # kept, so that their ids stay theirs


class OwnKinds:
    """Finds the kind of sections, once for the same views. Threads may share it."""

    def __init__(self, format: StorageFormat, secrets: Secrets) -> None:
        self._format, self._secrets = format, secrets
        self._known: dict[object, _Known] = {}

    def of(self, sections: Sequence[Section], carried: Precisions, chunk_tokens: int) -> Kind:
        """The kind of what is captured from these sections.

        carried: the coarsest precision that their values had before, of all layers or a tuple
        Raises InvalidArgumentError, UnsupportedError.
        """
        key = tuple((id(s.view), s.layers, s.encoding) for s in sections), carried, chunk_tokens
        found = self._known.get(key)
        if found is None:
            check_sections(sections, self._format, carried)
            tensors = dict(to_capture_all(sections, chunk_tokens, self._format))
            parts = tuple(parts_of(sections, self._format, carried))
            kind = Kind.of(
                parts,
                tensors,
                chunk_tokens,
                keyed=self._secrets.is_keyed,
                encrypted=self._secrets.is_encrypted,
            )
            if len(self._known) >= _MOST:
                self._known.clear()
            found = self._known[key] = _Known(kind, tuple(s.view for s in sections))
        return found.kind
