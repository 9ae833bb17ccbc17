"""Real engines as subjects, each with a tiny model made on the spot, on the CPU.

python -m kvx_conformance engine kvx_conformance.engines.hf kvx_conformance.engines.mlx
"""
