"""Picking graphs out of a capture: after which pass, of which region."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.debug.capture import Session, Stage
from dsc.errors import BadOption, UnknownPass


@dataclass(frozen=True)
class Picked:
    """One graph after one pass, and as it was before that pass."""

    region: int
    stage: Stage
    before: Stage | None


def pick(
    session: Session, name: str | None = None, graph: str | None = None, region: int | None = None
) -> list[Picked]:
    """The stages that ``name`` left, in order; without a name the last one of every graph.

    Raises:
        UnknownPass: the pass ran on none of the graphs, whichever are asked for.
        BadOption: there is no such graph or region, or the pass did not run on it.
    """
    if region is not None and not 0 <= region < len(session.regions):
        last = len(session.regions) - 1
        raise BadOption("--region", region, f"a number from 0 to {last}" if last >= 0 else "none: nothing was captured")
    regions = [(i, r) for i, r in enumerate(session.regions) if region in (None, i)]
    ran = dict.fromkeys(s.name for _, r in regions for s in r.stages)
    kinds = dict.fromkeys(s.graph for _, r in regions for s in r.stages)
    if graph is not None and graph not in kinds:
        raise BadOption("--graph", graph, one_of(kinds))
    if name is not None and name not in ran:
        raise UnknownPass(name, tuple(ran))
    out = []
    for i, r in regions:
        for kind in dict.fromkeys(s.graph for s in r.stages):
            stages = r.of(kind)
            picked = [
                Picked(i, s, stages[k - 1] if k else None) for k, s in enumerate(stages) if name in (None, s.name)
            ]
            if graph in (None, kind):
                out += picked[-1:] if name is None else picked
    if not out and graph is not None:
        where = dict.fromkeys(s.graph for _, r in regions for s in r.stages if s.name == name)
        raise BadOption("--graph", graph, f"one on which {name} runs: {', '.join(where)}")
    return out


def one_of(names: dict[str, None]) -> str:
    return f"one of {', '.join(names)}" if names else "none: nothing was captured"
