"""Where a step spends its time and bytes, what it saves for the backward, and what stays with ATen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsc import liveness, ops, recordable, text
from dsc.debug import explain, launches, origin
from dsc.debug.capture import Region, Session
from dsc.debug.launches import Bound, Launch
from dsc.debug.origin import Origin


@dataclass(frozen=True)
class Alike:
    """Launches of one kernel, or calls of one operator on equal shapes, in one graph."""

    name: str
    region: int
    graph: str
    node: str
    """The first that it computes."""
    count: int
    seconds: float
    bytes: int
    flops: float
    bound: Bound
    origin: Origin


@dataclass(frozen=True)
class Saved:
    """A value that lives from the forward to the backward."""

    region: int
    node: str
    type: str
    bytes: int
    computed: bool
    """False: an input or a weight, which lives anyway."""
    why: str
    origin: Origin


@dataclass(frozen=True)
class Fallback:
    """Calls of ATen that one reason explains."""

    op: str
    why: str
    count: int
    seconds: float
    bytes: int


def alike(every: Sequence[Launch]) -> list[Alike]:
    """Launches that are the same work, together; in the order of the program."""
    found: dict[tuple[object, ...], list[Launch]] = {}
    for x in every:
        work = x.name if x.group is not None else title(x)
        found.setdefault((x.region, x.graph, x.group is None, work), []).append(x)
    return [_together(xs) for xs in found.values()]


def title(x: Launch) -> str:
    """``addmm f32[1024,384]``; of several results the type of the first."""
    node = x.nodes[0]
    results = ops.value(node)
    first = results[0] if isinstance(results, (tuple, list)) and results else results
    return f"{text.op_name(node)} {short_type(first)}"


def short_type(value: object) -> str:
    """Without strides and device."""
    return text.type_text(value).partition("@")[0].partition("{")[0]


def _together(xs: Sequence[Launch]) -> Alike:
    first = xs[0]
    computed = next((n for n in first.nodes if ops.info(n).kind not in ("item", "view")), first.nodes[0])
    return Alike(
        name=first.name if first.group is not None else title(first),
        region=first.region,
        graph=first.graph,
        node=computed.name,
        count=len(xs),
        seconds=sum(x.seconds for x in xs),
        bytes=sum(x.bytes for x in xs),
        flops=sum(x.flops for x in xs),
        bound=first.bound,
        origin=origin.of(computed),
    )


def top(every: Sequence[Alike], key: Callable[[Alike], float], count: int) -> list[Alike]:
    return sorted(every, key=key, reverse=True)[:count]


def saved(session: Session) -> list[Saved]:
    """What the backward reads of the forward, the largest first."""
    out = [s for i, region in enumerate(session.regions) for s in _saved(i, region)]
    return sorted(out, key=lambda s: -s.bytes)


def _saved(index: int, region: Region) -> list[Saved]:
    forward, backward = region.of("forward"), region.of("backward")
    if not forward or not backward:
        return []
    places = liveness.saved_places(forward[0].gm, backward[0].gm)
    out = []
    for name in places:
        node = explain.find(forward[0].gm, name)
        if node is None or not hasattr(ops.value(node), "numel"):
            continue
        said = [
            r.why
            for s in region.of("joint")
            for r in explain.remarks_on(s, name)
            if s.applied and "keep" in s.applied.gives
        ]
        computed = node.op == "call_function"
        why = said[-1].partition("saved: ")[2] or said[-1] if said else "the backward reads it"
        size = liveness.nbytes(node)
        out.append(
            Saved(
                index,
                name,
                short_type(ops.value(node)),
                size,
                computed,
                why if computed else "lives anyway",
                origin.of(node),
            )
        )
    return out


def fallbacks(session: Session, every: Sequence[Launch]) -> list[Fallback]:
    """Calls of ATen by operator and reason, those that take longest first."""
    found: dict[tuple[str, str], list[Launch]] = {}
    for x in every:
        if x.group is not None:
            continue
        why = explain.why_aten(session.regions[x.region].of(x.graph), x.nodes[0])
        found.setdefault((text.op_name(x.nodes[0]), why), []).append(x)
    out = [
        Fallback(op, why, len(xs), launches.total_seconds(xs), sum(x.bytes for x in xs))
        for (op, why), xs in found.items()
    ]
    return sorted(out, key=lambda f: -f.seconds)


def refused(session: Session) -> list[tuple[str, str]]:
    """Groups that fuse made and that no kernel can compute, with the reason."""
    return [
        (f"{r.node} of {p.kind}", r.why)
        for region in session.regions
        for p in region.programs
        for name, report in p.reports
        if name == "link"
        for r in report.remarks
    ]


def unrecordable(session: Session) -> list[tuple[str, tuple[str, ...]]]:
    """For a GPU: each program, and why its launches cannot be recorded and replayed (``dsc.recordable``)."""
    if session.target.kind != "cuda":
        return []
    programs = [(i, made) for i, region in enumerate(session.regions) for made in region.programs]
    several = len(session.regions) > 1
    return [
        (f"{made.kind} of graph {i}" if several else made.kind, recordable.refusals(made.gm, "cuda"))
        for i, made in programs
    ]
