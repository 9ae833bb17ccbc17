"""A model's cache in compressed formats: keys in one format, values in another.

store.py has the tokens of all layers, protocol.py what any such store does, half.py one half of
them (keys or values) as stored, tokens.py those on their way, encodings.py which formats there are,
attend.py attention that decodes piece by piece, report.py what the memory is used for. All of it
needs torch.
"""

from kvx_core.caches.kv.encodings import PRESETS
from kvx_core.caches.kv.half import KvStorage
from kvx_core.caches.kv.protocol import KvCacheStoreLike
from kvx_core.caches.kv.report import KvMemoryReport
from kvx_core.caches.kv.store import KvCacheStore

__all__ = ["PRESETS", "KvCacheStore", "KvCacheStoreLike", "KvMemoryReport", "KvStorage"]
