"""Imported first by adapters of caches that are torch tensors: without torch, one sentence."""

from __future__ import annotations

from importlib.util import find_spec

from kvx_core.errors import not_installed

if find_spec("torch") is None:
    raise not_installed("this adapter of KVX", "torch")
