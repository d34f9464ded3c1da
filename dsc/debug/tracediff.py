"""What changed between two recorded compilations: settings, numbers, and graphs after each pass.

Times and versions are shown, but two traces that differ only in them are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from dsc.debug import diff
from dsc.debug.trace import Trace, TracedProgram, TracedRegion, TracedStage

VERSIONS = ("dsc", "torch", "triton", "python", "system")
Side = Literal["both", "a", "b"]


@dataclass(frozen=True)
class Value:
    """One thing with a value on each side; None where a side has none."""

    name: str
    a: Any
    b: Any

    @property
    def same(self) -> bool:
        return bool(self.a == self.b)


@dataclass(frozen=True)
class StageDiff:
    """One graph at one moment, on both sides or on one."""

    graph: str
    name: str
    side: Side
    lines: tuple[diff.Line, ...] = ()

    @property
    def same(self) -> bool:
        return self.side == "both" and not self.lines

    def count(self, kind: diff.Kind) -> int:
        return sum(line.kind == kind for line in self.lines)


@dataclass(frozen=True)
class RegionDiff:
    """One Dynamo graph: the n-th of each trace."""

    index: int
    function: str
    side: Side
    settings: tuple[Value, ...] = ()
    """Target, options, inputs, guards, what stays with PyTorch: those that differ."""
    numbers: tuple[Value, ...] = ()
    """``forward kernels`` and the like: all."""
    seconds: tuple[Value, ...] = ()
    stages: tuple[StageDiff, ...] = ()

    @property
    def same(self) -> bool:
        parts = (self.settings, [n for n in self.numbers if not n.same], [s for s in self.stages if not s.same])
        return self.side == "both" and not any(parts)


@dataclass(frozen=True)
class TraceDiff:
    a: str
    b: str
    versions: tuple[Value, ...]
    """Those that differ."""
    regions: tuple[RegionDiff, ...]

    @property
    def same(self) -> bool:
        return all(r.same for r in self.regions)


def compare(a: Trace, b: Trace, context: int = 3) -> TraceDiff:
    """The regions in pairs, in the order in which they were compiled."""
    versions = tuple(v for n in VERSIONS if not (v := Value(n, a.head.get(n), b.head.get(n))).same)
    pairs = enumerate(zip_longest(a.regions, b.regions))
    return TraceDiff(a.path, b.path, versions, tuple(region(i, x, y, context) for i, (x, y) in pairs))


def region(index: int, a: TracedRegion | None, b: TracedRegion | None, context: int) -> RegionDiff:
    if a is None or b is None:
        here = a or b
        assert here is not None, "one side has it"
        return RegionDiff(index, here.function, "a" if b is None else "b")
    settings = tuple(v for v in values(settings_of(a), settings_of(b)) if not v.same)
    numbers = tuple(values(numbers_of(a.programs), numbers_of(b.programs)))
    seconds = tuple(values(seconds_of(a), seconds_of(b)))
    return RegionDiff(index, a.function, "both", settings, numbers, seconds, tuple(stages(a, b, context)))


def values(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Value]:
    return [Value(name, a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))]


def settings_of(r: TracedRegion) -> dict[str, Any]:
    listed: dict[str, Any] = {f"input {i}": x for i, x in enumerate(r.inputs)}
    listed |= {f"option {k}": v for k, v in r.options.items()}
    listed |= {f"{graph} stays with PyTorch": why for graph, why in r.left}
    named = {"function": r.function.split(" (")[0], "target": r.target, "failed": "; ".join(r.failures)}
    return listed | {k: v for k, v in named.items() if v}


def numbers_of(programs: Sequence[TracedProgram]) -> dict[str, float]:
    """By graph and name, and the length of the code, in lines."""
    out: dict[str, float] = {}
    for p in programs:
        out |= {f"{p.graph} {k.replace('_', ' ')}": v for k, v in p.numbers.items()}
        out[f"{p.graph} lines of code"] = len(p.code.splitlines())
    return out


def seconds_of(r: TracedRegion) -> dict[str, float]:
    """By graph and pass; ``all`` is tracing excluded, linking and building included."""
    out = {f"{key[0]} {key[1]}": s.seconds for key, s in keyed(r).items() if s.seconds}
    return {**out, "all": r.seconds}


def keyed(r: TracedRegion) -> dict[tuple[str, str, int], TracedStage]:
    """Stages by graph, pass, and the number of times that the pass had run there before."""
    out: dict[tuple[str, str, int], TracedStage] = {}
    for s in r.stages:
        count = sum(key[:2] == (s.graph, s.name) for key in out)
        out[s.graph, s.name, count] = s
    return out


def stages(a: TracedRegion, b: TracedRegion, context: int) -> list[StageDiff]:
    left, right = keyed(a), keyed(b)
    out: list[StageDiff] = []
    for key in dict.fromkeys((*left, *right)):
        x, y = left.get(key), right.get(key)
        if x is None or y is None:
            out.append(StageDiff(key[0], key[1], "a" if y is None else "b"))
            continue
        lines = diff.lines(x.text.splitlines(), y.text.splitlines(), context) if x.text != y.text else ()
        out.append(StageDiff(key[0], key[1], "both", tuple(lines)))
    return out
