"""A mock of TensorRT-LLM: its connector interface, and an executor that serves prompts with one.

Pool and token addresses are TensorRT-LLM's. The order of calls is that of its executor; messages to
ranks are pickled, as over MPI. Names that TensorRT-LLM does not have are missing here, so that code
which needs one fails. No model runs: keys and values are a function of the tokens.

Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/connectors/kv_cache_connector.py, and 1.2,
_torch/pyexecutor/kv_cache_connector.py, for everything above `LlmRequest`
"""

from __future__ import annotations

import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

PLUGIN = "kvx_adapters.tensorrt_llm_plugin"
PLACES = {
    "main": "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "1.2": "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
}
RANK = [0]  # of the process that is being played


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class RequestDataOfMain(RequestData):
    """What main adds."""

    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


@dataclass
class SchedulerOutputOfMain(SchedulerOutput):
    """What main adds."""

    attention_dp_rank: int | None = None


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None
        super().__init__()

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object: ...

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


class WorkerOfMain(KvCacheConnectorWorker):
    """What main adds."""

    supports_attention_dp: bool = False

    def register_kv_cache_layout(self, layout: Any) -> None:
        tensor = layout.as_single_pool_tensor()
        if tensor is None:
            raise NotImplementedError("the layout is not one pool")
        self.register_kv_caches(tensor)


class SchedulerOfMain(KvCacheConnectorScheduler):
    """What main adds."""

    supports_attention_dp: bool = False

    def wait_for_initialization(self) -> None: ...

    def request_reset(self, request: Any) -> None: ...

    def cancel_load(self, request: Any, start: int, end: int) -> None: ...

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        self.update_state_after_alloc(request, block_ids_by_layer_group[0])

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        return self.request_finished(request, cache_block_ids_by_layer_group[0])


