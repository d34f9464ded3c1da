"""Why one node is as it is: kept or computed again, in which kernel and with what, in which precision, at what cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsc import cost, liveness, ops, steps, text
from dsc.debug import launches, origin, units
from dsc.debug.capture import Region, Session, Stage
from dsc.debug.launches import Launch
from dsc.debug.origin import Origin
from dsc.errors import UnknownNode
from dsc.manager import Remark
from dsc.notes import notes
from dsc.options import Options
from dsc.target import Target

SHOWN = 8
"""Names that a sentence lists before it says how many more there are."""
WORDS = {
    "matmul": "matrix products are left to the library that ATen calls",
    "convolution": "convolutions are left to the library that ATen calls",
    "attention": "attention is left to ATen's own fused kernels",
    "random op": "it draws random numbers, in eager's order",
    "opaque op": "there is no rule to make a kernel of it",
}
"""Why ATen computes a call, by the unit that does its arithmetic or by the reason in short."""
LOW = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing to know about a node."""

    topic: str
    """saved, recomputed, offloaded, kept, fused, apart, aten, precision, sparsity, cost, or the name of a pass."""
    text: str


@dataclass(frozen=True)
class Explanation:
    """A node as one graph has it."""

    region: int
    graph: str
    line: str
    """In canonical text."""
    origin: Origin
    facts: tuple[Fact, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "region": self.region,
            "graph": self.graph,
            "line": self.line,
            "module": self.origin.module,
            "stack": [asdict(f) for f in self.origin.frames],
            "facts": [asdict(f) for f in self.facts],
        }


def explain(session: Session, name: str) -> list[Explanation]:
    """The node ``name`` in every program that has it, else in the last graph that did.

    Raises:
        UnknownNode: no graph ever had it.
    """
    every = launches.of_session(session)
    out = []
    for i, region in enumerate(session.regions):
        found = [e for kind in kinds(region) for e in _in_program(session, every, i, region, kind, name)]
        out += found or list(_in_stages(i, region, name))
    if not out:
        known = {n.name: None for r in session.regions for s in r.stages for n in s.gm.graph.nodes}
        raise UnknownNode(name, tuple(known))
    return out


def kinds(region: Region) -> list[str]:
    """The graphs that become programs."""
    return [k for k in dict.fromkeys(s.graph for s in region.stages) if k != "joint"]


def _in_program(
    session: Session, every: Sequence[Launch], index: int, region: Region, kind: str, name: str
) -> Iterator[Explanation]:
    stages = region.of(kind)
    node = find(stages[-1].gm, name)
    if node is None:
        return
    run = [x for x in every if (x.region, x.graph) == (index, kind)]
    facts = [
        *keeping(region, kind, node),
        *fusing(stages, run, node),
        *precision(node, session.options, launch_of(run, node)),
        *other_remarks(region, kind, node),
        *costing(every, launch_of(run, node), node, session.target),
    ]
    yield Explanation(index, kind, text.line(node), origin.of(node), tuple(facts))


def _in_stages(index: int, region: Region, name: str) -> Iterator[Explanation]:
    """The last stage that had the node, and what the pass that took it out says."""
    for kind in reversed(dict.fromkeys(s.graph for s in region.stages)):
        stages = region.of(kind)
        had = [i for i, s in enumerate(stages) if find(s.gm, name) is not None]
        if not had:
            continue
        node = find(stages[had[-1]].gm, name)
        assert node is not None
        facts = list(keeping(region, kind, node))
        if had[-1] + 1 < len(stages):
            after = stages[had[-1] + 1]
            said = [r.why for r in remarks_on(after, name)]
            facts.append(
                Fact(after.name, f"took it out{': ' + '; '.join(said) if said else ', since nothing reads it'}")
            )
        elif kind == "joint":
            facts.append(Fact("split", "neither the forward nor the backward graph needs it under this name"))
        yield Explanation(index, kind, text.line(node), origin.of(node), tuple(facts))
        return


def find(gm: GraphModule, name: str) -> Node | None:
    return next((n for n in gm.graph.nodes if n.name == name), None)


