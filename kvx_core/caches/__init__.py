"""Caches in memory for a model of one's own: packed/ of one layer, kv/ of all layers."""
