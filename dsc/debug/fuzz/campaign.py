"""Many batches of programs, by seed: what each found, and the sum of it."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from dsc.debug.fuzz.maker import generate, worlds_of
from dsc.debug.fuzz.program import Program, script
from dsc.debug.fuzz.shrinking import shrink, shrink_batch
from dsc.debug.fuzz.trial import check, check_all, is_fault

BATCH = 25
"""Programs a graph."""


@dataclass(frozen=True)
class Finding:
    """One mismatch, as a script."""

    seed: int
    why: str
    script: str


@dataclass(frozen=True)
class Outcome:
    """Of one batch."""

    seed: int
    programs: int
    excused: dict[str, int]
    """Verdicts that are no faults of dsc, by what they begin with."""
    kind: str
    findings: tuple[Finding, ...] = ()


@dataclass
class Total:
    """Of all batches."""

    programs: int = 0
    excused: dict[str, int] = field(default_factory=dict)
    by_kind: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, o: Outcome) -> None:
        self.programs += o.programs
        for word, count in o.excused.items():
            self.excused[word] = self.excused.get(word, 0) + count
        self.by_kind[o.kind] = self.by_kind.get(o.kind, 0) + o.programs
        self.findings += o.findings


def batch(seed: int, count: int = BATCH) -> tuple[str, list[Program]]:
    """The programs of a seed, and what they have in common.

    Of 10 batches 5 train, 1 trains on infinities and NaN, 2 do not train, and 2 run in several sizes: half as many at
    once, since tracing takes longer the more symbols a graph has.
    """
    rng = random.Random(seed)
    rest: dict[str, Any]
    kind, rest = "training", {}
    match rng.randrange(10):
        case 0:
            kind, rest = "inference", {"grad": False}
        case 1:
            kind, rest = "inference, edges", {"grad": False, "edges": True}
        case 2:
            kind, rest = "training, edges", {"edges": True}
        case 3:
            kind, rest = "dynamic=True", {"worlds": worlds_of(rng, 3)}
        case 4:
            kind, rest = "mark_dynamic", {"worlds": worlds_of(rng, 3), "marked": True}
    many = -(-count // 2) if "worlds" in rest else count
    return kind, [generate(random.Random(f"{seed} {i}"), **rest) for i in range(many)]


def one(seed: int, count: int, options: dict[str, Any], shrinks: bool = True) -> Outcome:
    """Makes and checks the batch of a seed, and cuts down what fails."""
    kind, programs = batch(seed, count)
    verdicts = check_all(programs, options)
    excused: dict[str, int] = {}
    for v in verdicts:
        if v is not None and not is_fault(v):
            excused[v.split(":")[0]] = excused.get(v.split(":")[0], 0) + 1
    failed = [(p, v) for p, v in zip(programs, verdicts) if v is not None and is_fault(v)]
    return Outcome(
        seed, len(programs), excused, kind, tuple(explained(seed, p, v, programs, options, shrinks) for p, v in failed)
    )


def explained(
    seed: int, p: Program, why: str, programs: list[Program], options: dict[str, Any], shrinks: bool
) -> Finding:
    if not shrinks:
        return Finding(seed, why, script([p], why, options))
    if is_fault(alone := check(p, options)):
        small = shrink(p, lambda q: is_fault(check(q, options)))
        return Finding(seed, str(alone), script([small], check(small, options) or why, options))
    few = shrink_batch(programs, lambda qs: any(map(is_fault, check_all(qs, options))))
    return Finding(seed, why, script(few, f"{why} (only together)", options))


def outcomes(
    first: int,
    batches: int | None,
    seconds: float | None,
    count: int,
    workers: int,
    options: dict[str, Any],
    device: str = "cpu",
) -> Iterator[Outcome]:
    """Batches of seeds ``first``, ``first + 1``, ..., until there were so many or the time is up."""
    end = time.monotonic() + seconds if seconds is not None else float("inf")
    seeds = iter(range(first, first + batches) if batches is not None else range(first, 1 << 62))
    if workers <= 1 and device == "cpu":
        for seed in seeds:
            if time.monotonic() >= end:
                return
            yield one(seed, count, options)
        return
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(device,)
    ) as pool:
        running: set[Future[Outcome]] = set()
        while True:
            while len(running) < workers and time.monotonic() < end and (following := next(seeds, None)) is not None:
                running.add(pool.submit(one, following, count, options))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for f in done:
                yield f.result()


def _begin(device: str) -> None:
    """A worker a core: threads inside each would only get in each other's way."""
    import torch

    torch.set_num_threads(1)
    if device != "cpu":
        torch.set_default_device(device)
