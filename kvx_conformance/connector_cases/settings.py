"""Settings of engines: those that change a number share nothing, the others share."""

from __future__ import annotations

from kvx_conformance.case import case
from kvx_conformance.connector import Setup
from kvx_conformance.connector_probe import (
    PLAIN,
    Probe,
    none_is_reused,
    prompts,
    share,
    share_nothing,
    some_are_reused,
)

_SECONDS = 240.0


@case("vLLM #56311: rope scaling is not in the key", seconds=_SECONDS)
def another_rotation_shares_nothing(probe: Probe) -> None:
    """The same files with another base of the rotation, given at the start, share nothing."""
    share_nothing(probe, PLAIN, Setup(theta=5e5))


@case("vLLM: Phi-3 takes its long factors where max_model_len is above 4k", seconds=_SECONDS)
def a_rotation_by_length_shares_nothing(probe: Probe) -> None:
    """A model whose rotation depends on the longest sequence shares by rotation, not by name."""
    short, long = Setup(family="longrope", longest=256), Setup(family="longrope", longest=512)
    share_nothing(probe, short, long, prompts(2, 200))


@case("dtype is a part of the model as it is computed", seconds=_SECONDS)
def another_dtype_shares_nothing(probe: Probe) -> None:
    """What was computed in bfloat16 is not taken for float32."""
    store, requests = probe.folder(), prompts(2)
    probe.write(store, requests, Setup(dtype="bfloat16"))
    none_is_reused(probe.read(store, requests), "of what was computed in bfloat16")


@case("benchmarks/peers.py: a cache of FP8, read as if it were exact", seconds=_SECONDS)
def a_rounded_cache_is_not_taken_for_an_exact_one(probe: Probe) -> None:
    """What an engine with a cache of FP8 has stored is not taken by one without."""
    store, requests = probe.folder(), prompts(2)
    probe.write(store, requests, Setup(cache_dtype="fp8"))
    none_is_reused(probe.read(store, requests), "of what was rounded to FP8")


@case("one precision stood for all layers: kv_cache_dtype_skip_layers", seconds=_SECONDS)
def precision_is_compared_layer_by_layer(probe: Probe) -> None:
    """An engine whose first layer is not rounded takes nothing from one whose first layer is."""
    fp8 = Setup(cache_dtype="fp8")
    store, requests = probe.folder(), prompts(2)
    probe.write(store, requests, fp8)
    skips = Setup(cache_dtype="fp8", skipped=(0,))
    none_is_reused(probe.read(store, requests, skips), "of layers that were rounded")


@case("quantisation as applied when weights are loaded", seconds=_SECONDS)
def another_quantisation_shares_nothing(probe: Probe) -> None:
    """The same files, quantised when they are loaded, share nothing with the files as they are."""
    share_nothing(probe, Setup(dtype="bfloat16"), Setup(dtype="bfloat16", quantization="fp8"))


@case("benchmarks/peers.py: LMCache is wrong at another block size", seconds=_SECONDS)
def other_blocks_share(probe: Probe) -> None:
    """Engines of other block sizes share, in both directions."""
    share(probe, Setup(block_size=32), Setup(block_size=64))
    share(probe, Setup(block_size=128), Setup(block_size=32))


@case("vLLM #55904: NHD and HND mixed", seconds=_SECONDS)
def another_layout_shares(probe: Probe) -> None:
    """Engines whose caches have other layouts share."""
    share(probe, PLAIN, Setup(layout="HND"))
    share(probe, Setup(layout="HND"), PLAIN)


@case("vLLM #51689: TP1 to TP2", seconds=900)
def other_ranks_share(probe: Probe) -> None:
    """An engine whose heads are split among two ranks takes what one rank has stored, and the other
    way round.
    """
    store, known, new = probe.folder(), prompts(2), prompts(2, seed=1)
    probe.write(store, known)
    answers = probe.read(store, known + new, Setup(ranks=2))
    some_are_reused(answers[:2], "one rank has stored them")
    some_are_reused(probe.read(store, new), "two ranks have stored them")


@case("how an engine schedules changes no number", seconds=_SECONDS)
def other_steps_share(probe: Probe) -> None:
    """Engines that compute prompts in other pieces, with other room, share."""
    pieces = Setup(step_tokens=64, num_blocks=64, prefix_caching=False, longest=400)
    share(probe, pieces, PLAIN)
    share(probe, PLAIN, pieces)


@case("vLLM: a draft's tokens are proposals; what was rejected is in no cache", seconds=_SECONDS)
def drafts_share(probe: Probe) -> None:
    """An engine that drafts tokens shares with one that does not, in both directions."""
    once = prompts(2, 120)
    again = [
        type(one)(one.tokens * 2 + one.tokens[:40]) for one in once
    ]  # so that drafts are right
    share(probe, Setup(draft="ngram"), PLAIN, again)
    share(probe, PLAIN, Setup(draft="ngram"), again)


@case("HMA: blocks that a window has left are null", seconds=_SECONDS)
def windows_share(probe: Probe) -> None:
    """A model some of whose layers have a window shares, across block sizes."""
    requests = prompts(2)
    share(probe, Setup(family="windows"), Setup(family="windows", block_size=64), requests)


@case("vLLM: MLA models have more than one KV head in their config", seconds=_SECONDS)
def latents_share(probe: Probe) -> None:
    """A model that stores latents shares."""
    share(probe, Setup(family="latents"), Setup(family="latents"))
