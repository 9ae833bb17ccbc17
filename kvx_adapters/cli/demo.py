"""`kvx demo`: migrates a cache filled by a real vLLM through four memory layouts, to transformers.

vLLM prefills; its cache is migrated into a pool laid out as TensorRT-LLM's, from there into a cache
laid out as TGI's, and from there into HF transformers, which continues. Then one conversation goes
through all engines that are here (demo_route.py). The engines run in this process, with a tiny
Llama made by the demo. `run` does all steps.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from kvx_adapters import transformers as hf
from kvx_adapters import vllm
from kvx_adapters.cli.demo_engines import (
    ChatInVLLM,
    continue_hf,
    finish_vllm,
    kv_caches,
    left_padded,
    prefill,
    start_vllm,
    until,
)
from kvx_adapters.cli.demo_hops import Stop, hop, tgi_cache, trtllm_pool
from kvx_adapters.cli.demo_model import PASSAGES, PROMPTS, QUESTION, make_model
from kvx_adapters.cli.demo_packages import DemoError
from kvx_adapters.cli.demo_report import hops_report, prompts_report, route_report
from kvx_adapters.cli.demo_route import Leg, installed, load, shares, travel
from kvx_adapters.cli.demo_screen import Screen, open_screen
from kvx_adapters.cli.demo_tables import add_leg, hops_table, prompts_table, route_table
from kvx_adapters.cli.engines import Model
from kvx_core import CacheSpan, SeqLens, content_digest, verify

__all__ = ["PASSAGES", "PROMPTS", "DemoError", "make_model", "run"]


def run(
    *, dtype: str, seed: int, max_new_tokens: int, corrupt: bool, to_stderr: bool = False
) -> dict[str, Any]:
    """Runs and prints the demo. Returns what it found, as `--json` prints it: "good" if all checks
    passed, "checks", "hops" and, without `corrupt`, "prompts" and "route".

    to_stderr: print to standard error
    Raises DemoError.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    with (
        tempfile.TemporaryDirectory(prefix="kvx-demo-") as temporary,
        open_screen(to_stderr=to_stderr) as screen,
    ):
        directory = Path(temporary)
        with screen.step("model") as say:
            say(make_model(directory, dtype, seed))
        with screen.step("vLLM", "starting, on CPU, in this process") as say:
            llm = start_vllm(directory, dtype)
            say(f"{sys.modules['vllm'].__version__} on CPU, {dtype}, in this process")
        with screen.step("prefill") as say:
            prefilled = prefill(llm, max_new_tokens)
            prompt_lens = prefilled.prompt_lens
            say(f"by vLLM: {len(PROMPTS)} prompts of {_list(prompt_lens)} tokens")
        with screen.step("HF") as say:
            from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

            model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
            say(f"transformers {sys.modules['transformers'].__version__}, with an empty cache")

        # The caches of both engines, described in place, and two caches without an engine.
        src = vllm.live_view(llm, fingerprint=_fingerprint(llm.llm_engine.model_config.model))
        src_span = vllm.live_span(llm, prefilled.request_ids, fingerprint=src.facts.fingerprint)
        cache = DynamicCache(config=model.config)
        mask = left_padded(prompt_lens)
        hf.reserve(cache, model, batch_size=len(PROMPTS), num_tokens=mask.shape[1])
        facts = hf.cache_facts(model, fingerprint=_fingerprint(model.config.name_or_path))
        dst_span, _ = hf.padded_span(hf.cache_view(cache, facts), mask)
        chance = random.Random(seed)
        stops = [
            Stop("vLLM", "block table", src_span),
            trtllm_pool(src, prompt_lens, chance),
            tgi_cache(src, prompt_lens, chance),
            Stop("HF transformers", "row, start", dst_span),
        ]
        k, there = src.layers[0].k.data, dst_span.view.layers[0].k.data
        screen.check(
            "describe",
            (k, there) == (kv_caches(llm)[0].data_ptr(), cache.layers[0].keys.data_ptr()),
            f"{len(src.layers)} layers, zero-copy: K of layer 0 is vLLM's at {k:#x} and HF's at "
            f"{there:#x}",
        )

        # Each hop migrates K and V of all layers and all prompts in one call.
        seq_lens = SeqLens.of(prompt_lens)
        hops = [hop(*ends, seq_lens) for ends in pairwise(stops)]
        screen.print(hops_table(stops, hops, wide=screen.wide))
        screen.report["hops"] = hops_report(stops, hops)
        found = [*(h.arrived for h in hops), verify(src_span, dst_span, seq_lens)]
        wrong = [str(verification) for verification in found if not verification.ok]
        screen.check(
            "verify",
            not wrong,
            *wrong[:1] or [f"after every hop, and HF's cache against vLLM's: {found[-1]}"],
        )
        if corrupt:
            _corrupt(screen, cache, src_span, dst_span, prompt_lens, seed)
            return screen.report | {"good": screen.good}

        with screen.step("decode") as say:
            from_vllm = finish_vllm(llm)
            from_hf = continue_hf(model, cache, mask, prefilled.first_tokens, max_new_tokens)
            say("by both, each from its own cache; HF never saw the prompts")
        zeros = DynamicCache(config=model.config)
        hf.reserve(zeros, model, batch_size=len(PROMPTS), num_tokens=mask.shape[1])
        from_zeros = continue_hf(model, zeros, mask, prefilled.first_tokens, max_new_tokens)

        tokenizer = AutoTokenizer.from_pretrained(directory)
        screen.print(
            prompts_table(
                tokenizer.decode,
                prompt_lens,
                from_vllm,
                from_hf,
                hops[-1].num_bytes,
                wide=screen.wide,
            )
        )
        screen.report["prompts"] = prompts_report(prompt_lens, from_vllm, from_hf, tokenizer.decode)
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
        _converse(screen, llm, tokenizer, load(directory, src.facts.fingerprint or ""))
        return screen.report | {"good": screen.good}


