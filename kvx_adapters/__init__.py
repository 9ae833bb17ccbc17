"""Thin adapters from engines to KVX: one file per engine, its names and shapes to descriptors.

Importing this package or an adapter imports no engine.
"""
