"""Equal facts for both ends, for tests that compare bytes only."""

from __future__ import annotations

from kvx_core import CacheFacts

SAME_MODEL = CacheFacts(
    fingerprint="the same model", rotary="none", rotary_dim=0, rope_applied=False
)
