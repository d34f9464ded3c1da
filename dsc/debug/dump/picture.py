"""A graph as plain data to draw: boxes, wires, the module and kernel of each box, and what was decided about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Node

from dsc import cost, ops, text
from dsc.blame import Frame
from dsc.debug import launches, origin
from dsc.debug.capture import Region, Session, Stage
from dsc.debug.dump import inputs
from dsc.notes import notes
from dsc.target import Target
from dsc.torch_shim import optimization_hint

Decision = Literal["kernel", "aten", "open", "view", "input", "parameter", "result"]
"""``open``: no pass has decided yet who computes it."""


@dataclass(frozen=True, slots=True)
class Box:
    """One node, or ``count`` nodes of repeated layers that look alike."""

    id: str
    op: str
    title: str
    type: str
    text: str
    """The node's line of canonical text."""
    module: tuple[str, ...]
    decision: Decision
    kernel: str = ""
    keep: str = ""
    """save, recompute, ...: what the recompute pass decided; empty if nothing."""
    result: str = ""
    """What it stands for among the graph's results; empty if it is none."""
    line: Frame | None = None
    flops: float = 0.0
    bytes: int = 0
    seconds: float = 0.0
    made: int = 0
    """Bytes of its results."""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Wire:
    """A value on its way from the box that makes it to one that reads it."""

    source: str
    target: str
    type: str
    bytes: int
    inside: bool = False
    """It never leaves a kernel's registers."""


@dataclass(frozen=True)
class Picture:
    graph: str
    stage: str
    boxes: tuple[Box, ...]
    """In the order of the graph."""
    wires: tuple[Wire, ...]
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Group -> the name of its kernel."""
    layers: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    """Module path -> what it stands for, such as ``blocks.0 … blocks.11``, where repeated layers are drawn once."""


def of(session: Session, region: Region, stage: Stage) -> Picture:
    """One stage, with costs on the session's target."""
    graph = stage.gm.graph
    kernels, refused = groups_of(region, stage)
    fused = any(notes(n).group for n in graph.nodes)
    names = inputs.names(region.dynamo, region.inputs, session.model.module)
    parameters = {name for name, _ in session.model.module.named_parameters()}
    modules = places(list(graph.nodes), names, stage.graph == "joint")
    boxes: list[Box] = []
    wires: list[Wire] = []
    for n in graph.nodes:
        if n.op == "output":
            for box, wire in _results(n, names, modules):
                boxes.append(box)
                wires.append(wire)
            continue
        meaning = inputs.meaning(n, names) if n.op == "placeholder" else ""
        boxes.append(_box(n, session.target, meaning, meaning in parameters, modules[n], refused, fused))
        for a in n.all_input_nodes:
            inside = notes(a).group is not None and notes(a).group == notes(n).group and notes(n).group not in refused
            wires.append(Wire(a.name, n.name, text.type_of(a), nbytes(a), inside))
    return Picture(stage.graph, stage.name, tuple(boxes), tuple(wires), kernels)


def groups_of(region: Region, stage: Stage) -> tuple[dict[str, str], frozenset[str]]:
    """Group -> name of its kernel, and the groups that no kernel computes after all."""
    for program in region.programs:
        if program.kind == stage.graph:
            return {g: b.kernel.name for g, b in program.bound.items()}, launches.refused(program)
    return {}, frozenset()


def _box(
    n: Node,
    target: Target,
    meaning: str,
    is_parameter: bool,
    module: tuple[str, ...],
    refused: frozenset[str],
    fused: bool,
) -> Box:
    found = notes(n)
    kernel = found.group if found.group is not None and found.group not in refused else ""
    decision: Decision
    if n.op in ("placeholder", "get_attr"):
        decision = "parameter" if is_parameter else "input"
    elif kernel:
        decision = "kernel"
    elif ops.is_view(n) or ops.is_split(n) or ops.info(n).kind == "item":
        decision = "view"
    else:
        decision = "aten" if fused else "open"
    op = n.op if n.op in ("placeholder", "get_attr") else text.op_name(n)
    return Box(
        id=n.name,
        op=op,
        title=_short(meaning, module) or (n.name if n.op == "placeholder" else op),
        type=text.type_of(n),
        text=text.line(n),
        module=module,
        decision=decision,
        kernel=kernel,
        keep=str(found.keep or ""),
        line=origin.of(n).frame,
        flops=cost.flops(n),
        bytes=cost.bytes_moved(n),
        seconds=cost.seconds(n, target),
        made=nbytes(n),
    )


