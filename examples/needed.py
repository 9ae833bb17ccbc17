"""What examples import first: without a package that they need they end with a sentence, not with a
traceback. A program of your own does without it.
"""

import sys
from pathlib import Path

_EXTRAS = {
    "kvx_core": "transformers",
    "kvx_adapters": "transformers",
    "torch": "transformers",
    "transformers": "transformers",
    "tokenizers": "transformers",
    "vllm": "vllm",
    "mlx": "mlx",
    "mlx_lm": "mlx",
}


def _say(kind, error, traceback):
    """Takes the place of Python's own function for errors that nobody catches."""
    extra = _EXTRAS.get(getattr(error, "name", None) if kind is ModuleNotFoundError else None)
    if extra is None:
        sys.__excepthook__(kind, error, traceback)
        return
    example = Path(sys.argv[0])
    print(
        f"{example.name} needs {error.name}, which is not installed. `make setup` in the clone "
        f"installs all that examples need, without a GPU; then: .venv/bin/python {example}. "
        f"In an environment of your own: pip install '.[{extra}]'",
        file=sys.stderr,
    )


sys.excepthook = _say
