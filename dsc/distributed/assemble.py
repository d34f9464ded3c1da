"""A stage of a plan as a graph of its own, cut out of the model's forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from dsc.distributed.forward import Forward
from dsc.distributed.plan import StagePlan
from dsc.torch_shim import detect_fake_mode


@dataclass(frozen=True)
class Parts:
    """``graph`` takes ``weights``, ``held``, what arrives, what is given from outside; and gives what it sends."""

    plan: StagePlan
    graph: GraphModule
    weights: tuple[str, ...]
    """Parameters that get gradients, by their names in the model; a tied one once."""
    held: tuple[str, ...]
    """Other parameters, buffers, and constants of the trace (by the names of their placeholders)."""


def assemble(forward: Forward, stage: StagePlan) -> Parts:
    """The stage's nodes between what it takes and what it sends; every value keeps its name and its fake tensor."""
    nodes = {n.name: n for n in forward.gm.graph.nodes}
    mine = {*stage.nodes, *stage.copied}
    read = {a for name in mine for a in nodes[name].all_input_nodes} | {nodes[name] for name in stage.sends}
    placeholders = [n for n in forward.gm.graph.nodes if n.op == "placeholder" and n in read]
    trained = _by_owner(forward, (n for n in placeholders if n.name in forward.parameters))
    kept = _by_owner(
        forward,
        (n for n in placeholders if n.name not in forward.parameters and n.name not in forward.inputs),
    )
    graph = Graph()
    known: dict[Node, Node] = {}

    def take(name: str, same: Iterable[Node]) -> None:
        made = graph.placeholder(name)
        for n in same:
            known[n] = made
            made.meta = dict(n.meta)

    for same in (*trained.values(), *kept.values()):
        take(same[0].name, same)
    for name in (*stage.receives, *stage.inputs):
        take(name, [nodes[name]])
    for n in forward.gm.graph.nodes:
        if n.op == "get_attr" or (n.name in mine and n not in known):
            known[n] = graph.node_copy(n, known.__getitem__)
    graph.output(tuple(known[nodes[name]] for name in stage.sends))
    _drop_attributes(graph)
    return Parts(stage, GraphModule(forward.gm, graph), tuple(trained), tuple(kept))


def _by_owner(forward: Forward, placeholders: Iterable[Node]) -> dict[str, list[Node]]:
    out: dict[str, list[Node]] = {}
    for n in placeholders:
        out.setdefault(forward.state.get(n.name, n.name), []).append(n)
    return out


def _drop_attributes(graph: Graph) -> None:
    """Graphs inside of graphs that no call of this stage uses."""
    for n in reversed(list(graph.nodes)):
        if n.op == "get_attr" and not n.users:
            graph.erase_node(n)


def differentiable(forward: Forward) -> frozenset[str]:
    """Values that carry a gradient: found by running the forward on fake tensors, with autograd on."""
    found: set[str] = set()

    class Look(Interpreter):
        def run_node(self, n: Node) -> object:
            value = super().run_node(n)
            if isinstance(value, Tensor) and value.requires_grad:
                found.add(n.name)
            return value

    fakes = [n.meta["val"] for n in forward.gm.graph.nodes if n.op == "placeholder"]
    mode = detect_fake_mode(fakes)
    assert mode is not None
    with mode, torch.enable_grad():
        given = [
            torch.empty_like(v).requires_grad_(n.name in forward.parameters) if isinstance(v, Tensor) else v
            for n, v in zip((n for n in forward.gm.graph.nodes if n.op == "placeholder"), fakes)
        ]
        Look(forward.gm).run(*given)
    return frozenset(found)


def example(forward: Forward, names: Iterable[str], carry: frozenset[str], device: torch.device) -> list[Tensor]:
    """Empty tensors like these values of one micro-batch, contiguous, with gradients where they carry one."""
    nodes = {n.name: n for n in forward.gm.graph.nodes}
    out = []
    for name in names:
        value = nodes[name].meta["val"]
        out.append(torch.empty(value.shape, dtype=value.dtype, device=device).requires_grad_(name in carry))
    return out


def saved_names(model: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """First name of a parameter or buffer -> all names under which the model's ``state_dict`` has it."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    saved = model.state_dict().keys()
    first: dict[int, str] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, t in tensors:
        owner = first.setdefault(id(t), name)
        if name in saved:
            names[owner] = (*names.get(owner, ()), name)
    return names