def _short(meaning: str, module: tuple[str, ...]) -> str:
    """A parameter without the module that it is drawn in."""
    return meaning.removeprefix(".".join(p for p in module if p not in DIRECTIONS) + ".")


def _results(output: Node, names: Mapping[int, str], modules: Mapping[Node, tuple[str, ...]]) -> list[tuple[Box, Wire]]:
    """A box for each result that the caller gets.  What is saved for the backward shows by its mark alone."""
    results = output.args[0]
    results = results if isinstance(results, (list, tuple)) else [results]
    described = output.meta.get("desc")
    described = described if isinstance(described, (list, tuple)) else ()
    out = []
    for i, r in enumerate(results):
        if not isinstance(r, Node):
            continue
        meaning = inputs.described_as(described[i], names) if i < len(described) else f"result {i}"
        if not meaning:
            continue  # saved for the backward
        module = modules[r]
        title = meaning if not meaning.startswith("gradient of ") else f"gradient of {_short(meaning[12:], module)}"
        box = Box(
            f"{output.name}.{i}", "output", title, text.type_of(r), f"return {r.name}", module, "result", result=meaning
        )
        out.append((box, Wire(r.name, box.id, text.type_of(r), nbytes(r))))
    return out


DIRECTIONS = ("forward", "backward")


def places(nodes: Sequence[Node], names: Mapping[int, str], joint: bool) -> dict[Node, tuple[str, ...]]:
    """The module that each node is drawn in.

    1. A node that knows its module lies there.
    2. A node that reads a module's own parameter, through views perhaps, lies in that module.
    3. Any other computed node stands where the latest of its operands was made; one level up if operands meet in it.
    4. An input lies with its parameter's module, or in the deepest module that holds all who read it.

    In a joint graph the two directions are apart: ``("forward", "blocks", "0")``.
    """
    owner = {n: _owner(n, names) for n in nodes if n.op == "placeholder"}
    order = {n: i for i, n in enumerate(nodes)}
    out: dict[Node, tuple[str, ...]] = {}
    for n in nodes:
        if n.op in ("placeholder", "get_attr", "output"):
            continue
        own = tuple(filter(None, origin.of(n).module.split(".")))
        if not own:
            own = next((owner[a] for a in n.all_input_nodes if owner.get(a)), ())
        if not own:
            made = [a for a in n.all_input_nodes if a in out]
            latest = max(made, key=order.__getitem__, default=None)
            own = out[latest] if latest is not None else ()
            if any(out[a] != own for a in made):
                own = own[:-1]
        out[n] = own
    if joint:
        out = {n: (DIRECTIONS["backward" in str(n.meta.get("partitioner_tag"))], *path) for n, path in out.items()}
    for n in nodes:
        if n in out:
            continue
        users = [out[u] for u in n.users if u in out]
        out[n] = common(users)
        if owner.get(n) and users:
            head = users[0][:1] if joint and len({u[0] for u in users}) == 1 else ()
            own = (*head, *owner[n])
            out[n] = own if any(u[: len(own)] == own for u in users) else out[n]
    return out


def _owner(n: Node, names: Mapping[int, str]) -> tuple[str, ...]:
    """The module whose parameter an input is."""
    return tuple(inputs.meaning(n, names).split(".")[:-1])


def common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest beginning that all paths share."""
    if not paths:
        return ()
    first, last = min(paths), max(paths)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


def nbytes(n: Node) -> int:
    """Bytes of a node's results together."""
    value = ops.value(n)
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return sum(optimization_hint(t.numel()) * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
