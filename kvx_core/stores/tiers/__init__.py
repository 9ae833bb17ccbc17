"""Stores on several levels: memory, directories, object stores."""

from kvx_core.stores.tiers.levels import Tiers
from kvx_core.stores.tiers.memory import MemoryStore
from kvx_core.stores.tiers.objects import ObjectStore
from kvx_core.stores.tiers.remote import RemoteStore
from kvx_core.stores.tiers.tiered import Tiered
from kvx_core.stores.tiers.valkey import ValkeyStore

__all__ = ["MemoryStore", "ObjectStore", "RemoteStore", "Tiered", "Tiers", "ValkeyStore"]