def remarks_on(stage: Stage, name: str) -> list[Remark]:
    return [r for r in (stage.report.remarks if stage.report else ()) if r.node == name]


# --- between forward and backward


def keeping(region: Region, kind: str, node: Node) -> Iterator[Fact]:
    """Whether the value crosses to the backward, and why."""
    joint = region.of("joint")
    if not joint or not isinstance(ops.value(node), torch.Tensor) or node.op == "output":
        return
    home = find(joint[-1].gm, node.name)
    known = next((find(s.gm, node.name) for s in joint if find(s.gm, node.name) is not None), None)
    said = [r for s in joint for r in remarks_on(s, node.name) if s.applied and "keep" in s.applied.gives]
    size = units.nbytes(liveness.nbytes(node))
    if said:
        topics = {"save": "saved", "recompute": "recomputed", "offload": "offloaded", "compress": "compressed"}
        decided = notes(home).keep if home is not None else None
        for r in said:
            topic = topics.get(decided or "", "recomputed" if r.verdict == "did" else "saved")
            yield Fact(topic, r.why.replace(" saved: ", ": "))
    elif node.op == "placeholder" and kind == "backward":
        source = "an input of the model or a weight, which lives anyway" if node.name.startswith("primals") else None
        if source or not ops.is_tangent(node):
            yield Fact("saved", f"{size}: {source or 'the backward reads it'}")
    elif kind == "backward" and known is None and (first := computed_again(region, node)) is not None:
        yield Fact("recomputed", f"{first.name} of the forward, computed again here: dsc explain {first.name} says why")
    elif kind == "forward" and node.op == "call_function":
        yield Fact("kept", "no: the backward does not read it" if not _crosses(region, node.name) else f"{size} saved")


def computed_again(region: Region, node: Node) -> Node | None:
    """The forward node that a node of the backward repeats."""
    if node.meta.get("autograd_backward") and "fwd_nn_module_stack" in node.meta:
        return None  # a gradient
    first = region.of("joint")[0].gm
    key = (node.target, node.meta.get("seq_nr"), text.type_of(node))
    alike = [n for n in first.graph.nodes if (n.target, n.meta.get("seq_nr"), text.type_of(n)) == key]
    return alike[0] if alike and alike[0].name != node.name else None


def _crosses(region: Region, name: str) -> bool:
    backward = region.of("backward")
    return bool(backward) and any(n.name == name for n in backward[0].gm.graph.find_nodes(op="placeholder"))


# --- kernels


def fusing(stages: Sequence[Stage], run: Sequence[Launch], node: Node) -> Iterator[Fact]:
    """With what the node shares a kernel, or why it has none; what it trades with others through memory."""
    if node.op != "call_function":
        return
    launch = launch_of(run, node)
    if ops.is_view(node) or ops.is_split(node):
        yield Fact(
            "fused", f"a view of {steps.storage_of(node).name}: no call and no bytes, read in place by its readers"
        )
        return
    if launch is not None and launch.group is not None:
        others = [n.name for n in launch.nodes if n.name != node.name and ops.info(n).kind != "item"]
        together = f"with {listed(others)}" if others else "alone"
        said = [r.why for s in stages for n in launch.nodes for r in remarks_on(s, n.name) if r.verdict == "did"]
        detail = "".join(f": {w}" for w in said[-1:])
        yield Fact("fused", f"kernel {launch.name} {together}{detail}")
    else:
        yield Fact("aten", why_aten(stages, node))
    for r in (r for s in stages for r in remarks_on(s, node.name) if "through memory" in r.why):
        yield Fact("apart", r.why)
    if launch is not None:
        yield from neighbours(stages, run, launch, node)


def why_aten(stages: Sequence[Stage], node: Node) -> str:
    """Why no kernel of ours computes the node."""
    reason = ops.why_not_fused(node)
    if reason is not None:
        return WORDS.get(cost.unit(node)) or WORDS.get(reason) or reason
    said = [r.why for s in stages for r in remarks_on(s, node.name) if r.verdict == "skipped"]
    return said[-1] if said else "no pass put it into a kernel"


