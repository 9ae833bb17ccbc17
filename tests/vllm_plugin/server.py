"""The process of tests' engines: `engine.EngineProcess` starts it.

vLLM changes the process that it runs in, and importing it takes ten seconds: one process of a run
imports it, and those of engines are forked from that.
"""

from __future__ import annotations

import gc
import os
import resource
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvx_conformance.connectors.vllm_engine import fork_processes, spare_repetitions

_SUFFIXES = ("_total", "_sum", "_count", "kvx_store_bytes", "kvx_store_files")


class Server:
    """The calls that EngineProcess makes. At most one engine runs."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._num_scheduled: dict[str, int] = {}
        self._longest_step = 0.0  # seconds, of the last `generate`

    def start(self, **arguments: Any) -> None:
        from vllm import LLM

        fork_processes()
        spare_repetitions()
        if "kv_transfer_config" in arguments:
            from vllm.config import KVTransferConfig

            arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
        self._llm = LLM(**arguments)
        if self._core is not None:
            self._count_scheduled_tokens()

    def stop(self) -> None:
        llm, self._llm = self._llm, None
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int | list[int],
        abort_at: list[tuple[int, int]],
        cache_salt: str | None,
        sampling: dict[str, Any],
        reset_at: list[int],
        besides: list[dict[str, Any] | None],
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        from tests.vllm_plugin.besides import request as to_vllm

        engine = self._llm.llm_engine
        salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        self._num_scheduled.clear()
        self._longest_step = 0.0
        ids = []
        for i, (prompt, limit, beside) in enumerate(zip(prompts, limits, besides, strict=True)):
            request, adapter = to_vllm(prompt, **beside or {})
            greedy = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, **sampling)
            ids.append(engine.add_request(str(i), request | salt, greedy, lora_request=adapter))
        outputs: dict[int, Any] = {}
        step = 0
        while engine.has_unfinished_requests():
            aborted = [ids[i] for i, at in abort_at if at == step]
            if aborted:
                engine.abort_request(aborted, internal=True)
            if step in reset_at:
                # vLLM refuses while blocks are being loaded, or wait to be saved.
                with suppress(RuntimeError):
                    self._scheduler.reset_prefix_cache(
                        reset_running_requests=True, reset_connector=True
                    )
            begin = time.monotonic()
            for output in engine.step():
                outputs[int(output.request_id)] = output
            self._longest_step = max(self._longest_step, time.monotonic() - begin)
            step += 1
        self._drain()
        return [self._output(outputs.get(i), request_id) for i, request_id in enumerate(ids)]

    def set_environment(self, **variables: str) -> None:
        """For engines that are started after this."""
        os.environ.update(variables)

    def num_free_blocks(self) -> int:
        num: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return num

    def reset_prefix_cache(self) -> bool:
        """Forgets what vLLM itself has cached: what is not computed then comes from the store."""
        done: bool = self._llm.llm_engine.reset_prefix_cache()
        return done

    def add_adapter(self, **fields: Any) -> None:
        """Loads an adapter, as vLLM's server does when it is told to."""
        from tests.vllm_plugin.besides import lora

        self._llm.llm_engine.add_lora(lora(**fields))

    def remove_adapter(self, number: int) -> None:
        self._llm.llm_engine.remove_lora(number)

    def change_weights(self, how: str, path: str = "") -> None:
        """Replaces weights as users do: how: a method of this class without "_by_"."""
        getattr(self, f"_by_{how}")(path)

    def _by_reload(self, path: str) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path} if path else {})
        self._llm.llm_engine.reset_encoder_cache()  # the workers' is empty

    def _by_nothing(self, path: str) -> None:
        """A call that might have written anything. What encoders have made of images stays."""
        self._llm.apply_model(lambda model: None)

    def reset_encoder_cache(self) -> None:
        self._llm.llm_engine.reset_encoder_cache()

    def _by_model(self, path: str) -> None:
        """As trainers in the same process do. On CPU, vLLM has packed all weights but norms."""
        name = "model.layers.1.post_attention_layernorm.weight"
        weight = self._model.get_parameter(name).clone()
        weight[3] += 4
        self._model.load_weights([(name, weight)])

    def _by_callable(self, path: str) -> None:
        """One element of one tensor."""

        def write(model: Any) -> None:
            model.model.layers[0].input_layernorm.weight.data[3] += 4

        self._llm.apply_model(write)

    def _by_executor(self, path: str) -> None:
        def write(worker: Any) -> None:
            worker.get_model().model.norm.weight.data[3] += 4

        self._llm.llm_engine.model_executor.collective_rpc(write)

    @property
    def _model(self) -> Any:
        worker = self._core.model_executor.driver_worker.worker
        return worker.model_runner.model

    def sleep_and_wake(self) -> None:
        self._llm.sleep(level=1)
        self._llm.wake_up()

    def wait_until_saved(self) -> bool:
        """Waits until all that was copied is written; returns whether it is."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group = get_kv_transfer_group()
        own = next(c for c in getattr(group, "sub_connectors", [group]) if hasattr(c, "_worker"))
        done: bool = own._worker._saver._writer.threads.wait(60)
        return done

    def fail_once(self, method: str) -> None:
        """The next call of this method of a PrefixStore, or of a Walk, raises."""
        from kvx_core import PrefixStore
        from kvx_core.stores.walk import Walk

        owner = PrefixStore if hasattr(PrefixStore, method) else Walk
        own = getattr(owner, method)

        def fail(*arguments: object, **keywords: object) -> None:
            setattr(owner, method, own)
            raise OSError("a test has asked for it")

        setattr(owner, method, fail)

    def longest_step(self) -> float:
        return self._longest_step

    def peak_bytes(self) -> int:
        """The most memory that the process has had."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def num_cache_groups(self) -> int:
        return len(self._scheduler.kv_cache_config.kv_cache_groups)

    def metrics(self) -> dict[str, float]:
        from prometheus_client import REGISTRY  # LLM.get_metrics cuts counters down to integers

        samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
        return {s.name: s.value for s in samples if s.name.endswith(_SUFFIXES)}

    def on_next_load(self, delete: str, pattern: str = "*.safetensors") -> None:
        """Deletes files of a directory after the next lookup that hit, before its load."""
        connector = self._scheduler.connector
        update = connector.update_state_after_alloc

        def delete_and_update(request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                connector.update_state_after_alloc = update
                for path in Path(delete).rglob(pattern):
                    path.unlink()
            update(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = delete_and_update

    def keep_loads(self, folder: str) -> None:
        """Saves what each load has left in the KV cache, byte for byte, as a file of `folder`."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvx_core import Snapshot

        worker = get_kv_transfer_group()._worker
        load = worker._loader._load

        def load_and_keep(work: Any) -> bool:
            good: bool = load(work)
            plan = work.load
            sections = worker._sections(plan.block_ids, plan.stop)
            num_tokens = plan.stop - plan.start
            found = Snapshot.capture(range(num_tokens), sections, start=plan.start)
            assert found is not None
            found.save(Path(folder) / f"{plan.start}-{plan.stop}")
            return good

        worker._loader._load = load_and_keep

    def keep_raw_loads(self, folder: str) -> None:
        """Saves what each load has left in the KV cache, as vLLM's attention on CPU (isa vec) reads
        it: a file per prompt, with layers.3.k and layers.3.v, (tokens, heads, dims). Tokens of null
        blocks are NaN.
        """
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        load = worker._loader._load
        runner = self._core.model_executor.driver_worker.worker.model_runner
        layers = runner.compilation_config.static_forward_context

        def load_and_keep(work: Any) -> bool:
            good: bool = load(work)
            plan, found = work.load, {}
            for part in worker._held:
                ids = torch.tensor(plan.block_ids[part.index])
                for layer, name in zip(part.group.layers, part.group.layer_names, strict=True):
                    blocks = layers[name].kv_cache[ids].clone()
                    blocks[ids == 0] = torch.nan
                    num_blocks, heads, size, both = blocks.shape
                    k = blocks.view(num_blocks, heads, 2, both // 2, size)[:, :, 0]
                    v = blocks.view(num_blocks, heads, 2, size, both // 2)[:, :, 1]
                    for kv, half in (("k", k.permute(0, 3, 1, 2)), ("v", v.transpose(1, 2))):
                        found[f"layers.{layer}.{kv}"] = half.flatten(0, 1)[: plan.stop]
            torch.save(found, Path(folder) / plan.request_id.partition("-")[0])
            return good

        worker._loader._load = load_and_keep

    @property
    def _core(self) -> Any:
        """The EngineCore, if it is in this process."""
        return getattr(self._llm.llm_engine.engine_core, "engine_core", None)

    @property
    def _scheduler(self) -> Any:
        return self._core.scheduler

    def _count_scheduled_tokens(self) -> None:
        scheduler = self._scheduler
        schedule = scheduler.schedule

        def counted(*arguments: Any, **keywords: Any) -> Any:
            output = schedule(*arguments, **keywords)
            for request_id, num_tokens in output.num_scheduled_tokens.items():
                before = self._num_scheduled.get(request_id, 0)
                self._num_scheduled[request_id] = before + num_tokens
            return output

        scheduler.schedule = counted

    def _drain(self) -> None:
        """Steps until connectors have let go of finished requests, as a server's loop does."""
        while self._core is not None and self._scheduler.has_requests():
            self._llm.llm_engine.step()

    def _output(self, output: Any, request_id: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "tokens": [],
            "finish_reason": "abort",
            "num_cached_tokens": None,
            "num_scheduled_tokens": self._num_scheduled.get(request_id, 0),
        }
        if output is not None:
            found["tokens"] = list(output.outputs[0].token_ids)
            found["num_cached_tokens"] = output.num_cached_tokens
            if output.finished:
                found["finish_reason"] = output.outputs[0].finish_reason
        return found


def serve(kind: type[Server], calls: Connection, environment: dict[str, str], log: Path) -> None:
    """The process: answers calls of `kind` until nobody is left to make one.

    environment: all variables; log: gets whatever is printed
    """
    os.environ.clear()
    os.environ.update(environment)
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    server = kind()
    with suppress(EOFError):
        while True:
            name, arguments = calls.recv()
            try:
                answer = {"result": getattr(server, name)(**arguments)}
            except Exception:
                answer = {"error": traceback.format_exc()}
            calls.send(answer)
    os._exit(0)  # engines have been stopped; the interpreter would take seconds to go
