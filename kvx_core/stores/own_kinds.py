"""OwnKinds: the kinds of the files that a process captures from its caches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from kvx_core.desc.view import CacheView
from kvx_core.snapshot import Precision, Precisions, Section, StorageFormat
from kvx_core.snapshot.capture import check_sections, parts_of, to_capture_all
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.entries import LoadedPrecision
from kvx_core.stores.loads import says_precision

_MOST = 64  # kinds that are remembered


class _Known(NamedTuple):
    kind: Kind
    views: tuple[CacheView, ...]  # kept alive, so that no other view gets their ids


class OwnKinds:
    """Makes the kind of sections' files once for the same views. Threads may share it."""

    def __init__(
        self,
        format: StorageFormat,
        secrets: Secrets,
        own: Sequence[Precision],
        carried: LoadedPrecision,
    ) -> None:
        """own: the precision of each layer of the cache"""
        self._format, self._secrets = format, secrets
        self._own, self._carried = tuple(own), carried
        self._known: dict[object, _Known] = {}

    def at_most(self, sections: Sequence[Section], *, states: bool) -> Precisions:
        """Returns the upper bound of the precision that captured values count as, whatever their
        sections say.

        states: True: the sections hold states, each of which is computed from all layers before it
        """
        carried, each = self._carried.precision, enumerate(self._own)
        if states:
            return carried.meet(reduce(Precision.meet, self._own))
        unsaid = {layer for one in sections if not says_precision(one) for layer in one.layers}
        known = tuple(carried.meet(own) if i in unsaid else carried for i, own in each)
        return known if unsaid else carried

    def of(self, sections: Sequence[Section], at_most: Precisions, chunk_tokens: int) -> Kind:
        """Returns the kind of the files that are captured from these sections.

        at_most: what `at_most` returned
        Raises InvalidArgumentError, UnsupportedError.
        """
        key = tuple((id(s.view), s.layers, s.encoding) for s in sections), at_most, chunk_tokens
        found = self._known.get(key)
        if found is None:
            check_sections(sections, self._format, at_most)
            tensors = dict(to_capture_all(sections, chunk_tokens, self._format))
            parts = tuple(parts_of(sections, self._format, at_most))
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
