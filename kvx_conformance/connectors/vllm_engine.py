"""A running vLLM, as `kvx_conformance.connector.Engine` describes it. vllm.py starts it."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvx_conformance.case import NotApplicable
from kvx_conformance.connector import Answer, Request, Setup, Weights
from kvx_conformance.connectors import vllm_models
from kvx_conformance.connectors.vllm_models import Model

_freeze = gc.freeze


def spare_repetitions() -> None:
    """Called before an engine starts: those after the first of a process then start and stop three
    times as fast.

    Each looks eight times, among all objects of vLLM's modules, for garbage that is not there: they
    are frozen here, and no engine freezes or thaws anything. Each replaces Triton's kernels in all
    modules, where those of the first are.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    _freeze()
    gc.freeze = gc.unfreeze = lambda: None
    if dispatcher._registry:  # of the kernels that were replaced
        type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)


def fork_processes() -> None:
    """Called before an engine on CPU with processes of its own starts: they are forked from this.

    vLLM on CPU starts interpreters instead, and each takes ten seconds to import vLLM. A fork loses
    the threads of OpenMP and waits for them for ever, so this process must have computed with one
    thread alone. On other devices vLLM chooses.
    """
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    if not current_platform.is_cpu():
        return
    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


class VllmEngine:
    """A vllm.LLM whose engine core, and with it the scheduler, is in this process."""

    def __init__(
        self,
        llm: Any,
        setup: Setup,
        work: Path,
        settle: Callable[[], None] | None,
        closing: ExitStack,
    ) -> None:
        """settle: returns when all is saved; None: there is no store
        closing: is closed when the engine has ended
        """
        self._llm, self._setup, self._work = llm, setup, work
        self._settle, self._closing = settle, closing
        self._longest_step = 0.0
        self._adapter: str | None = None  # the loaded one
        self._prefills = _Prefills(scheduler_of(llm))

    def ask(
        self,
        requests: Sequence[Request],
        new_tokens: int,
        abort_at: Mapping[int, int],
        reset_at: Sequence[int],
    ) -> list[Answer]:
        engine = self._llm.llm_engine
        self._load_adapter({one.adapter for one in requests} - {None})
        self._longest_step = 0.0
        ids = [self._add(str(i), request, new_tokens) for i, request in enumerate(requests)]
        outputs: dict[str, Any] = {}
        step = 0
        while engine.has_unfinished_requests():
            running = scheduler_of(self._llm).requests
            aborted = [ids[i] for i, at in abort_at.items() if _has_come_to(running, ids[i], at)]
            if aborted:
                engine.abort_request(aborted, internal=True)
            if step in reset_at:
                self._reset_running()
            begun = time.monotonic()
            for output in engine.step():
                outputs[output.request_id] = output
            self._longest_step = max(self._longest_step, time.monotonic() - begun)
            step += 1
        step_until_idle(self._llm)
        reused = self._prefills.take()
        return [
            _answer(outputs.get(str(i)), reused.get(request_id, 0))
            for i, request_id in enumerate(ids)
        ]

    def settle(self) -> None:
        if self._settle is not None:
            self._settle()

    def forget(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM has not emptied its prefix cache: requests hold blocks")

    def free_blocks(self) -> int:
        pool = scheduler_of(self._llm).kv_cache_manager.block_pool
        return int(pool.get_num_free_blocks())

    def replace_weights(self, weights: Weights, how: Literal["files", "tensors"]) -> None:
        files = Model(self._setup.family, weights, self._setup.epsilon).files(self._work)
        if how == "files":
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(files)})
        else:
            if self._setup.ranks > 1 or self._setup.quantization is not None:
                raise NotApplicable("tensors are written into whole, plain weights only")
            tensors = vllm_models.changed_tensors(files)
            self._llm.apply_model(lambda model: _write(model, tensors))
        self._llm.llm_engine.reset_encoder_cache()
        self.forget()

    def sleep(self) -> None:
        self._llm.sleep(level=1)
        self._llm.wake_up()

    def scribble(self) -> None:
        if self._setup.ranks > 1:
            raise NotApplicable("the cache is in other processes")
        self.forget()
        executor = self._llm.llm_engine.engine_core.engine_core.model_executor
        config = executor.vllm_config.compilation_config
        for layer in config.static_forward_context.values():
            caches = getattr(layer, "kv_cache", ())
            for cache in caches if isinstance(caches, (tuple, list)) else (caches,):
                cache[1:].fill_(float("nan"))  # requests that have no block read block 0

    def lose(self, folder: str) -> None:
        connector = scheduler_of(self._llm).connector
        if connector is None:
            raise NotApplicable("the engine has no connector")
        update = connector.update_state_after_alloc

        def lose_and_update(request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                connector.update_state_after_alloc = update
                for path in Path(folder).rglob("*"):
                    if path.is_file():
                        path.unlink()
            update(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = lose_and_update

    def longest_step(self) -> float:
        return self._longest_step

    def stop(self) -> None:
        llm, self._llm = self._llm, None
        with self._closing:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()

    def _add(self, name: str, request: Request, new_tokens: int) -> str:
        """Adds a request; returns the scheduler's name of it."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        prompt: dict[str, Any] = {"prompt_token_ids": list(request.tokens)}
        if request.embeddings is not None:
            prompt = {"prompt_embeds": self._embeddings(request.tokens) * request.embeddings}
        if request.image is not None:
            if self._setup.family != "images":
                raise NotApplicable("the model takes no images")
            prompt["multi_modal_data"] = {"image": _image(request.image)}
        if request.salt is not None:
            prompt["cache_salt"] = request.salt
        params = SamplingParams(
            temperature=0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=None if request.takes_stored else True,
        )
        adapter = None
        if request.adapter is not None:
            path = vllm_models.adapter(self._work, request.adapter)
            adapter = LoRARequest("adapter", 1, str(path))
        add = self._llm.llm_engine.add_request
        return str(add(name, prompt, params, lora_request=adapter))

    def _embeddings(self, tokens: tuple[int, ...]) -> Any:
        """(tokens, hidden size): what the first layer sees of these ids."""
        if not self._setup.embeddings:
            raise NotApplicable("the engine was started without Setup.embeddings")
        model = Model(self._setup.family, self._setup.weights, self._setup.epsilon)
        return vllm_models.embeddings(model.files(self._work))[list(tokens)]

    def _load_adapter(self, names: Set[str | None]) -> None:
        """Both adapters have one name: before vLLM loads one, it has to drop the other and its
        blocks.
        """
        if names and not self._setup.adapters:
            raise NotApplicable("the engine was started without Setup.adapters")
        if len(names) > 1:
            raise NotApplicable("vLLM has one adapter of a name at a time")
        if names and names != {self._adapter}:
            if self._adapter is not None:
                self._llm.llm_engine.remove_lora(1)
                self.forget()
            (self._adapter,) = names

    def _reset_running(self) -> None:
        """Requests lose their blocks. vLLM refuses while blocks are loaded or wait to be saved."""
        with suppress(RuntimeError):
            scheduler_of(self._llm).reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )


class _Prefills:
    """How many tokens of its prompt each request had not to compute for its first new token.

    vLLM's own number counts tokens of a failed load, which it then computes.
    """

    def __init__(self, scheduler: Any) -> None:
        self._reused: dict[str, int] = {}
        schedule = scheduler.schedule

        def schedule_and_look(*arguments: Any, **keywords: Any) -> Any:
            output = schedule(*arguments, **keywords)
            self._look(scheduler, output)
            return output

        scheduler.schedule = schedule_and_look

    def take(self) -> dict[str, int]:
        """By the scheduler's names of requests; those that computed nothing are left out."""
        reused, self._reused = self._reused, {}
        return reused

    def _look(self, scheduler: Any, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        begins |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for request_id, begin in begins.items():
            if scheduler.requests[request_id].num_output_tokens == 0:
                before = self._reused.get(request_id, begin)
                self._reused[request_id] = min(before, begin)


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def _has_come_to(running: Mapping[str, Any], request_id: str, num_tokens: int) -> bool:
    return request_id in running and running[request_id].num_computed_tokens >= num_tokens


def step_until_idle(llm: Any) -> None:
    """Steps until connectors have let go of finished requests, as a server's loop does."""
    while scheduler_of(llm).has_requests():
        llm.llm_engine.step()


def _answer(output: Any, reused: int) -> Answer:
    if output is None:
        return Answer((), reused, "abort")
    (new,) = output.outputs
    ended: Any = new.finish_reason if output.finished else "abort"
    return Answer(tuple(new.token_ids), reused, ended)


def _image(seed: int) -> Any:
    """Random pixels."""
    from PIL import Image

    shape = (vllm_models.IMAGE_SIZE, vllm_models.IMAGE_SIZE, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def _write(model: Any, tensors: Mapping[str, Any]) -> None:
    """Writes weights in place. vLLM has packed some of them, which are packed anew."""
    import torch

    for name, tensor in tensors.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        module = getattr(module, "base_layer", module)  # of an adapter's
        if module.weight.shape == tensor.shape:
            module.weight.data.copy_(tensor)
        else:
            new = tensor.to(module.weight.dtype)
            module.weight = torch.nn.Parameter(new, requires_grad=False)
        module.quant_method.process_weights_after_loading(module)