def _converse(screen: Screen, llm: Any, tokenizer: Any, model: Model) -> None:
    """Sends a chat through vLLM and all other engines that are here."""
    with screen.step("engines", "starting, with the same model") as say:
        stations, absent = installed(model, model.config.max_position_embeddings)
        names = ", ".join(f"{station.title} {station.version}" for station in stations)
        say(f"{names}, float32")
    for station, why in absent.items():
        screen.left_out(station.title, why, station.install)

    counts = shares(tokenizer, 1 + len(stations))
    chat = ChatInVLLM(
        llm,
        tokenizer(QUESTION)["input_ids"],
        max_new_tokens=sum(counts),
        fingerprint=model.fingerprint,
    )
    legs: list[Leg] = []
    wide = screen.wide
    table = route_table(len(counts), wide=wide)
    with screen.growing(table) as show:
        for leg in travel(chat, stations, model, counts):
            legs.append(leg)
            add_leg(table, leg, tokenizer.decode(leg.tokens), wide=wide)
            show()

    arrivals = [leg.arrival for leg in legs if leg.arrival is not None]
    wrong = [str(a.verification) for a in arrivals if not a.verification.ok]
    last = arrivals[-1].verification
    screen.check("arrived", not wrong, *wrong[:1] or [f"after every hop; the last one: {last}"])
    flips = [arrival.flip for arrival in arrivals]
    found = sum(flip.is_found for flip in flips)
    screen.check(
        "flipped",
        found == len(flips),
        f"a bit of each engine's cache, and back: {found} of {len(flips)} are found; the last one "
        f"{flips[-1].found}",
    )
    chat.decode(sum(counts))  # what vLLM says alone
    said = until(model.config.eos_token_id, [token for leg in legs for token in leg.tokens])
    equal = sum(a == b for a, b in zip(said, chat.tokens, strict=False))
    screen.check(
        "answer",
        said == chat.tokens,
        f"{equal} of {len(chat.tokens)} tokens are those that vLLM says alone",
    )
    screen.report["route"] = route_report(stations, absent, legs, chat.tokens, tokenizer.decode)
    by_chance = sum(leg.from_zeros == leg.tokens for leg in legs)
    screen.check(
        "zeros",
        by_chance == 0,
        f"{by_chance} of {len(stations)} engines say their words if they get a cache of zeros; "
        f"{stations[-1].title} says [dim]{escape(repr(tokenizer.decode(legs[-1].from_zeros)))}[/]",
    )


def _corrupt(
    screen: Screen,
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


def _fingerprint(directory: str) -> str:
    """A fingerprint of the model in the directory that an engine has loaded: all its files."""
    return content_digest(*sorted(Path(directory).iterdir()))


def _num_equal(ours: list[list[int]], theirs: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