def neighbours(stages: Sequence[Stage], run: Sequence[Launch], launch: Launch, node: Node) -> Iterator[Fact]:
    """ATen on either side, which ends every kernel."""
    if launch.group is None:
        return
    before = {m for a in ops.tensor_operands(node) if (m := steps.storage_of(a)).op == "call_function"}
    after = {u for u in readers(node) if u.op == "call_function"}
    for word, nodes in (("reads", before), ("is read by", after)):
        aten = [n for n in sorted(nodes, key=lambda n: n.name) if (x := launch_of(run, n)) and x.group is None]
        if aten:
            kind = dict.fromkeys(why_aten(stages, n) for n in aten)
            yield Fact("apart", f"it {word} {listed([n.name for n in aten])}, which ATen computes: {'; '.join(kind)}")


def readers(node: Node) -> Iterator[Node]:
    """Nodes that read the value, through views."""
    for user in node.users:
        if ops.is_view(user) or ops.is_split(user):
            yield from readers(user)
        else:
            yield user


def launch_of(run: Sequence[Launch], node: Node) -> Launch | None:
    """The kernel or call that computes a node; of one of several results, that of all."""
    maker = ops.operand(node, 0) if node.op == "call_function" and ops.info(node).kind == "item" else node
    return next((x for x in run if any(n.name in (node.name, maker.name) for n in x.nodes)), None)


# --- numbers


def precision(node: Node, options: Options, launch: Launch | None) -> Iterator[Fact]:
    """Dtypes in and out, and where values are rounded."""
    if node.op != "call_function" or not isinstance(ops.value(node), (torch.Tensor, tuple, list)):
        return
    values = ops.value(node)
    made = [v for v in (values if isinstance(values, (tuple, list)) else [values]) if isinstance(v, torch.Tensor)]
    if not made:
        return
    read = dict.fromkeys(text.SHORT.get(ops.tensor(a).dtype, "?") for a in ops.tensor_operands(node))
    given = dict.fromkeys(text.SHORT.get(v.dtype, "?") for v in made)
    words = f"{'/'.join(given)} from {'/'.join(read)}" if read else "/".join(given)
    decided = notes(node).precision
    words += f", as decided: {decided}" if decided else ", as in eager: no pass changed it"
    if launch is not None and launch.group is not None and {v.dtype for v in made} & LOW:
        words += "; computed in f32 inside the kernel and rounded " + (
            "where eager rounds" if options.numerics == "eager" else "where it is stored or cast"
        )
    yield Fact("precision", words)
    yield Fact("sparsity", notes(node).sparsity or "dense: no pass decided otherwise")


def other_remarks(region: Region, kind: str, node: Node) -> Iterator[Fact]:
    """What passes that have no topic of their own said of it."""
    for stage in [*region.of("joint"), *region.of(kind)]:
        if stage.applied is None or stage.applied.gives & {"keep", "group"}:
            continue
        yield from (Fact(stage.name, r.why) for r in remarks_on(stage, node.name))


def costing(every: Sequence[Launch], launch: Launch | None, node: Node, target: Target) -> Iterator[Fact]:
    """Predicted time against the roofline."""
    if launch is None or (ops.info(node).kind == "item" and launch.group is None and node not in launch.nodes):
        return
    whole = launches.total_seconds(every)
    what = f"kernel {launch.name}" if launch.group is not None else "the call"
    yield Fact("cost", f"{what}: {cost_text(launch, target)}, {units.percent(launch.seconds, whole)} of the step")


def cost_text(x: Launch, target: Target) -> str:
    """Time, bytes and operations, and what the launch waits for: memory below the balance of the target, else arithmetic."""
    times = f"memory {units.seconds(x.memory)}, arithmetic {units.seconds(x.arithmetic)}"
    balance = f" of {x.balance:.3g} that balance" if x.balance else ""
    return (
        f"{units.seconds(x.seconds)} on {target.name}, {x.bound}-bound ({times}): {units.nbytes(x.bytes)} and "
        f"{units.flops(x.flops)} FLOP, {x.intensity:.3g} FLOP a byte{balance}"
    )


def listed(names: Sequence[str]) -> str:
    """``a, b and 3 more``."""
    if len(names) <= SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more"
