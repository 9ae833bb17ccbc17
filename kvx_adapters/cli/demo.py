"""`kvx demo`: a real vLLM prefills, KVX migrates its cache, HF transformers continues.

Both engines run in this process, on a tiny Llama that is made on the spot. `run` is the story;
the rest is the engines' own API, and the screen.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from kvx_adapters import transformers as hf
from kvx_adapters import vllm
from kvx_core import CacheSpan, SeqLens, fingerprint, migrate, verify

# What the model learns by heart, so that one can read what it says and no two tokens come close
# to a tie, in float32 or in bfloat16. The bar ends the prompt. The prompts have odd lengths from
# 1 to 91 tokens, and the first two begin alike, so vLLM may share their first block.
PASSAGES = (
    "A paged cache keeps the keys and the values of a sequence in blocks of equal size, and a "
    "table says which block comes next. The table is small and the blocks are large, so an engine "
    "hands out blocks one by one, as a library lends books, and takes them back when the reader "
    "has gone.| Nobody wants to compute them twice, and nobody should copy them without knowing "
    "what is written on every page.",
    "A paged cache keeps the keys and the values of a sequence in blocks of equal size, and a "
    "table says which block comes next. Two prompts that begin| alike can share the blocks of "
    "their beginning until their words part ways.",
    "Where the bytes lie is one question and what they mean is another;| an honest copy answers "
    "both before it moves anything, and says so when it cannot.",
    "Odd lengths leave the| last block half filled, and the rest of it belongs to nobody.",
    "Yes|, one word is enough to be remembered.",
)
PROMPTS = [passage.partition("|")[0] for passage in PASSAGES]
TRAINING_STEPS = 60
TIMED_CALLS = 20


class DemoError(Exception):
    """Why the demo cannot run here."""


@dataclass(frozen=True)
class Prefilled:
    """vLLM after prefill: all prompts are in its cache and no request has finished."""

    request_ids: list[str]  # vLLM's own
    prompt_lens: list[int]
    first_tokens: list[int]  # what each prompt is continued by; not in the cache yet


def run(*, dtype: str, seed: int, max_new_tokens: int, corrupt: bool) -> bool:
    """Runs the demo and prints it; True if everything held. Raises DemoError, KvxError."""
    _check_packages()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="kvx-demo-") as temporary, _screen() as screen:
        directory = Path(temporary)
        with screen.step("model") as say:
            say(make_model(directory, dtype, seed))
        with screen.step("vLLM", "starting, on CPU, in this process") as say:
            llm = _start_vllm(directory, dtype)
            say(f"{sys.modules['vllm'].__version__} on CPU, {dtype}, in this process")
        with screen.step("prefill") as say:
            prefilled = _prefill(llm, max_new_tokens)
            prompt_lens = prefilled.prompt_lens
            say(f"by vLLM: {len(PROMPTS)} prompts of {_list(prompt_lens)} tokens")
        with screen.step("HF") as say:
            from transformers import AutoModelForCausalLM, DynamicCache

            model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
            say(f"transformers {sys.modules['transformers'].__version__}, with an empty cache")

        # Both caches, described where they lie.
        src = vllm.live_view(llm, fingerprint=_fingerprint(llm.llm_engine.model_config.model))
        src_span = src.at(vllm.live_block_table(llm, prefilled.request_ids))
        cache = DynamicCache(config=model.config)
        mask = _left_padded(prompt_lens)
        hf.reserve(cache, model, batch_size=len(PROMPTS), num_tokens=mask.shape[1])
        facts = hf.cache_facts(model, fingerprint=_fingerprint(model.config.name_or_path))
        dst_span = hf.cache_view(cache, facts).at(starts=hf.starts(mask))

        k, there = src.layers[0].k.data, dst_span.view.layers[0].k.data
        screen.check(
            "describe",
            (k, there) == (_kv_caches(llm)[0].data_ptr(), cache.layers[0].keys.data_ptr()),
            f"{len(src.layers)} layers, zero-copy: K of layer 0 is vLLM's at {k:#x} and HF's at "
            f"{there:#x}",
        )

        # K and V of all layers and all prompts, in one call.
        seq_lens = SeqLens.of(prompt_lens)
        start = time.perf_counter()
        num_bytes = migrate(src_span, dst_span, seq_lens)
        first_call = time.perf_counter() - start
        screen.done("migrate", _speed(src_span, dst_span, seq_lens, num_bytes, first_call))
        arrived = verify(src_span, dst_span, seq_lens)
        screen.check("verify", arrived.ok, str(arrived))
        if corrupt:
            _corrupt(screen, cache, src_span, dst_span, prompt_lens, seed)
            return screen.good

        with screen.step("decode") as say:
            from_vllm = _finish_vllm(llm)
            from_hf = _continue_hf(model, cache, mask, prefilled.first_tokens, max_new_tokens)
            say("by both, each from its own cache; HF never saw the prompts")
        zeros = DynamicCache(config=model.config)
        hf.reserve(zeros, model, batch_size=len(PROMPTS), num_tokens=mask.shape[1])
        from_zeros = _continue_hf(model, zeros, mask, prefilled.first_tokens, max_new_tokens)

        screen.print(_table(directory, prompt_lens, from_vllm, from_hf, num_bytes))
        equal = _num_equal(from_vllm, from_hf)
        screen.check(
            "tokens", equal == len(PROMPTS), f"{equal} of {len(PROMPTS)} continuations equal"
        )
        by_chance = _num_equal(from_vllm, from_zeros)
        screen.check(
            "control",
            by_chance < len(PROMPTS),
            f"{by_chance} of {len(PROMPTS)} are, if HF gets a cache of zeros instead",
        )
        return screen.good


def _check_packages() -> None:
    for package in ("vllm", "transformers", "tokenizers"):
        if find_spec(package) is None:
            raise DemoError(
                f"{package} is not installed, and the demo runs the real engines. `make demo` in "
                "a clone of the repository sets them up; or pip install kvx[vllm,transformers]"
            )


def make_model(directory: Path, dtype: str, seed: int) -> str:
    """Saves a tiny Llama that has learnt PASSAGES by heart, and its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    texts = [passage.replace("|", "") for passage in PASSAGES]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(
        directory
    )

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # so small that more threads only wait for each other
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    rows = [torch.tensor([*tokenizer.encode(text).ids, config.eos_token_id]) for text in texts]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(TRAINING_STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return (
        f"a Llama of {config.num_hidden_layers} layers, {config.num_attention_heads} heads, "
        f"{config.num_key_value_heads} KV heads of {config.head_dim}, has learnt "
        f"{len(texts)} passages, loss {loss.item():.3f}"
    )


def _start_vllm(directory: Path, dtype: str) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM

    llm = LLM(
        model=str(directory),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=len(PROMPTS),
        max_num_batched_tokens=512,
        block_size=32,  # the smallest that vLLM takes on CPU
        num_gpu_blocks_override=64,
    )
    device = llm.llm_engine.vllm_config.device_config.device_type
    if device != "cpu":
        raise DemoError(f"this vLLM runs on {device}; the demo needs the CPU build, vllm-cpu")
    return llm


def _kv_caches(llm: Any) -> list[Tensor]:
    """The tensors that vLLM's model runner holds, one per layer."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return list(executor.driver_worker.worker.model_runner.kv_caches)


def _prefill(llm: Any, max_new_tokens: int) -> Prefilled:
    """Steps vLLM until each request has its first token, which is when its prompt is cached."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
    request_ids = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]
    first: dict[int, Any] = {}
    while len(first) < len(PROMPTS):
        for output in engine.step():
            first.setdefault(int(output.request_id), output)
            if output.finished:
                raise DemoError(
                    f"prompt {output.request_id} is finished already, so its blocks are freed. "
                    "Try another --seed"
                )
    outputs = [first[i] for i in range(len(PROMPTS))]
    return Prefilled(
        request_ids=request_ids,
        prompt_lens=[len(output.prompt_token_ids) for output in outputs],
        first_tokens=[output.outputs[0].token_ids[0] for output in outputs],
    )


