"""The schedules that the kernels of a captured model could have, compiled and compared on a machine without the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dsc.codegen import triton_plan
from dsc.codegen.alternatives import alternatives, modelled
from dsc.codegen.candidates import Choice
from dsc.codegen.schedule import Schedule
from dsc.compilation import Compilation
from dsc.debug.kernels import Job, Listed, compiled, launches_of
from dsc.errors import CodegenFailed
from dsc.kernels import source
from dsc.target import Target

Choices = Mapping[str, Choice[Schedule]]
"""By the kernels' titles."""


def jobs(kernels: Sequence[Listed], target: Target) -> list[Job]:
    """Every kernel that has several schedules with each of them, for the target."""
    assert target.capability is not None
    major, minor = target.capability
    found = [(k, alternatives(k.kernel, k.schedule, target)) for k in kernels if k.schedule is not None]
    return [(k, s, 10 * major + minor) for k, schedules in found if len(schedules) > 1 for s in schedules]


def choices_of(
    kernels: Sequence[Listed],
    target: Target,
    parallel: int = 2,
    done: Callable[[], None] = lambda: None,
    cache: str | None = None,
    measured: Path | None = None,
) -> Choices:
    """The choice of every Triton kernel that has one; ``done`` is called after each of the ``jobs``.

    ``measured`` is a folder with choices that were measured on such a GPU (see ``dsc.codegen.tune``), which are taken
    where it has them.  ``cache`` is as for ``dsc.debug.kernels.facts_of``.
    """
    from dsc.codegen.tune import kept, key

    todo = jobs(kernels, target)
    codes = [
        str(facts) if isinstance(facts, CodegenFailed) else facts.code
        for facts in compiled(todo, parallel, done, cache)
    ]
    out = {}
    for k in kernels:
        mine = {s: code for (other, s, _), code in zip(todo, codes) if other is k}
        if not mine or k.schedule is None:
            continue
        known = kept(measured, key(k.kernel, k.schedule, target)) if measured is not None else None
        out[k.title] = known or modelled(k.kernel, k.schedule, target, mine)
    return out


def scheduled(kernels: Sequence[Listed], choices: Choices) -> list[Listed]:
    """The kernels with the schedules that were chosen."""
    out: list[Listed] = []
    gone: set[str] = set()
    for k in kernels:
        choice = choices.get(k.title)
        if k.title in gone:
            continue
        if choice is None or choice.chosen == k.schedule:
            out.append(k)
        elif choice.chosen.KB:  # also in other pieces than before
            out += launches_of(k, triton_plan.of_product(k.kernel, choice.chosen))
            gone.add(f"{k.title}_join")
        else:
            out.append(replace(k, schedule=choice.chosen, source=triton_plan.source(k.kernel, choice.chosen)))
    return out


def retuned(made: Compilation, kernels: Sequence[Listed]) -> Compilation:
    """A compilation of which ``kernels``, as ``scheduled`` gives them, have their schedules."""
    program = made.program
    known = {k.name: k.schedule for k in kernels if k.graph == made.kind and k.schedule is not None}
    code = source(program.emitter, program.kernels, program.sequences, program.device.type == "cuda", known)
    return replace(made, program=replace(program, schedules=known, code=code))
