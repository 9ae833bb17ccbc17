"""What engines need of vLLM, imported in the process that theirs are forked from."""

from kvx_conformance.connectors.vllm import VllmConnector

VllmConnector.import_ahead()