def _finish_vllm(llm: Any) -> list[list[int]]:
    """Lets vLLM go on from its own cache; all new tokens of each prompt."""
    tokens: dict[int, list[int]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [tokens[i] for i in range(len(PROMPTS))]


@torch.inference_mode()
def _continue_hf(
    model: Any, cache: Any, mask: Tensor, first_tokens: Sequence[int], max_new_tokens: int
) -> list[list[int]]:
    """HF's greedy continuation from `cache`: one token per prompt goes in, and one comes out."""
    tokens = torch.tensor(first_tokens)[:, None]
    continuation = [tokens]
    for _ in range(max_new_tokens - 1):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        logits = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=mask.sum(dim=1, keepdim=True) - 1,
            past_key_values=cache,
        ).logits
        tokens = logits[:, -1:].argmax(dim=-1)
        continuation.append(tokens)
    rows = torch.cat(continuation, dim=1).tolist()
    end = model.config.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def _corrupt(
    screen: _Screen,
    cache: Any,
    src: CacheSpan,
    dst: CacheSpan,
    prompt_lens: Sequence[int],
    seed: int,
) -> None:
    """Flips one bit of the destination, which verify must name, and flips it back."""
    chance = random.Random(seed)
    layer_idx = chance.randrange(len(cache.layers))
    kv = chance.choice("KV")
    tensor = cache.layers[layer_idx].keys if kv == "K" else cache.layers[layer_idx].values
    sequence = chance.randrange(len(prompt_lens))
    token = chance.randrange(prompt_lens[sequence])
    head, dim = chance.randrange(tensor.shape[1]), chance.randrange(tensor.shape[3])
    bit = chance.randrange(8 * tensor.itemsize)

    bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    place = (sequence, head, tensor.shape[2] - prompt_lens[sequence] + token, dim)  # left-padded
    flip = torch.tensor(1).bitwise_left_shift(bit).to(bits.dtype)
    bits[place] ^= flip
    screen.done(
        "corrupt",
        f"bit {bit} of {kv}, layer {layer_idx}, sequence {sequence}, token {token}, head {head}, "
        f"dim {dim} of the destination is flipped",
    )
    broken = verify(src, dst, prompt_lens)
    found = broken.difference
    caught = (
        not broken.ok
        and found is not None
        and (layer_idx, kv, sequence, token, head, dim)
        == (found.layer, found.kv, found.sequence, found.token, found.head, found.dim)
    )
    screen.check("verify", caught, f"{broken}")
    bits[place] ^= flip
    mended = verify(src, dst, prompt_lens)
    screen.check("mended", mended.ok, f"the bit is flipped back: {mended}")


