"""Benchmarks of KVX on CPU, each against the copies one would write without it. See README.md."""
