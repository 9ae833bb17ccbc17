"""Facts for tests that are about bytes: both ends hold the same, and say so."""

from __future__ import annotations

from kvx_core import CacheFacts

SAME_MODEL = CacheFacts(
    fingerprint="the same model", rotary="none", rotary_dim=0, rope_applied=False
)