def _left_padded(lengths: Sequence[int]) -> Tensor:
    """Attention mask of a batch padded on the left, as HF decodes it: (batch, longest), int64."""
    longest = max(lengths)
    return (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()


def _fingerprint(directory: str) -> str:
    """Of the model, weights and tokenizer in the directory that an engine has loaded."""
    return fingerprint(*sorted(Path(directory).iterdir()))


def _speed(
    src: CacheSpan, dst: CacheSpan, seq_lens: SeqLens, num_bytes: int, first_call: float
) -> str:
    seconds = []
    for _ in range(TIMED_CALLS):
        start = time.perf_counter()
        migrate(src, dst, seq_lens)
        seconds.append(time.perf_counter() - start)
    again = statistics.median(seconds)
    return (
        f"{len(src.view.layers)} layers, K and V, {num_bytes / 1e6:.2f} MB in one call: "
        f"{first_call * 1e3:.2f} ms, {num_bytes / first_call / 1e9:.2f} GB/s; "
        f"again, median of {TIMED_CALLS}: {again * 1e3:.2f} ms, {num_bytes / again / 1e9:.2f} GB/s"
    )


def _table(
    directory: Path,
    prompt_lens: list[int],
    from_vllm: list[list[int]],
    from_hf: list[list[int]],
    num_bytes: int,
) -> Table:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    table = Table(title="Prompts, and how they go on", title_justify="left")
    table.add_column("prompt ends")
    table.add_column("tokens", justify="right")
    table.add_column("kB moved", justify="right")
    table.add_column("vLLM goes on")
    table.add_column("HF goes on from the migrated cache")
    table.add_column("equal")
    for prompt, length, ours, theirs in zip(PROMPTS, prompt_lens, from_vllm, from_hf, strict=True):
        table.add_row(
            escape(prompt if len(prompt) <= 16 else f"…{prompt[-15:]}"),
            str(length),
            f"{num_bytes * length / sum(prompt_lens) / 1e3:.1f}",
            escape(tokenizer.decode(ours)),
            escape(tokenizer.decode(theirs)),
            "[green]yes[/]" if ours == theirs else "[red]no[/]",
        )
    return table


def _num_equal(ours: list[list[int]], theirs: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


class _Screen:
    """The demo's own lines. What the engines print goes to `log`, and is shown if they fail."""

    def __init__(self, console: Console, log: Path) -> None:
        self.console = console
        self.log = log
        self.good = True  # every check so far

    @contextmanager
    def step(self, name: str, doing: str = "") -> Iterator[Callable[[str], None]]:
        """Shows that `name` is being done, then what it says of itself and how long it took."""
        said: list[str] = []
        start = time.perf_counter()
        if doing and not self.console.is_terminal:
            self.console.print(f"  {name:<8} {doing} ...", highlight=False)
        try:
            with self.console.status(f"{name} {doing}"):
                yield said.append
        except Exception:
            self.console.print(f"[red]✗[/] {name:<8} failed. The engines' last words:")
            self.console.print(escape("\n".join(self.log.read_text().splitlines()[-30:])))
            raise
        self.done(name, f"{' '.join(said)} [dim]{time.perf_counter() - start:.1f} s[/]")

    def done(self, name: str, text: str) -> None:
        self.check(name, True, text)

    def check(self, name: str, good: bool, text: str) -> None:
        self.good = self.good and good
        mark = "[green]✓[/]" if good else "[red]✗[/]"
        self.console.print(f"{mark} {name:<8} {text}", highlight=False)

    def print(self, table: Table) -> None:
        self.console.print(table)


@contextmanager
def _screen() -> Iterator[_Screen]:
    """Sends file descriptors 1 and 2, which the engines print to, to a file; yields the screen."""
    sys.stdout.flush()
    sys.stderr.flush()
    with (
        tempfile.TemporaryDirectory(prefix="kvx-log-") as directory,
        os.fdopen(os.dup(1), "w", encoding="utf-8") as out,
        os.fdopen(os.dup(2), "w", encoding="utf-8") as err,
    ):
        log = Path(directory) / "engines.log"
        console = Console(file=out)
        with log.open("w", encoding="utf-8") as sink:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
            try:
                yield _Screen(console if console.is_terminal else Console(file=out, width=120), log)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
