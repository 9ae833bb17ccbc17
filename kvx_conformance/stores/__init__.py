"""Stores that are known, as subjects.

python -m kvx_conformance store kvx_conformance.stores.kvx:Store
"""
