"""Requests: what comes with the tokens decides with whom they share."""

from __future__ import annotations

from dataclasses import replace

from kvx_conformance.case import Wrong, case
from kvx_conformance.connector import Request, Setup
from kvx_conformance.connector_probe import (
    PLAIN,
    Probe,
    none_is_reused,
    prompts,
    reused,
    share_nothing,
    some_are_reused,
)

_SECONDS = 240.0


@case("vLLM #44250, LMCache #2961: adapters are not in the key", seconds=_SECONDS)
def an_adapter_shares_nothing_with_none(probe: Probe) -> None:
    """A request with an adapter shares nothing with the same tokens without."""
    setup, plain = Setup(adapters=True), prompts(2)
    share_nothing(probe, setup, setup, plain, [replace(one, adapter="one") for one in plain])


@case("an adapter's name and number are chosen anew in each engine", seconds=_SECONDS)
def adapters_of_one_name_share_nothing(probe: Probe) -> None:
    """Adapters of one name and number, but other weights, share nothing."""
    setup, plain = Setup(adapters=True), prompts(2)
    one, two = ([replace(each, adapter=name) for each in plain] for name in ("one", "two"))
    share_nothing(probe, setup, setup, one, two)


def _images(seed: int) -> list[Request]:
    """Each has an image of its own: those of one engine share nothing, either."""
    return [replace(one, image=10 * seed + i) for i, one in enumerate(prompts(2, 150))]


@case("LMCache #4086, vLLM #28973: images that have the same placeholders", seconds=_SECONDS)
def other_images_share_nothing(probe: Probe) -> None:
    """The same tokens behind another image share nothing."""
    setup = Setup(family="images")
    share_nothing(probe, setup, setup, _images(1), _images(2))


@case("vLLM #53861: text keys for what has an image", seconds=_SECONDS)
def an_image_shares_nothing_with_its_placeholders(probe: Probe) -> None:
    """A prompt with an image shares nothing with one whose ids are those of its placeholders."""
    setup, (one,) = Setup(family="images"), _images(1)[:1]
    placeholders = Request((511,) * 4 + one.tokens)
    share_nothing(probe, setup, setup, [one], [placeholders])


@case("prompt_embeds have no ids", seconds=_SECONDS)
def embeddings_share_nothing(probe: Probe) -> None:
    """A prompt of embeddings shares nothing with one of other embeddings, nor with one of ids."""
    setup, plain = Setup(embeddings=True), prompts(2, 150)
    ones, others = ([replace(one, embeddings=by) for one in plain] for by in (1.0, -1.0))
    share_nothing(probe, setup, setup, ones, others)
    store = probe.folder()
    probe.write(store, others, setup)
    none_is_reused(probe.read(store, plain, setup), "of what embeddings have computed")


@case("SGLang #37160, vLLM: cache_salt keeps tenants apart", seconds=_SECONDS)
def another_salt_shares_nothing(probe: Probe) -> None:
    """Requests of another salt, or of none, share nothing: that a prompt is stored is a secret."""
    plain = prompts(2)
    alice, bob = ([replace(one, salt=salt) for one in plain] for salt in ("Alice", "Bob"))
    share_nothing(probe, PLAIN, PLAIN, alice, bob, alike=True)
    share_nothing(probe, PLAIN, PLAIN, alice, plain, alike=True)


@case("a salt that is random in each process", seconds=_SECONDS)
def the_same_salt_shares(probe: Probe) -> None:
    """Requests of the same salt share, in another engine too."""
    store, salted = probe.folder(), [replace(one, salt="Alice") for one in prompts(2)]
    probe.write(store, salted)
    some_are_reused(probe.read(store, salted), "requests of this salt were stored")


@case("vLLM #44585: skip_reading_prefix_cache", seconds=_SECONDS)
def who_wants_nothing_stored_gets_nothing(probe: Probe) -> None:
    """A request that says so is computed, whatever is stored."""
    store, requests = probe.folder(), prompts(2)
    probe.write(store, requests)
    computed = [replace(one, takes_stored=False) for one in requests]
    none_is_reused(probe.read(store, computed), "though the request has forbidden it")


@case("PYTHONHASHSEED: keys of hash() are other ones in each process", seconds=_SECONDS)
def another_process_finds_the_same(probe: Probe) -> None:
    """What one process has stored, another process finds, whatever seed Python hashes with."""
    store, requests = probe.folder(), prompts(2)
    probe.write(store, requests)
    with probe.engine(PLAIN, store, hash_seed=1) as engine:
        answers = engine.ask(requests)
    probe.check(answers, requests)
    some_are_reused(answers, "another process has stored them")


@case("tokens at other positions are rotated otherwise", seconds=_SECONDS)
def the_same_tokens_behind_others_share_nothing(probe: Probe) -> None:
    """Tokens that are stored are not taken at another position, behind other tokens."""
    store, stored = probe.folder(), prompts(1, 256)
    probe.write(store, stored)
    before = prompts(1, 128, seed=7)
    behind = [Request(before[0].tokens + stored[0].tokens)]
    none_is_reused(probe.read(store, behind), "at another position")
    shifted = [Request(stored[0].tokens[128:] + before[0].tokens)]
    answers = probe.read(store, shifted)
    if any(reused(answers)):
        raise Wrong(f"{reused(answers)} tokens of the middle were reused as first ones")
