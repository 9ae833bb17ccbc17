"""Runs the machine code of the CUDA kernels on the CPU, and counts what it executes."""
