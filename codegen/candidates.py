"""Which of several schedules of one kernel is taken, and why the others are not: by a model, or by measurement.

    prune     what the compiler refuses, what cannot start, spills more or moves narrower accesses than it need
    rank      by modelled seconds (``dsc.codegen.roofline``); the default stays unless another wins by ``MARGIN``
    measure   on a GPU: the best ``FEW`` and the default are timed, and the fastest is taken

The schedules are of any type: ``Schedule`` for kernels of the IR, a template's own for a template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

MARGIN = 0.10
"""The modelled gain below which the default stays: models of this kind are off by more than half of that."""
CLEAR = 0.02
"""The measured gain below which the default stays: repeated timings differ by as much."""
FEW = 5
"""Schedules that are measured: of a large product on sm_90 the default, and it persistent, by descriptors, and both."""


class Launch(Protocol):
    """A schedule: a frozen dataclass of plain fields."""

    @property
    def label(self) -> str:
        """As a person reads it: ``2 x 1024, 4 warps``."""
        ...


S = TypeVar("S", bound=Launch)


@dataclass(frozen=True, slots=True)
class Code:
    """What the machine code of a kernel says, in numbers; see ``dsc.codegen.cubin.KernelFacts``."""

    registers: int
    spilled: int
    """Bytes of registers kept in memory, a thread."""
    shared: int
    """Bytes a block."""
    warps: int
    """A block."""
    blocks: int
    """That a multiprocessor holds at once; 0: the kernel cannot start."""
    occupancy: float
    instructions: int
    """In the machine code, each once."""
    widths: Mapping[str, int]
    """Buffer -> bytes of its widest access."""
    passes: Mapping[str, int]
    """Buffer -> lines of the source that load it: above 1, it is read again."""
    tensor: int = 0
    """Instructions of the matrix units."""


@dataclass(frozen=True, slots=True)
class Candidate(Generic[S]):
    """One schedule, and what is known of it."""

    schedule: S
    code: Code | None = None
    """None: the compiler refused it."""
    modelled: float | None = None
    """Seconds of one launch; None where it was ruled out before."""
    measured: float | None = None
    lost: str = ""
    """Why it was not taken; empty for the one that was."""


@dataclass(frozen=True, slots=True)
class Choice(Generic[S]):
    """The candidates of one kernel: the chosen one, then the others by time, then what was ruled out."""

    kernel: str
    target: str
    candidates: tuple[Candidate[S], ...]
    default: S
    how: Literal["modelled", "measured"] = "modelled"

    @property
    def chosen(self) -> S:
        return self.candidates[0].schedule

    @property
    def why(self) -> str:
        """One sentence."""
        first = self.candidates[0]
        if first.schedule == self.default:
            others = len(self.candidates) - 1
            return (
                f"the default: none of {others} others is {self.how} to be clearly faster" if others else "the only one"
            )
        old = next((c for c in self.candidates if c.schedule == self.default), None)
        return f"instead of the default {self.default.label}: {old.lost if old else 'it cannot run'}"


def choose(
    kernel: str,
    target: str,
    default: S,
    compiled: Mapping[S, Code | str],
    seconds: Callable[[S, Code], float],
    margin: float = MARGIN,
) -> Choice[S]:
    """The choice among ``compiled``: schedule -> what its code says, or why the compiler refused it.

    1. A schedule that is refused or cannot start is ruled out; so is one that spills more bytes than the one that spills
       the fewest, and one that moves a buffer in narrower accesses than the default does.
    2. Of the rest the one of the fewest modelled seconds is taken, if it beats the default by ``margin``, or the
       default is ruled out; else the default.
    3. Where everything is ruled out the default is taken: launching it will say what is wrong.
    """
    out: list[Candidate[S]] = []
    usable = {s: c for s, c in compiled.items() if isinstance(c, Code) and c.blocks}
    least = min((c.spilled for c in usable.values()), default=0)
    best = usable[default].widths if default in usable else {}
    for s, c in compiled.items():
        if isinstance(c, str):
            out.append(Candidate(s, lost=c))
        elif not c.blocks:
            out.append(
                Candidate(s, c, lost=f"cannot start: {c.registers} registers, {c.shared} bytes of shared memory")
            )
        elif c.spilled > least:
            out.append(Candidate(s, c, lost=f"spills {c.spilled} bytes a thread, where another spills {least}"))
        elif (name := next((b for b, w in best.items() if c.widths.get(b, w) < w), None)) is not None:
            words = f"{name} in accesses of {c.widths[name]} bytes, where the default has {best[name]}"
            out.append(Candidate(s, c, lost=words))
        else:
            out.append(Candidate(s, c, seconds(s, c)))
    return _ranked(Choice(kernel, target, tuple(out), default), lambda c: c.modelled, margin)


def measure(choice: Choice[S], timer: Callable[[S], float], few: int = FEW, clear: float = CLEAR) -> Choice[S]:
    """The choice after the ``few`` best modelled schedules and the default have been timed, in seconds, by ``timer``.

    One that raises is ruled out.
    """
    alive = sorted((c for c in choice.candidates if c.modelled is not None), key=lambda c: (c.modelled, c.lost != ""))
    wanted = [c.schedule for c in alive[:few]]
    out: list[Candidate[S]] = []
    for c in choice.candidates:
        if c.schedule not in wanted and not (c.schedule == choice.default and c.code is not None and c.code.blocks):
            kept = c.lost if c.modelled is None else f"not measured: modelled {micro(c.modelled)}"
            out.append(replace(c, lost=kept))
            continue
        try:
            out.append(replace(c, measured=timer(c.schedule), lost=""))
        except Exception as why:
            words = str(why).strip().splitlines()
            out.append(replace(c, lost=f"failed when it was measured: {words[0] if words else type(why).__name__}"))
    return _ranked(replace(choice, candidates=tuple(out), how="measured"), lambda c: c.measured, clear)


def _ranked(choice: Choice[S], time: Callable[[Candidate[S]], float | None], margin: float) -> Choice[S]:
    """The chosen one first, and for each of the others the reason that it lost."""
    timed = sorted((c for c in choice.candidates if time(c) is not None), key=lambda c: (time(c), c.schedule.label))
    ruled_out = [c for c in choice.candidates if time(c) is None]
    mine = next((c for c in timed if c.schedule == choice.default), None)
    if not timed:
        first = next(c for c in choice.candidates if c.schedule == choice.default)
        return replace(choice, candidates=(first, *(c for c in ruled_out if c is not first)))
    best = timed[0]
    if mine is not None and _of(time, best) > _of(time, mine) * (1 - margin):
        best = mine
    others = [
        replace(c, lost=_slower(choice.how, _of(time, c), _of(time, best), margin)) for c in timed if c is not best
    ]
    return replace(choice, candidates=(replace(best, lost=""), *others, *ruled_out))


def _of(time: Callable[[Candidate[S]], float | None], c: Candidate[S]) -> float:
    found = time(c)
    return math.inf if found is None else found


def _slower(how: str, mine: float, best: float, margin: float) -> str:
    if mine < best:
        return f"{how} {micro(mine)}, {1 - mine / best:.1%} faster: less than the {margin:.0%} for which the default is left"
    return f"{how} {micro(mine)}, " + (f"{mine / best - 1:.1%} slower" if mine > best * 1.0005 else "no faster")


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def as_data(choice: Choice[Any]) -> dict[str, Any]:
    """As JSON takes it."""
    return asdict(choice)


def from_data(data: Mapping[str, Any], schedule: Callable[..., S]) -> Choice[S]:
    """What ``as_data`` wrote, of schedules that ``schedule`` makes of their fields.

    Raises:
        KeyError, TypeError: it is not that.
    """
    made = [
        Candidate(
            **{**c, "schedule": schedule(**c["schedule"]), "code": Code(**c["code"]) if c["code"] is not None else None}
        )
        for c in data["candidates"]
    ]
    if not made:
        raise TypeError("no candidates")
    known = {f.name: data[f.name] for f in fields(Choice)}
    return Choice(**{**known, "candidates": tuple(made), "default": schedule(**data["default"])})


def short_list(default: S, moves: Sequence[S], most: int = 6) -> tuple[S, ...]:
    """The default first, then ``moves`` without repetitions, ``most`` in all."""
    return tuple(dict.fromkeys([default, *moves]))[:most]
