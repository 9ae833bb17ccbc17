"""Notices changes of this process's weights since the start of the engine.

Every update of weights of the PyTorch backend ends in one method, which this module wraps. A
connector cannot report a failed load, and ranks report nothing to the scheduler. So from the first
update on the engine shares nothing until its next start.
Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/model_loader.py, ModelLoader.reload; callers:
llmapi/rlhf_utils.py, WorkerExtension.update_weights
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from kvx_adapters.tensorrt_llm_plugin import api
from kvx_core import InvalidArgumentError
from kvx_core.connector.watched import watch
from kvx_core.connector.weights import Weights

_weights = Weights()  # of this process, which has one engine


def weights_of_process() -> Weights:
    """Returns the weights of this process, and counts their changes from now on."""
    try:
        loader = import_module("tensorrt_llm._torch.pyexecutor.model_loader").ModelLoader
    except (ImportError, AttributeError):
        api.logger.warning(
            f"KVX does not know how TensorRT-LLM {api.version} updates weights. Start it anew if "
            "they change: what it has stored is of those that it has started with"
        )
    else:
        watch(loader, "reload", _reload, _give_up)
    return _weights


def weights_changed(what: str) -> InvalidArgumentError:
    """Returns the error for loads that were promised before the weights changed."""
    return InvalidArgumentError(
        f"{what}: the weights have changed since tokens were promised, expected those that the "
        "engine has started with. Update weights while no request runs"
    )


@contextmanager
def _reload(loader: Any, *arguments: Any, **keywords: Any) -> Iterator[None]:
    with _weights.change():
        yield


def _give_up(error: Exception) -> None:
    _weights.is_lost = True
    api.logger.warning(f"KVX shares nothing until the next start: {error}")
