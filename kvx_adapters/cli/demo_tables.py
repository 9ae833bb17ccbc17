"""The tables of the demo.

Each has two forms: rows of many columns, and for a terminal that is narrower than WIDE rows of a
few columns whose cells have several lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.table import Table

from kvx_adapters.cli.demo_hops import TIMED_CALLS, Hop, Stop
from kvx_adapters.cli.demo_model import PROMPTS, QUESTION
from kvx_adapters.cli.demo_route import Leg
from kvx_core import Layout, TensorDesc, Verification

WIDE = 120  # columns that the table of hops takes, and one


def hops_table(stops: Sequence[Stop], hops: Sequence[Hop], *, wide: bool) -> Table:
    """A table of the caches, with the migration into each of them."""
    table = _table(
        "The prompts' keys and values, from cache to cache",
        "K and V in a block: H heads, T tokens, D dims, as their bytes follow each other. "
        f"again: median of {TIMED_CALLS} calls.\n* memory laid out and addressed as that engine's; "
        "the engine itself is not running",
        wide=wide,
    )
    table.add_column("cache of", no_wrap=True)
    if wide:
        for name in ("K in a block", "V in a block"):
            table.add_column(name, no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    if wide:
        table.add_column("found by", no_wrap=True)
        for name in ("MB", "first ms", "again ms", "GB/s"):
            table.add_column(name, justify="right", no_wrap=True)
    else:
        table.add_column("moved", justify="right", no_wrap=True)
    table.add_column("verify", no_wrap=True)
    for stop, hop in zip(stops, (None, *hops), strict=True):
        layer = stop.span.view.layers[0]
        tokens = str(layer.block_size)
        halves = [escape(_in_memory(half)) for half in layer.tensors.values()]
        figures = ["", "", "", ""] if hop is None else _figures(hop)
        equal = "source" if hop is None else _equal(hop.arrived)
        if wide:
            table.add_row(stop.cache_of, *halves, tokens, stop.found_by, *figures, equal)
            continue
        names = zip(layer.tensors, halves, strict=True)
        blocks = [stop.cache_of, *(f"{name.upper()} {half}" for name, half in names)]
        mb, first, again, speed = figures
        moved = "" if hop is None else f"{mb} MB\nfirst {first} ms\nagain {again} ms\n{speed} GB/s"
        table.add_row("\n".join([*blocks, f"by {stop.found_by}"]), tokens, moved, equal)
    return table


def _figures(hop: Hop) -> list[str]:
    """MB, milliseconds of the first call and of those after it, GB/s."""
    return [
        f"{hop.num_bytes / 1e6:.2f}",
        f"{hop.first * 1e3:.2f}",
        f"{hop.again * 1e3:.2f}",
        f"{hop.num_bytes / hop.again / 1e9:.1f}",
    ]


def _in_memory(half: TensorDesc) -> str:
    """The axes of a block of K or V, the one with the longest step first."""
    axes = ["T", "H", "D"] if half.layout is Layout.BLOCK_NHD else ["H", "T", "D"]
    if half.ndim == 5:
        axes = ["H", f"D/{half.shape[4]}", "T", str(half.shape[4])]
    steps = sorted(zip(half.stride[1:], axes, strict=True), key=lambda step: -step[0])
    return f"[{', '.join(axis for _, axis in steps)}]"


def prompts_table(
    text: Callable[[list[int]], str],
    prompt_lens: list[int],
    from_vllm: list[list[int]],
    from_hf: list[list[int]],
    num_bytes: int,
    *,
    wide: bool,
) -> Table:
    """A table of how the prompts go on.

    text: of tokens
    """
    table = _table("Prompts, and how they go on", wide=wide)
    if wide:
        table.add_column("prompt ends", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("kB moved" if wide else "kB", justify="right", no_wrap=True)
    if wide:
        table.add_column("vLLM goes on")
        table.add_column("HF goes on from the migrated cache")
    else:
        table.add_column("prompt ends; vLLM goes on; HF goes on from the migrated cache")
    table.add_column("equal", no_wrap=True)
    for prompt, length, ours, theirs in zip(PROMPTS, prompt_lens, from_vllm, from_hf, strict=True):
        end = escape(prompt if len(prompt) <= 16 else f"…{prompt[-15:]}")
        size = f"{num_bytes * length / sum(prompt_lens) / 1e3:.1f}"
        both = [escape(text(tokens)) for tokens in (ours, theirs)]
        equal = "[green]yes[/]" if ours == theirs else "[red]no[/]"
        if wide:
            table.add_row(end, str(length), size, *both, equal)
        else:
            named = zip(("vLLM", "HF"), both, strict=True)
            lines = [end, *(f"[dim]{name}:[/] {said.strip()}" for name, said in named)]
            table.add_row(str(length), size, "\n".join(lines), equal)
    return table


def route_table(num_engines: int, *, wide: bool) -> Table:
    """An empty table of the route, for `add_leg`."""
    table = _table(
        f"One conversation through {num_engines} engines. {escape(QUESTION)}",
        "words ms: the engine says its words, vLLM behind its prefill. room ms: the engine "
        "makes room for the cache. KVX ms: both caches are described, their facts compared, all "
        f"tokens before the words copied in one call. again: median of {TIMED_CALLS} calls.",
        wide=wide,
    )
    table.add_column("engine", no_wrap=True)
    table.add_column("says")
    table.add_column("tokens", justify="right", no_wrap=True)
    if wide:
        for name in ("words ms", "room ms", "KVX ms", "again ms", "kB"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("verify", no_wrap=True)
    else:
        table.add_column("ms", justify="right", no_wrap=True)
    return table


def add_leg(table: Table, leg: Leg, text: str, *, wide: bool) -> None:
    """Adds what an engine has said to the table.

    text: of its tokens
    wide: as of the table
    """
    words = f"{leg.spoke * 1e3:.1f}"
    room = moved = again = size = ""
    equal = "start"
    arrival = leg.arrival
    if arrival is not None:
        seconds = (arrival.room, arrival.moved, arrival.again)
        room, moved, again = (f"{s * 1e3:.2f}" for s in seconds)
        size = f"{arrival.num_bytes / 1e3:.1f}"
        equal = _equal(arrival.verification)
    said, tokens = escape(text.strip()), str(len(leg.tokens))
    if wide:
        table.add_row(leg.title, said, tokens, words, room, moved, again, size, equal)
        return
    engine, times = [leg.title, equal], [f"words {words}"]
    if arrival is not None:
        engine.append(f"{size} kB")
        times += [f"room {room}", f"KVX {moved}", f"again {again}"]
    table.add_row("\n".join(engine), said, tokens, "\n".join(times))


def _table(title: str, caption: str | None = None, *, wide: bool) -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        show_lines=not wide,
    )


def _equal(arrived: Verification) -> str:
    return "[green]equal[/]" if arrived.ok else "[red]differs[/]"
