"""Cuts failing programs down: fewer programs, lines, results and worlds, then simpler inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dsc.debug.fuzz.observe import runs
from dsc.debug.fuzz.program import Line, Program, pruned

Fails = Callable[[Program], bool]


def shrink(p: Program, fails: Fails, attempts: int = 80) -> Program:
    """The smallest program found that eager runs and that still fails, in so many attempts."""
    progress = True
    while progress and attempts > 0:
        progress = False
        for smaller in simpler(p):
            if attempts <= 0:
                break
            if not smaller.lines or not runs(smaller):
                continue
            attempts -= 1
            if fails(smaller):
                p, progress = smaller, True
                break
    return p


def shrink_batch(
    programs: Sequence[Program], fails: Callable[[Sequence[Program]], bool], attempts: int = 12
) -> list[Program]:
    """Fewer programs that fail together, where none fails alone: halves first, then one by one."""
    kept, chunk = [*programs], len(programs) // 2
    while chunk >= 1 and attempts > 0:
        for start in range(0, len(kept), chunk):
            fewer = kept[:start] + kept[start + chunk :]
            attempts -= 1
            if fewer and fails(fewer):
                kept = fewer
                break
            if attempts <= 0:
                break
        else:
            chunk //= 2
    return kept


def simpler(p: Program) -> Iterator[Program]:
    """Programs with less in them, the largest cuts first."""
    for at in range(len(p.lines) - 1):
        yield truncated(p, at + 1)
    for at in reversed(range(len(p.lines))):
        yield from without(p, at)
    for o in p.outputs:
        yield pruned(replace(p, outputs=tuple(x for x in p.outputs if x != o)))
    if p.half:
        yield replace(p, half=False)
    if len(p.worlds) > 1:
        yield fixed(p)
    if len(p.worlds) > 2:
        for i in range(1, len(p.worlds)):
            yield replace(p, worlds=(p.worlds[0], p.worlds[i]))
    for i, x in enumerate(p.inputs):
        for easier in (
            replace(x, layout="plain"),
            replace(x, edges=False),
            replace(x, grad=False),
            replace(x, dtype="float32") if x.dtype in ("float64", "float16", "bfloat16") else x,
        ):
            if easier != x:
                yield replace(p, inputs=(*p.inputs[:i], easier, *p.inputs[i + 1 :]))


def truncated(p: Program, lines: int) -> Program:
    """The first lines alone."""
    size = len(p.inputs) + lines
    return pruned(replace(p, lines=p.lines[:lines], outputs=tuple(o for o in p.outputs if o < size)))


def only(p: Program, value: int) -> Program:
    """The lines that a value is made of; writes that nothing reads the result of go too."""
    for at in reversed(range(len(p.lines))):
        here = len(p.inputs) + at
        if here != value and here not in {o for x in p.lines for o in x.operands}:
            below = here < value
            p = replace(
                p,
                lines=tuple(
                    Line(x.text, tuple(o - (o > here) for o in x.operands)) for i, x in enumerate(p.lines) if i != at
                ),
                outputs=(value - below,),
            )
            value -= below
    return pruned(p)


def fixed(p: Program) -> Program:
    """In its first world alone, with sizes that are no names."""
    inputs = tuple(
        replace(x, shape=tuple(n if isinstance(n, int) else p.worlds[0][n] for n in x.shape)) for x in p.inputs
    )
    return replace(p, inputs=inputs, worlds=({},), marked=False)


def without(p: Program, at: int) -> list[Program]:
    """The program without a line, its readers reading one of its operands instead."""
    gone = len(p.inputs) + at

    def moved(o: int, instead: int) -> int:
        o = instead if o == gone else o
        return o - 1 if o > gone else o

    out = []
    for instead in dict.fromkeys(p.lines[at].operands):
        lines = tuple(
            Line(x.text, tuple(moved(o, instead) for o in x.operands)) for i, x in enumerate(p.lines) if i != at
        )
        outputs = tuple(sorted({moved(o, instead) for o in p.outputs if o != gone}))
        if lines:
            out.append(pruned(replace(p, lines=lines, outputs=outputs)))
    return out
