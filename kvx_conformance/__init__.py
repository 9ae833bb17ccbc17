"""A conformance suite for KV caches: what descriptions of an engine's cache must not get wrong.

    python -m kvx_conformance engine MODULE[:NAME]       an engine's own five functions

A case is one promise and where it was broken in the field; a subject is what is checked. Cases run
in a process of their own, which may end or hang: docs/conformance.md.
"""

from __future__ import annotations

from kvx_conformance.case import Case, Lost, NotApplicable, Outcome, Wrong, case

__all__ = ["Case", "Lost", "NotApplicable", "Outcome", "Wrong", "case"]
