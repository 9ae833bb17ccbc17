"""Faults: engines that are killed, and file systems that fail, are full, slow or do not answer."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from kvx_conformance import faults
from kvx_conformance.case import Hung, Lost, NotApplicable, case
from kvx_conformance.connector_probe import (
    PLAIN,
    SEEDS,
    Probe,
    prompts,
    reused,
    some_are_reused,
)
from kvx_conformance.served import EngineEnded

_SECONDS = 600.0
# Calls of a save, and how many of each go before the one that kills.
_KILLS = (("write", 0), ("sync", 0), ("link+rename", 4))


def _is_sound(probe: Probe, store: Path, seed: int) -> None:
    """What is there is right, and new prompts are stored and found."""
    new = prompts(2, seed=seed)
    probe.write(store, new)
    some_are_reused(probe.read(store, new), "they were stored after the fault")


@case("LMCache #4991: half of a store is served", seconds=_SECONDS)
def killed_while_it_saves(probe: Probe) -> None:
    """An engine that is killed at any call of a save leaves nothing that is taken for whole, and
    nothing that keeps others from storing the same.
    """
    library, requests, num_killed = faults.build(probe.work), prompts(3), 0
    for i, (call, after) in enumerate(_KILLS):
        store = probe.folder() / "store"
        rule = f"call={call},path={store}/,kill=9,after={after}"
        environment = faults.environment(library, rule)
        try:
            with probe.engine(PLAIN, store, environment=environment) as engine:
                engine.ask(requests)
                engine.settle()
        except EngineEnded:
            num_killed += 1
        probe.write(store, requests)
        some_are_reused(probe.read(store, requests), "they were stored again after a kill")
        _is_sound(probe, store, 50 + i)
    if not num_killed:
        raise NotApplicable("no process of the engine makes a call that a save needs")


@case("kill -9 at any time", seconds=_SECONDS)
def killed_at_any_time(probe: Probe) -> None:
    """After an engine was killed while it computed, loaded and saved, others answer right."""
    store, requests = probe.folder(), prompts(6)
    for seed in SEEDS:
        with probe.engine(PLAIN, store, environment={}) as engine:
            killer = threading.Timer(0.05 * seed**2, engine.kill)
            killer.start()
            try:
                while not engine.has_ended:
                    engine.ask(requests)
                    engine.forget()
            except EngineEnded:
                pass
            killer.join()
    probe.read(store, requests)
    _is_sound(probe, store, 60)


@case("a disk with errors", seconds=_SECONDS)
def errors_of_the_file_system(probe: Probe) -> None:
    """Calls that fail with EIO, ESTALE or EMFILE cost hits, no token and no engine."""
    _strikes(
        probe,
        "call=read,error=EIO,chance=0.2,seed=1",
        "call=open,error=ESTALE,chance=0.1,seed=2",
        "call=stat,error=ESTALE,chance=0.05,seed=3",
        "call=write,error=EIO,chance=0.2,seed=4",
        "call=sync+link+rename+mkdir,error=EIO,chance=0.2,seed=5",
        "call=list+unlink+utime,error=EIO,chance=0.1,seed=6",
        "call=open,error=EMFILE,chance=0.05,seed=7",
        "call=close,error=EIO,chance=0.1,seed=8",
    )


@case("vLLM #54327: a tier that grows until its disk is full", seconds=_SECONDS)
def a_full_disk(probe: Probe) -> None:
    """A disk without room costs what is not stored; when it has room again, prompts are stored."""
    _strikes(probe, "call=write+mkdir,error=ENOSPC")


@case("read and write may do less than was asked", seconds=_SECONDS)
def short_reads_and_writes(probe: Probe) -> None:
    """Reads and writes that handle a part of their bytes lose none."""
    _strikes(probe, "call=read+write,short=1,chance=0.5,seed=9")


@case("a network file system under load", seconds=_SECONDS)
def slow_calls(probe: Probe) -> None:
    """Calls that take 20 ms each change no token."""
    _strikes(probe, "call=read+write+open+list+sync,delay=20,chance=0.3,seed=10")


def _strikes(probe: Probe, *rules: str) -> None:
    """An engine saves and loads while the faults strike, and when they are over."""
    library, store, requests = faults.build(probe.work), probe.folder() / "store", prompts(3)
    probe.write(store, requests[:2])
    flag, log = probe.work / f"flag-{store.parent.name}", probe.work / f"log-{store.parent.name}"
    log.touch()
    lasting = [f"{rule},path={store}/,if={flag}" for rule in rules]
    environment = faults.environment(library, *lasting, log=log)
    with probe.engine(PLAIN, store, environment=environment) as engine:
        flag.touch()
        for seed in SEEDS:
            batch = [*requests, *prompts(2, seed=seed + 20)]
            probe.check(engine.ask(batch), batch)
            engine.forget()
        flag.unlink()
        probe.check(engine.ask(requests), requests)
        engine.settle()
    if not log.stat().st_size:
        raise NotApplicable("no process of the engine made a call that these faults strike")
    probe.write(store, requests)
    some_are_reused(probe.read(store, requests), "the faults were over when they were stored")
    _is_sound(probe, store, 70)


@case("llm-d, vLLM: one mount that hangs stops all engines", seconds=_SECONDS)
def a_disk_that_does_not_answer(probe: Probe) -> None:
    """While no call of the file system returns, requests are computed, and no step waits for it."""
    library, store, requests = faults.build(probe.work), probe.folder() / "store", prompts(3)
    flag = probe.work / f"flag-{store.parent.name}"
    rule = f"call=*,frozen=1,path={store}/,if={flag}"
    with probe.engine(PLAIN, store, environment=faults.environment(library, rule)) as engine:
        probe.check(engine.ask(requests[:2]), requests[:2])
        engine.settle()
        engine.forget()
        engine.longest_step()
        flag.touch()
        thaw = threading.Timer(30, flag.unlink)
        thaw.start()
        begun = time.monotonic()
        answers = engine.ask(requests)
        seconds = time.monotonic() - begun
        is_over = thaw.finished.is_set() or not flag.exists()
        thaw.cancel()
        flag.unlink(missing_ok=True)
        longest = engine.longest_step()
    probe.check(answers, requests)
    if is_over or longest > 15:
        raise Hung(f"requests took {seconds:.0f} s, a step {longest:.1f} s, of a disk's 30")
    probe.write(store, requests)
    some_are_reused(probe.read(store, requests), "the disk answers again")


@case("a store that engines may read, and not write", seconds=_SECONDS)
def a_folder_that_cannot_be_written(probe: Probe) -> None:
    """Where nothing may be written, what is stored is found, or the engine runs without."""
    library, store, requests = faults.build(probe.work), probe.folder() / "store", prompts(3)
    probe.write(store, requests[:2])
    rule = f"call=write+mkdir+link+rename+unlink+utime+chmod,path={store}/,error=EROFS"
    with probe.engine(PLAIN, store, environment=faults.environment(library, rule)) as engine:
        probe.check(engine.ask(requests), requests)
        engine.settle()
        engine.forget()
        probe.check(engine.ask(requests), requests)


@case("a mount that is not there yet", seconds=_SECONDS)
def no_folder(probe: Probe) -> None:
    """A store whose folder goes while an engine runs costs hits; an engine that starts later stores
    again.
    """
    parent = probe.folder()
    store, requests = parent / "a" / "store", prompts(2)
    with probe.engine(PLAIN, store) as engine:
        probe.check(engine.ask(requests), requests)
        engine.settle()
        os.rename(parent / "a", parent / "b")
        engine.forget()
        probe.check(engine.ask(requests), requests)
        engine.settle()
    probe.write(store, requests)
    counts = reused(probe.read(store, requests))
    if not all(counts):
        raise Lost(f"{counts} tokens were reused of what was stored after the folder went")
