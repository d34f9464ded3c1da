"""Programs that keep less than a plan saves: some values in fewer bits, some away from the device, as a budget asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dsc import cost, liveness
from dsc.liveness import Profile
from dsc.passes import memory_compress, memory_offload
from dsc.passes.memory_offload import Away
from dsc.passes.memory_program import Program

if TYPE_CHECKING:
    from dsc.passes.memory_plan import Search

MOVED = (0.3, 0.55, 0.75, 0.9, 1.0, 1.1)
"""Shares of what the link can take while the forward runs: budgets larger by that are planned for, and then brought down."""
SHORTENED = (0.1, 0.25, 0.45)
"""Shares of the default's peak by which budgets are larger that are planned for, and then brought down by compression."""
AIMS = 3
"""How often less is aimed at because the program needs more than was foreseen."""


def bases(search: Search, budget: int, room: int, shares: Sequence[float]) -> list[Program]:
    """Programs for budgets larger by shares of ``room``, and the default one, the fastest first."""
    wider = [budget + int(room * share) for share in shares]
    found = [search.resident(b) for b in wider if b < search.default.peak]
    found.append(search.default if search.default.peak > budget else None)
    return sorted({p.schedule: p for p in found if p is not None}.values(), key=lambda p: p.seconds)


def compressing(search: Search, budget: int) -> Iterator[Program]:
    """Programs that recompute for a larger budget, and compress what does not fit then."""
    if search.format is None:
        return
    for base in bases(search, budget, search.default.peak - search.found.problem.fixed, SHORTENED):
        if (program := compressed(search, base, budget)) is not None:
            yield program


def compressed(search: Search, base: Program, budget: int) -> Program | None:
    """A program with so much of what it saves compressed that it fits."""
    assert search.format is not None
    pinned = {search.found.values[v].name for v in search.found.problem.pinned}
    forward, backward, saved, _ = search.build(base.schedule)
    aim = budget
    for _ in range(AIMS):
        short = memory_compress.plan(
            forward, backward, saved, search.found.results, aim, search.target, search.format, pinned
        )
        if short is None:
            return None
        program = run_short(search, base, short)
        if program.peak <= budget:
            return program
        aim -= int((program.peak - budget) * 1.05) + 1
    return None


def run_short(search: Search, base: Program, short: tuple[str, ...]) -> Program:
    forward, backward, saved, names = search.build(base.schedule, (), short)
    seconds = sum(cost.graph_cost(g, search.target).seconds for g in (forward, backward))
    profile = marked(liveness.profile_step(forward, backward, saved), names.values())
    origin = base.origin if base.origin != "default" else "no"
    return Program(f"{origin} recompute, {search.format}", base.schedule, profile, seconds, (), short)


def moving(search: Search, budget: int) -> Iterator[Program]:
    """Programs that recompute, or compress, for a larger budget, and move away what does not fit then."""
    if search.tier is None:
        return
    room = int(search.tier.bandwidth(search.target) * search.forward_seconds)
    for base in bases(search, budget, room, MOVED):
        if (program := moved(search, base, budget)) is not None:
            yield program
    for wider in {budget + int(room * share) for share in MOVED} if search.format is not None else ():
        for base in compressing(search, wider):
            if (program := moved(search, base, budget)) is not None:
                yield program


def moved(search: Search, base: Program, budget: int) -> Program | None:
    """A program with so much of what it saves moved away that it fits."""
    assert search.tier is not None
    forward, backward, saved, names = search.build(base.schedule, (), base.short)
    known = {new: old for old, new in names.items()}
    scales = saved.keys() - known.keys() - {n.name for n in search.found.values}
    aim = budget
    for _ in range(AIMS):
        away = memory_offload.plan(
            forward, backward, saved, search.found.results, aim, search.target, search.tier, scales
        )
        if away is None:
            return None
        program = run_away(search, base, tuple(replace(a, name=known.get(a.name, a.name)) for a in away))
        if program.peak <= budget:
            return program
        aim -= int((program.peak - budget) * 1.05) + 1
    return None


def run_away(search: Search, base: Program, away: tuple[Away, ...]) -> Program:
    assert search.tier is not None
    forward, backward, saved, names = search.build(base.schedule, away, base.short)
    seconds = memory_offload.elapsed(forward, backward, search.target, search.tier)
    profile = marked(liveness.profile_step(forward, backward, saved), names.values())
    origin = base.origin if base.short else f"{base.origin if base.origin != 'default' else 'no'} recompute"
    return Program(f"{origin}, {search.tier.kind} offload", base.schedule, profile, seconds, away, base.short)


def lowered(search: Search, base: Program, by: Callable[[Search, Program, int], Program | None]) -> Program:
    """The smallest peak that is left of a program if values move away, or are compressed."""
    best, low, high = base, search.found.problem.fixed, base.peak
    for _ in range(AIMS * 2):
        middle = (low + high) // 2
        program = by(search, base, middle)
        if program is None:
            low = middle
        else:
            best, high = program, min(program.peak, middle)
    return best


def marked(profile: Profile, names: Collection[str]) -> Profile:
    """A profile that tells short forms from values that are saved as they are."""
    values = tuple(
        replace(v, kind="compressed") if v.kind == "saved" and v.name in names else v for v in profile.values
    )
    return replace(profile, values=values)
