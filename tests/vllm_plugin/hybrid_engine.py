"""Engines of hybrid models in a process of their own: what tests do to their states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.vllm_plugin.engine import EngineProcess
from tests.vllm_plugin.server import Server


class HybridServer(Server):
    """The calls that HybridProcess makes."""

    def misdescribe(self) -> None:
        """Engines that start from now on take convolutions for ones whose newest input is first."""
        from kvx_adapters.vllm import states

        described = states._planes

        def backwards(*arguments: Any) -> Iterator[Any]:
            for plane in described(*arguments):
                facts = replace(plane.state, newest_first=plane.state.is_conv)
                yield replace(plane, state=facts)

        states._planes = backwards

    def cut_steps(self, ends: list[int]) -> None:
        """The steps of the next request end after so many of its tokens, and after all of it: two
        engines then sum in the same order.
        """
        scheduler = self._scheduler
        schedule, most = type(scheduler).schedule, scheduler.max_num_scheduled_tokens
        lengths = [end - begin for begin, end in pairwise([0, *ends])]

        def cut(*arguments: Any, **keywords: Any) -> Any:
            scheduler.max_num_scheduled_tokens = lengths.pop(0) if lengths else most
            try:
                return schedule(scheduler, *arguments, **keywords)
            finally:
                scheduler.max_num_scheduled_tokens = most

        scheduler.schedule = cut

    def scribble(self) -> None:
        """Fills the memory of all blocks but the null block with bytes that are NaN."""
        for layer in self._layers.values():
            caches = getattr(layer, "kv_cache", ())
            for tensor in caches if isinstance(caches, (tuple, list)) else (caches,):
                tensor[1:].fill_(float("nan"))

    def keep_states(self, folder: str) -> None:
        """Saves the states that each save of states finds, as a file of `folder` that has the
        number of tokens as its name.
        """
        import torch

        worker = self._worker
        save = worker._saver.save

        def keep_and_save(step: object, saves: Any) -> None:
            for one in saves:
                if one.has_states:
                    found = [t.clone() for t in self._states(one.block_ids, one.stop)]
                    torch.save(found, Path(folder) / str(one.stop))
            save(step, saves)

        worker._saver.save = keep_and_save

    def change_loaded_states(self, how: str, folder: str = "") -> None:
        """From now on changes the states of each load before its request runs: "zero", "transposed"
        or "backwards"; "-1", "1": they are those of a token less or more, as `keep_states` has kept
        them in `folder`.
        """
        import torch

        worker = self._worker
        load = type(worker._loader)._load

        def load_and_change(work: Any) -> bool:
            if not load(worker._loader, work):
                return False
            found = self._states(work.load.block_ids, work.load.stop)
            others = [None] * len(found)
            if folder:
                others = torch.load(Path(folder) / str(work.load.stop + int(how)))
            for tensor, other in zip(found, others, strict=True):
                if other is not None:
                    tensor.copy_(other)
                elif how == "zero":
                    tensor.zero_()
                elif how == "transposed" and tensor.ndim == 3:
                    tensor.copy_(tensor.transpose(1, 2).clone())
                elif how == "backwards" and tensor.ndim == 2:  # a convolution
                    tensor.copy_(tensor.flip(0).clone())
            return True

        worker._loader._load = load_and_change

    def _states(self, block_ids: Any, num_tokens: int) -> list[Any]:
        """The states of a request in the blocks that docs/hybrid.md names."""
        found = []
        for index, group in enumerate(self._scheduler.kv_cache_config.kv_cache_groups):
            spec = group.kv_cache_spec
            if type(spec).__name__ == "MambaSpec":
                is_aligned = spec.mamba_cache_mode == "align"
                column = (num_tokens - 1) // spec.block_size if is_aligned else 0
                block = block_ids[index][column]
                found += [
                    t[block] for name in group.layer_names for t in self._layers[name].kv_cache
                ]
        return found

    @property
    def _layers(self) -> dict[str, Any]:
        runner = self._core.model_executor.driver_worker.worker.model_runner
        found: dict[str, Any] = runner.compilation_config.static_forward_context
        return found

    @property
    def _worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker


class HybridProcess(EngineProcess):
    """A process in which engines are started, one at a time."""

    server = HybridServer
