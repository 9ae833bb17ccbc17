"""Subjects: vLLM with some of its KV connectors, as `kvx_conformance.connector` describes them."""
