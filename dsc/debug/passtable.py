"""What each pass did to each graph, in numbers: the rows of ``dsc passes``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from dsc import cost, liveness, ops
from dsc.compilation import Compilation
from dsc.debug import launches
from dsc.debug.capture import TRACED, Region, Session, Stage
from dsc.manager import Remark
from dsc.notes import notes
from dsc.target import Target

LINKED = "link"
"""The name of the last row of a graph: its program."""


@dataclass(frozen=True)
class Row:
    """One graph after one pass.  Bytes, operations and seconds of a step are those of the model of costs."""

    region: int
    graph: str
    name: str
    seconds: float
    """Wall time of the pass itself."""
    nodes_before: int
    nodes: int
    kernels: int
    aten_calls: int
    bytes: int
    flops: float
    peak: int
    """Bytes alive at the worst moment of the graph; of a program, with its pool."""
    modelled: float
    """Seconds that the graph takes on the target."""
    remarks: tuple[Remark, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "remarks": [asdict(r) for r in self.remarks]}


def rows(session: Session) -> list[Row]:
    """A row a pass and graph, in order: of each graph first ``trace``, at the end ``link``."""
    return [row for i, region in enumerate(session.regions) for row in _of_region(i, region, session.target)]


def total(session: Session, every: Sequence[Row]) -> Row | None:
    """The whole step: the programs of all graphs, one after the other; None if nothing was compiled."""
    last = [r for r in every if r.name == LINKED]
    if not last:
        return None
    return Row(
        region=0,
        graph="",
        name="step",
        seconds=sum(r.seconds for r in every),
        nodes_before=sum(r.nodes for r in every if r.name == TRACED and r.graph in ("joint", "inference")),
        nodes=sum(r.nodes for r in last),
        kernels=sum(r.kernels for r in last),
        aten_calls=sum(r.aten_calls for r in last),
        bytes=sum(r.bytes for r in last),
        flops=sum(r.flops for r in last),
        peak=max(map(_peak, session.regions)),
        modelled=sum(r.modelled for r in last),
        remarks=tuple(r for row in every for r in row.remarks),
    )


def aten_calls(gm: GraphModule) -> int:
    """Calls that a program would make for nodes that no group holds."""
    return sum(
        n.op == "call_function"
        and notes(n).group is None
        and ops.info(n).kind not in ("view", "item")
        and isinstance(ops.value(n), (torch.Tensor, tuple, list))
        for n in gm.graph.nodes
    )


def groups(gm: GraphModule) -> int:
    """Kernels that the graph is to become."""
    return len({notes(n).group for n in gm.graph.nodes} - {None})


def _of_region(index: int, region: Region, target: Target) -> list[Row]:
    out: list[Row] = []
    for graph in dict.fromkeys(s.graph for s in region.stages):
        before = 0
        for stage in region.of(graph):
            out.append(_of_stage(index, stage, before, target))
            before = len(stage.gm.graph.nodes)
        out += [_of_program(index, p, out, target) for p in region.programs if p.kind == graph]
    return out


def _of_stage(index: int, stage: Stage, before: int, target: Target) -> Row:
    c = cost.graph_cost(stage.gm, target)
    count = len(stage.gm.graph.nodes)
    return Row(
        region=index,
        graph=stage.graph,
        name=stage.name,
        seconds=stage.seconds,
        nodes_before=before or count,
        nodes=count,
        kernels=groups(stage.gm),
        aten_calls=aten_calls(stage.gm),
        bytes=c.bytes,
        flops=c.flops,
        peak=liveness.profile(stage.gm).peak,
        modelled=c.seconds,
        remarks=stage.report.remarks if stage.report else (),
    )


def _of_program(index: int, program: Compilation, before: Sequence[Row], target: Target) -> Row:
    run = launches.of_program(program, target, index)
    count = len(program.gm.graph.nodes)
    spent = sum(r.seconds for r in before if (r.region, r.graph) == (index, program.kind))
    refused = launches.refused(program)
    return Row(
        region=index,
        graph=program.kind,
        name=LINKED,
        seconds=max(program.seconds - spent, 0.0),
        nodes_before=count,
        nodes=count,
        kernels=int(program.numbers["kernels"]),
        aten_calls=int(program.numbers["aten_calls"]),
        bytes=sum(x.bytes for x in run),
        flops=sum(x.flops for x in run),
        peak=liveness.profile(program.gm, pooled=True, refused=refused).peak,
        modelled=launches.total_seconds(run),
        remarks=tuple(r for name, report in program.reports if name == LINKED for r in report.remarks),
    )


def _peak(region: Region) -> int:
    """Of forward and backward together, with what the one saves for the other."""
    program = {p.kind: p for p in region.programs}
    if not {"forward", "backward"} <= program.keys():
        return max(
            (liveness.profile(p.gm, pooled=True, refused=launches.refused(p)).peak for p in program.values()), default=0
        )
    forward, backward = program["forward"], program["backward"]
    saved = liveness.saved_places(region.of("forward")[0].gm, region.of("backward")[0].gm)
    refused = launches.refused(forward), launches.refused(backward)
    return liveness.profile_step(forward.gm, backward.gm, saved, pooled=True, refused=refused).peak
