"""Stores on several levels: memory, directories, object stores."""

from kvx_core.tiers.levels import Tiers
from kvx_core.tiers.memory import MemoryStore
from kvx_core.tiers.objects import ObjectStore
from kvx_core.tiers.remote import RemoteStore
from kvx_core.tiers.tiered import Tiered
from kvx_core.tiers.valkey import ValkeyStore

__all__ = ["MemoryStore", "ObjectStore", "RemoteStore", "Tiered", "Tiers", "ValkeyStore"]
