"""What is done to numbers before they are encoded and after they are decoded."""

from kvx_core.encodings.hadamard import hadamard

__all__ = ["hadamard"]