class Log:
    """tensorrt_llm.logger, which takes strings."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, *message: str) -> None:
        self.lines.append("info: " + " ".join(message))

    def warning(self, *message: str) -> None:
        self.lines.append("warning: " + " ".join(message))

    def warnings(self) -> list[str]:
        return [line for line in self.lines if line.startswith("warning")]


def remove(modules: dict[str, ModuleType]) -> None:
    """Takes tensorrt_llm, and what was imported on top of it, out of sys.modules."""
    for name in list(modules):
        if name.split(".")[0] == "tensorrt_llm" or name.startswith(PLUGIN):
            del modules[name]


def install(modules: dict[str, ModuleType], version: str = "main") -> ModuleType:
    """Puts the double into sys.modules, in place of what `remove` takes out.

    version: "main" or "1.2", which have the interface at different places
    """
    remove(modules)
    parts = PLACES[version].split(".")
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        modules[name] = module = ModuleType(name)
        if i < len(parts) - 1:
            module.__path__ = []  # a package
    loader = ModuleType("tensorrt_llm._torch.pyexecutor.model_loader")
    # Source: main, _torch/pyexecutor/model_loader.py; each double has a class of its own
    reload = {"reload": lambda self, model, weights, allow_partial_loading=False: None}
    loader.__dict__["ModelLoader"] = type("ModelLoader", (), reload)
    modules[loader.__name__] = loader
    top, connector = modules["tensorrt_llm"], modules[PLACES[version]]
    top.__dict__.update(__version__=f"{version} (double)", logger=Log(), mpi_rank=lambda: RANK[0])
    is_main = version == "main"
    connector.__dict__.update(
        RequestData=RequestDataOfMain if is_main else RequestData,
        SchedulerOutput=SchedulerOutputOfMain if is_main else SchedulerOutput,
        KvCacheConnectorWorker=WorkerOfMain if is_main else KvCacheConnectorWorker,
        KvCacheConnectorScheduler=SchedulerOfMain if is_main else KvCacheConnectorScheduler,
    )
    return top


def place() -> str:
    """Where the double that is installed has the interface."""
    return next(name for name in PLACES.values() if name in sys.modules)


@dataclass
class KvCacheConfig:
    """The fields that a connector may ask for. Source: main, llmapi/llm_args.py"""

    tokens_per_block: int = 32
    dtype: str = "auto"
    enable_block_reuse: bool = True
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    host_cache_size: int | None = None


@dataclass
class TorchLlmArgs:
    """Likewise."""

    model: str | Path
    kv_cache_config: KvCacheConfig
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    enable_attention_dp: bool = False
    attn_backend: str = "TRTLLM"
    max_beam_width: int = 1
    trust_remote_code: bool = False
    revision: str | None = None
    load_format: str = "LoadFormat.AUTO"
    quant_config: Any = None
    speculative_config: Any = None
    sparse_attention_config: Any = None
    model_kwargs: dict[str, Any] | None = None


@dataclass(eq=False)
class LlmRequest:
    """What nanobind shows of a request, whatever its class in Python.

    Source: main, cpp/tensorrt_llm/nanobind/batch_manager/bindings.cpp
    """

    request_id: int
    prompt: list[int]
    max_new_tokens: int = 1
    lora_task_id: int | None = None
    prompt_embedding_table: Any = None
    multimodal_embedding: Any = None
    multimodal_hashes: Any = None
    multimodal_positions: Any = None
    mrope_rotary_cos_sin: Any = None
    cache_salt_id: int | None = None
    return_context_logits: bool = False
    is_dummy_request: bool = False
    # Of the executor.
    answer: list[int] = field(default_factory=list)
    position: int = 0  # tokens whose keys and values are there
    block_ids: list[int] = field(default_factory=list)
    reported: tuple[int, int] = (0, 0)  # tokens and blocks that the scheduler has been told of
    external: int = 0  # tokens that the connector loads in this step
    computed: int = 0  # tokens that a forward pass has computed

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.prompt + self.answer

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)


@dataclass(frozen=True)
class Sizes:
    num_layers: int
    total_kv_heads: int
    head_dim: int
    kv_factor: int = 2
    dtype: torch.dtype = torch.float32


def keys_and_values(tokens: Sequence[int], sizes: Sizes) -> Tensor:
    """(num_layers, kv_factor, total_kv_heads, num_tokens, head_dim): a function of each token and
    those before it, exact in every dtype.
    """
    ids = torch.tensor(tokens, dtype=torch.int64)
    seen = (ids * (2 * torch.arange(len(ids)) + 1)).cumsum(0)
    shape = (sizes.num_layers, sizes.kv_factor, sizes.total_kv_heads, 1, sizes.head_dim)
    place = torch.arange(torch.Size(shape).numel()).view(shape)
    mixed = seen.view(-1, 1) * 1009 + place * 2003
    return ((mixed * mixed + 7 * mixed) % 65521 % 17 - 8).to(sizes.dtype)


class Rank:
    """One process: a worker, and its part of every head of the cache."""

    def __init__(self, executor: Executor, rank: int) -> None:
        sizes, total = executor.sizes, executor.sizes.total_kv_heads
        count = max(1, total // executor.args.tensor_parallel_size)
        first = rank * total // executor.args.tensor_parallel_size
        self.heads = slice(first, first + count)
        RANK[0] = rank
        plugin = import_module(PLUGIN)
        self.worker = plugin.KVXConnectorWorker(executor.args)
        RANK[0] = 0
        # Source: main, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, allocatePools
        self.block_shape = (count, executor.block_size, sizes.head_dim)
        shape = (
            executor.num_blocks,
            sizes.num_layers,
            sizes.kv_factor,
            torch.Size(self.block_shape).numel(),
        )
        self.raw = torch.full(
            (torch.Size(shape).numel() * sizes.dtype.itemsize,),
            SENTINEL,
            dtype=torch.uint8,
            device=executor.device,
        )
        self.pool = self.raw.view(sizes.dtype).view(shape)

    def places(self, block_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The block of each token, and its place there: KVBlockArray.getBlockPtr, getKVLocalIdx."""
        tokens = torch.arange(start, stop, device=self.pool.device)
        ids = torch.tensor(block_ids, device=self.pool.device)
        return ids[tokens // self.block_shape[1]], tokens % self.block_shape[1]

    @property
    def blocks(self) -> Tensor:
        """(num_blocks, num_layers, kv_factor, num_kv_heads, tokens_per_block, head_dim)"""
        return self.pool.view(*self.pool.shape[:3], *self.block_shape)

    def read(self, block_ids: Sequence[int], start: int, stop: int) -> Tensor:
        """(num_layers, kv_factor, num_kv_heads, stop - start, head_dim)"""
        ids, offsets = self.places(block_ids, start, stop)
        return self.blocks[ids, :, :, :, offsets].movedim(0, -2)

    def write(self, block_ids: Sequence[int], start: int, values: Tensor) -> None:
        ids, offsets = self.places(block_ids, start, start + values.shape[-2])
        self.blocks[ids, :, :, :, offsets] = values.movedim(-2, 0)


SENTINEL = 0x5A


class Executor:
    """PyExecutor and its KVCacheManager, for one connector.

    Raises AssertionError where a promise was not kept: before each forward pass, what counts as
    computed has to be what the model would have computed.
    Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/py_executor.py, _executor_loop;
    _torch/pyexecutor/resource_manager.py, KVCacheManager.prepare_resources
    """

    def __init__(
        self,
        args: TorchLlmArgs,
        sizes: Sizes,
        *,
        num_blocks: int = 40,
        chunk: int = 1 << 30,  # tokens of a prompt that one step computes: chunked prefill
        reuse: bool = False,  # blocks of earlier requests
        counts_promised: bool = False,  # in computed_position, as the first versions did
        honours: int | None = None,  # blocks of a promise at most: KVCacheManagerV2
        overlap: bool = False,  # the last token is on its way from the device: the default loop
        compute: Callable[[list[int]], Tensor] | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.args, self.sizes, self.num_blocks, self.chunk = args, sizes, num_blocks, chunk
        self.block_size = args.kv_cache_config.tokens_per_block
        self.reuse, self.counts_promised, self.honours = reuse, counts_promised, honours
        self.overlap, self.device = overlap, device
        self.compute = compute or (lambda tokens: keys_and_values(tokens, sizes))
        # _torch/pyexecutor/py_executor_creator.py, create_py_executor
        self.ranks = [Rank(self, rank) for rank in range(args.tensor_parallel_size)]
        self.scheduler = import_module(PLUGIN).KVXConnectorScheduler(args)
        self.request_data = sys.modules[place()].RequestData
        self.scheduler_output = sys.modules[place()].SchedulerOutput
        self.calls: list[str] = []
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.free: list[int] = order.tolist()
        self.cached: dict[tuple[int, ...], int] = {}  # the block of each prefix of whole blocks
        self.next_id = 1
        for rank in self.ranks:
            rank.worker.register_kv_caches(rank.pool)

    @property
    def stream(self) -> Any:
        return torch.cuda.current_stream() if self.device == "cuda" else None

    def run(self, *requests: LlmRequest) -> list[LlmRequest]:
        """Serves requests together until each has its answer."""
        waiting, active = list(requests), list[LlmRequest]()
        while waiting or active:
            new, waiting = waiting, []
            self.step(new, active)
            active = [request for request in new + active if not self.is_finished(request)]
        return list(requests)

    def ask(self, prompt: Sequence[int], max_new_tokens: int = 1, **fields: Any) -> LlmRequest:
        """Serves one prompt."""
        request = LlmRequest(self.next_id, list(prompt), max_new_tokens, **fields)
        self.next_id += 1
        (served,) = self.run(request)
        return served

    def step(self, new: list[LlmRequest], active: list[LlmRequest]) -> None:
        """An iteration of _executor_loop."""
        for request in new:
            self.add_sequence(request)
        for request in active:
            self.reserve(request, request.position + self.scheduled(request))
        output = self.scheduler_output(
            new_requests=[self.report(request) for request in new],
            cached_requests=[self.report(request) for request in active],
        )
        # _kv_connector_start_batch
        self.calls.append("build_connector_meta")
        plan = pickle.dumps(self.scheduler.build_connector_meta(output))
        for rank in self.ranks:
            rank.worker.bind_connector_meta(pickle.loads(plan))
            self.calls.append("start_load_kv")
            rank.worker.start_load_kv(self.stream)
        # _forward_step, with layer_pre_hook and layer_post_hook
        for request in new + active:
            self.forward(request)
        for rank in self.ranks:
            for layer in range(self.sizes.num_layers):
                rank.worker.wait_for_layer_load(layer, self.stream)
                rank.worker.save_kv_layer(layer, self.stream)
            self.calls.append("wait_for_save")
            rank.worker.wait_for_save(self.stream)
        # _update_requests, _do_terminate_request
        for request in new + active:
            if request.position == len(request.get_tokens(0)):
                request.answer.append((request.prompt[-1] * 31 + len(request.answer) * 7) % 500 + 1)
            if self.is_finished(request):
                self.calls.append("request_finished")
                assert self.scheduler.request_finished(request, list(request.block_ids)) is False
                self.release(request)
        # _kv_connector_terminate_requests
        for rank in self.ranks:
            self.calls.append("get_finished")
            assert rank.worker.get_finished([], []) == ([], [])

    def add_sequence(self, request: LlmRequest) -> None:
        """cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, WindowBlockManager::addSequence"""
        tokens, size = request.get_tokens(0), self.block_size
        matched = 0
        while self.reuse and matched + size < len(tokens):
            block = self.cached.get(tuple(tokens[: matched + size]))
            if block is None:
                break
            request.block_ids.append(block)
            matched += size
        self.calls.append("get_num_new_matched_tokens")
        count, is_async = self.scheduler.get_num_new_matched_tokens(request, matched)
        assert is_async is False
        if self.honours is not None and count > self.honours * size:
            kept = self.honours * size
            self.calls.append("cancel_load")
            self.scheduler.cancel_load(request, matched + kept, matched + count)
            count = kept
        assert matched + count < len(tokens), "There must be at least one uncomputed token"
        request.position, request.external = matched + count, count
        self.reserve(request, len(tokens))
        self.calls.append("update_state_after_alloc")
        self.scheduler.update_state_after_alloc(request, list(request.block_ids))

    def reserve(self, request: LlmRequest, num_tokens: int) -> None:
        while len(request.block_ids) * self.block_size < num_tokens:
            request.block_ids.append(self.free.pop())

    def release(self, request: LlmRequest) -> None:
        """free_resources; whole blocks stay for others that begin like this."""
        tokens, size = request.get_tokens(0)[: request.position], self.block_size
        for i, block in enumerate(request.block_ids):
            key = tuple(tokens[: (i + 1) * size])
            is_whole = self.reuse and len(key) == (i + 1) * size
            if not is_whole or self.cached.setdefault(key, block) != block:
                self.free.insert(0, block)

    def scheduled(self, request: LlmRequest) -> int:
        """Tokens of the request that the next forward pass computes."""
        if request.position >= request.prompt_len:
            return 1
        stop = min(request.prompt_len, request.position + self.chunk)
        if stop < request.prompt_len:  # setPrepopulatedPromptLen: a chunk ends where a block does
            stop -= stop % self.block_size
        return stop - request.position

    def report(self, request: LlmRequest) -> RequestData:
        """KvCacheConnectorSchedulerOutputRequest.update_and_build_data"""
        tokens, position = request.get_tokens(0), request.position
        if request.answer:
            tokens = tokens[: -1 if self.overlap else None]
            position = len(tokens) - 1
        num_tokens, num_blocks = request.reported
        request.reported = len(tokens), len(request.block_ids)
        external, request.external = request.external, 0
        return self.request_data(
            request.request_id,
            tokens[num_tokens:],
            request.block_ids[num_blocks:],
            position - (0 if self.counts_promised else external),
            self.scheduled(request),
        )

    def forward(self, request: LlmRequest) -> None:
        tokens, count = request.get_tokens(0), self.scheduled(request)
        values = self.compute(tokens).to(self.device)
        for rank in self.ranks:
            own = values[:, :, rank.heads]
            there = rank.read(request.block_ids, 0, request.position)
            assert torch.equal(as_bytes(there), as_bytes(own[..., : request.position, :]))
            rank.write(
                request.block_ids,
                request.position,
                own[..., request.position : request.position + count, :],
            )
        request.position += count
        request.computed += count

    def is_finished(self, request: LlmRequest) -> bool:
        return len(request.answer) >= request.max_new_tokens

    def close(self) -> None:
        """Waits for the files."""
        for rank in self.ranks:
            rank.worker.close()


def as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class KvCacheBufferRef:
    """Source: TensorRT-LLM main 2026-09, _torch/pyexecutor/connectors/kv_cache_layout.py"""

    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class KvCacheRegion:
    memory: Tensor  # stands for base
    size: int
    stride: int
    num_slots: int
    buffers: tuple[KvCacheBufferRef, ...]

    def as_tensor(self, dtype: torch.dtype = torch.uint8) -> Tensor:
        shape = (self.num_slots, self.size // dtype.itemsize)
        return self.memory.view(dtype).as_strided(shape, (self.stride // dtype.itemsize, 1))


@dataclass(frozen=True)
class KvCacheLayerGroupLayout:
    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]
    replicated_regions: tuple[KvCacheRegion, ...] = ()


@dataclass(frozen=True)
class KvCacheLayout:
    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]
