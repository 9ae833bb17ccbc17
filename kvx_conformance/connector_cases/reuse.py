"""Reuse: what is stored is found, as far as it goes, and no further."""

from __future__ import annotations

from kvx_conformance.case import Lost, Wrong, case
from kvx_conformance.connector import Request, Setup
from kvx_conformance.connector_probe import (
    PLAIN,
    SEEDS,
    Probe,
    prompts,
    reused,
    share,
    some_are_reused,
)

_SECONDS = 240.0
_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)


@case("LMCache #4247: stored, and never found", seconds=_SECONDS)
def a_prompt_is_found_again(probe: Probe) -> None:
    """What one engine has stored, another one finds."""
    share(probe, PLAIN, PLAIN)


@case("benchmarks/peers.py: of 1000 tokens 999, 896 and 768 were reused", seconds=_SECONDS)
def most_of_a_prompt_is_found(probe: Probe) -> None:
    """At least half of a stored prompt of 300 tokens is found, and never its last token."""
    store, requests = probe.folder(), prompts(2)
    probe.write(store, requests)
    for count in reused(probe.read(store, requests)):
        if count < 150:
            raise Lost(f"{count} of 300 stored tokens were reused, expected at least 150")


@case("the last token is computed, for its answer: vLLM's own rule", seconds=_SECONDS)
def lengths_around_blocks(probe: Probe) -> None:
    """Prompts of lengths around usual blocks are answered right, and reuse less than all."""
    store = probe.folder()
    requests = [prompts(1, length, seed=length)[0] for length in _LENGTHS]
    probe.write(store, requests)
    for block_size in (32, 64):
        for one, count in zip(
            requests, reused(probe.read(store, requests, Setup(block_size=block_size))), strict=True
        ):
            if not 0 <= count < max(len(one.tokens), 1):
                raise Wrong(f"{count} tokens of a prompt of {len(one.tokens)} were reused")


@case("benchmarks/peers.py: of 700 shared tokens ExampleConnector found none", seconds=_SECONDS)
def a_common_beginning_is_found(probe: Probe) -> None:
    """A prompt that begins like a stored one reuses its beginning, and nothing behind it."""
    store, (stored,), (other,) = probe.folder(), prompts(1), prompts(1, seed=9)
    probe.write(store, [stored])
    for common in (280, 200):
        fork = Request(stored.tokens[:common] + other.tokens[: 300 - common])
        (answer,) = probe.read(store, [fork])
        if answer.reused > common:
            raise Wrong(f"{answer.reused} tokens were reused of {common} common ones")
        if not answer.reused:
            raise Lost(f"0 of {common} common tokens were reused")


@case("entries whose last chunk is another's beginning", seconds=_SECONDS)
def prompts_that_fork_anywhere(probe: Probe) -> None:
    """Prompts that part from a stored one at any token are right, and reuse no token behind."""
    store, (stored,) = probe.folder(), prompts(1)
    probe.write(store, [stored])
    places = (1, 31, 32, 33, 64, 100, 127, 128, 129, 255, 256, 257, 298, 299)
    forks = [Request(_parted(stored.tokens, at)) for at in places]
    for at, answer in zip(places, probe.read(store, forks), strict=True):
        if answer.reused > at:
            raise Wrong(f"{answer.reused} tokens were reused of {at} common ones")


def _parted(tokens: tuple[int, ...], at: int) -> tuple[int, ...]:
    """The same tokens, but for all from `at` on."""
    return tokens[:at] + tuple(1 + token % 510 for token in tokens[at:])


@case("a shorter prompt than what is stored", seconds=_SECONDS)
def a_beginning_alone(probe: Probe) -> None:
    """A prompt that a stored one begins with is answered right, and reuses something."""
    store, (stored,) = probe.folder(), prompts(1)
    probe.write(store, [stored])
    shorter = [Request(stored.tokens[:count]) for count in (290, 270)]
    some_are_reused(probe.read(store, shorter), "their beginning is stored")


@case("a conversation's next turn has the answer in it", seconds=_SECONDS)
def a_conversation_goes_on(probe: Probe) -> None:
    """A prompt with the answer to a stored one behind it reuses what was stored."""
    store, requests = probe.folder(), prompts(2)
    answers = probe.write(store, requests)
    for seed in SEEDS:
        new = prompts(2, 20, seed=seed + 40)
        turns = [
            Request(one.tokens + answer.tokens + more.tokens)
            for one, answer, more in zip(requests, answers, new, strict=True)
        ]
        some_are_reused(probe.read(store, turns), "the turn before is stored")


@case("prompts of a batch that begin alike", seconds=_SECONDS)
def requests_at_once(probe: Probe) -> None:
    """Requests that run at once, and begin alike, are answered right, stored and not."""
    store, (stored,) = probe.folder(), prompts(1)
    probe.write(store, [stored])
    others = prompts(4, 100, seed=3)
    batch = [stored, *(Request(stored.tokens[:200] + other.tokens) for other in others), stored]
    answers = probe.read(store, batch)
    some_are_reused(answers[:1], "it is stored")
    some_are_reused(probe.read(store, batch), "all are stored")


@case("a chunked prefill: the end of a piece is no end of a prompt", seconds=_SECONDS)
def a_prompt_that_is_computed_in_pieces(probe: Probe) -> None:
    """Prompts that are computed in pieces of 64 tokens are stored whole and answered right."""
    pieces, requests = Setup(step_tokens=64), prompts(3)
    store = probe.folder()
    probe.write(store, requests, pieces)
    counts = reused(probe.read(store, requests, PLAIN))
    if min(counts) < 150:
        raise Lost(f"{counts} of 300 tokens were reused, expected at least 150")
    probe.read(store, requests, pieces)


@case("an engine that writes while others read", seconds=_SECONDS)
def engines_by_turns(probe: Probe) -> None:
    """Two engines that run on one store by turns find what the other has stored meanwhile."""
    store, turns = probe.folder(), [prompts(1, seed=seed)[0] for seed in range(4)]
    with probe.engine(PLAIN, store) as one, probe.engine(PLAIN, store, process="two") as two:
        for i, request in enumerate(turns):
            writer, reader = (one, two) if i % 2 else (two, one)
            probe.check(writer.ask([request]), [request])
            writer.settle()
            answers = reader.ask([request])
            probe.check(answers, [request])
            some_are_reused(answers, "the other engine has stored it")
