"""A schedule over blocks to what is saved and what the backward runs, operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsc.passes.solve.activations import Problem, just_in_time, needed
from dsc.passes.solve.blocks import Choice
from dsc.passes.solve.chain import Chain
from dsc.passes.solve.rotor import Move


@dataclass(frozen=True, slots=True)
class Schedule:
    saved: tuple[int, ...]
    """Values of the forward that are kept for the backward, inputs left out."""
    script: tuple[int, ...]
    """What the backward runs, in order.  A forward operator in it runs again; a read means the latest result."""


def spell(problem: Problem, chain: Chain, choices: Sequence[Sequence[Choice]], moves: Sequence[Move]) -> Schedule:
    """``choices[k]`` are the options of block ``k`` that the moves name."""
    have: set[int] = set(chain.always)
    saved: set[int] = set(chain.always)
    script: list[int] = []
    going_back = False
    for move in moves:
        block = chain.blocks[move.first]
        if move.kind == "back":
            going_back = True
            script += just_in_time(problem, block.backward, have)
            have -= choices[move.first][move.option].saved | block.once | {block.leaves}
            continue
        targets = {chain.blocks[move.last].enters}
        if not going_back:
            targets |= {v for b in chain.blocks[move.first : move.last] for v in b.once}
        if move.kind == "keep":
            targets = set(choices[move.first][move.option].saved) | (set() if move.alone else {block.leaves})
        targets.discard(-1)
        if going_back:
            script += needed(problem, sorted(targets), have)
        else:
            saved |= targets
        have |= targets
    return from_saved(problem, saved, script)


def from_saved(problem: Problem, saved: set[int], script: Sequence[int] | None = None) -> Schedule:
    """A schedule that keeps ``saved`` and computes all else just in time, unless ``script`` says when."""
    if script is None:
        backward = [o for o, op in enumerate(problem.ops) if not op.forward]
        script = just_in_time(problem, backward, saved)
    made = {v for v in saved if problem.values[v].maker >= 0}
    fresh: set[int] = set()
    used: set[int] = set()
    for o in script:
        op = problem.ops[o]
        used.update(v for v, _ in op.reads if v in made and v not in fresh)
        if op.forward:
            fresh.update(op.makes)
    return Schedule(tuple(sorted(used)), tuple(script))


def illegal(problem: Problem, schedule: Schedule) -> list[int]:
    """Operators that the script runs again though they must not."""
    return [o for o in schedule.script if problem.ops[o].forward and not problem.ops[o].again]
