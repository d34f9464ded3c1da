"""The kernels and ATen calls of a captured model, each with what it costs on the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from dsc import cost, ops, text
from dsc.compilation import Compilation
from dsc.debug.capture import Session
from dsc.steps import Step, steps
from dsc.target import Target

Bound = Literal["compute", "memory", "launch"]


@dataclass(frozen=True)
class Launch:
    """One kernel, or one call of ATen."""

    region: int
    graph: str
    name: str
    """Of the kernel as it was emitted, or of the node that ATen computes."""
    nodes: tuple[Node, ...]
    group: str | None
    flops: float
    bytes: int
    arithmetic: float
    """Seconds that its operations take at the rate that good kernels reach, on the target."""
    memory: float
    """Seconds that its bytes take."""
    seconds: float
    """The slower of the two, and what it takes to launch."""

    @property
    def bound(self) -> Bound:
        """What it waits for, by the roofline."""
        if self.seconds - max(self.arithmetic, self.memory) > max(self.arithmetic, self.memory):
            return "launch"
        return "compute" if self.arithmetic > self.memory else "memory"

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def balance(self) -> float:
        """Operations a byte at which its arithmetic takes as long as its traffic: the ridge of the roofline."""
        return self.intensity * self.memory / self.arithmetic if self.arithmetic else 0.0

    @property
    def ops(self) -> str:
        """``add.Tensor, gelu``: what it computes, each operator once."""
        return ", ".join(dict.fromkeys(text.op_name(n) for n in self.nodes if ops.info(n).kind not in ("item", "view")))


def of_session(session: Session) -> list[Launch]:
    """All of a step, in the order in which they run."""
    return [
        launch
        for i, region in enumerate(session.regions)
        for program in region.programs
        for launch in of_program(program, session.target, i)
    ]


def of_program(program: Compilation, target: Target, region: int = 0) -> list[Launch]:
    """Views and items are no launches: they cost nothing."""
    order = steps(program.gm, refused(program))
    found = [_launch(program, s, target, region) for s in order if s.group is not None or _is_call(s.node)]
    return [x for x in found if x.seconds > 0]


def refused(program: Compilation) -> frozenset[str]:
    """Groups that became no kernel: ATen runs their nodes one by one."""
    return frozenset(r.node for name, report in program.reports if name == "link" for r in report.remarks)


def _is_call(node: Node) -> bool:
    return node.op == "call_function" and not ops.is_view(node) and not ops.is_split(node)


def _launch(program: Compilation, step: Step, target: Target, region: int) -> Launch:
    nodes = step.nodes
    flops = [cost.flops(n) for n in nodes]
    arithmetic = sum(f / cost.rate(n, target) for n, f in zip(nodes, flops) if f)
    if step.group is not None:
        nbytes, seconds = cost.bytes_of_group(nodes), cost.seconds_of_group(nodes, target)
    else:
        nbytes, seconds = cost.bytes_moved(step.node), cost.seconds(step.node, target)
    memory = nbytes / (target.bandwidth * cost.BANDWIDTH_EFFICIENCY)
    bound = program.bound.get(step.group or "")
    name = bound.kernel.name if bound is not None else step.group or step.node.name
    return Launch(region, program.kind, name, nodes, step.group, sum(flops), nbytes, arithmetic, memory, seconds)


def total_seconds(launches: Sequence[Launch]) -> float:
    """Of one step, by the model of costs."""
    return sum(x.seconds for x in launches)
