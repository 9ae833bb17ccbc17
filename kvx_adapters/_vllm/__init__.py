"""The parts of kvx_adapters.vllm; its names are public, these are not."""
