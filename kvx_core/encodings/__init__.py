"""Numbers as fewer bytes: what no dtype says, and what is done to numbers before they are encoded.

lossless.py keeps every bit of bfloat16, turboquant.py has vectors of 2 to 4 bits per number; import
them by name. hadamard.py rotates vectors.
"""

from kvx_core.encodings.hadamard import hadamard

__all__ = ["hadamard"]
