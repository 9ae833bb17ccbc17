"""Operations on described caches: write, gather, migrate, verify, and kept plans of them."""

from kvx_core.ops.write_gather import device_status, gather_kv, write_kv

__all__ = ["device_status", "gather_kv", "write_kv"]
