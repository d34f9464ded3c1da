"""The last step, from a graph with groups to a program: every kernel beside its group on ATen, from the same inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsc import bind, kernels, link, ops
from dsc.codegen import cpp
from dsc.codegen.builder import Unlowerable
from dsc.codegen.kernel import Call
from dsc.codegen.lower import Bound
from dsc.debug.bisect.run import Results, Twin, run_twins, seeded, written
from dsc.debug.bisect.tolerance import Difference, Rule, compare, worst
from dsc.debug.capture import same_again
from dsc.options import Options
from dsc.runtime import run as runtime
from dsc.runtime.pool import Pool
from dsc.runtime.run import Launch
from dsc.steps import Step, steps

HOST = torch.device("cpu")


@dataclass(frozen=True)
class WrongKernel:
    """A kernel that does not compute its group."""

    group: str
    kernel: str
    node: Node
    """The first node of the group whose value is wrong if a kernel computes it from the group's inputs."""
    difference: Difference
    nodes: tuple[Node, ...]


def runnable(options: Options) -> bool:
    """Whether kernels can be built here."""
    emitter = kernels.emitter(options, HOST)
    return emitter == "triton" or (emitter == "cpp" and kernels.compiler(options) is not None)


def run_program(gm: GraphModule, inputs: Mapping[str, object], kind: str, options: Options) -> Results:
    """The graph as a program with kernels."""
    program, _, _ = link.link(gm, options, kind)
    given = {n.name: inputs[n.name] for n in gm.graph.find_nodes(op="placeholder")}
    for n in written(gm):
        given[n.name] = same_again(given[n.name])
    with seeded():
        outputs = runtime.load(program, kernels.launches(program, options), Pool(), kind)(list(given.values()))
    return Results(list(outputs), {n.name: given[n.name] for n in written(gm)})


def wrong_kernels(gm: GraphModule, inputs: Mapping[str, object], options: Options, rule: Rule) -> list[WrongKernel]:
    """Kernels whose results are not those of their group on ATen, in the order in which they run."""
    binder = bind.Binder(options.numerics, "k")
    units = [(s, b) for s in steps(gm) if s.group is not None and (b := _bound(binder, s)) is not None]
    found = _compared(gm, inputs, units, options, rule)
    return [_narrowed(gm, inputs, s, b, d, options, rule) for s, b, d in found]


def _bound(binder: bind.Binder, step: Step) -> Bound | None:
    try:
        return binder.bind(step)
    except Unlowerable:
        return None


def _narrowed(
    gm: GraphModule, inputs: Mapping[str, object], step: Step, bound: Bound, d: Difference, options: Options, rule: Rule
) -> WrongKernel:
    """Kernels of ever more nodes of the group show which node makes it wrong."""
    parts = []
    for i, prefix in enumerate(_prefixes(step)):
        if (made := _bound(bind.Binder(options.numerics, f"part{i}_"), prefix)) is not None:
            parts.append((prefix, made))
    found = _compared(gm, inputs, parts, options, rule)
    if not found:
        last = [n for n in step.nodes if n in bound.nodes][-1]
        return WrongKernel(str(step.group), bound.kernel.name, _computing(last), d, step.nodes)
    prefix, _, difference = found[0]
    return WrongKernel(str(step.group), bound.kernel.name, _computing(prefix.nodes[-1]), difference, step.nodes)


def _computing(node: Node) -> Node:
    """The node that computes: of an item, the one with several results."""
    return ops.operand(node, 0) if ops.info(node).kind == "item" else node


def _prefixes(step: Step) -> Iterator[Step]:
    """For each node of the group, the nodes of the group that it is computed from, itself last."""
    inside = set(step.nodes)
    for node in step.nodes:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        needed, stack = {node}, [node]
        while stack:
            for a in _through_views(stack.pop()):
                if a in inside and a not in needed:
                    needed.add(a)
                    stack.append(a)
        yield Step(tuple(n for n in step.nodes if n in needed), step.group)


def _through_views(node: Node) -> Iterator[Node]:
    for a in node.all_input_nodes:
        yield a
        if ops.is_view(a) or ops.is_split(a):
            yield from _through_views(a)


def _compared(
    gm: GraphModule,
    inputs: Mapping[str, object],
    units: Sequence[tuple[Step, Bound]],
    options: Options,
    rule: Rule,
) -> list[tuple[Step, Bound, Difference]]:
    """The units whose kernel gives something else than ATen gives for its nodes, from the inputs that ATen gives it."""
    if not units:
        return []
    launches = _launches([b for _, b in units], options)
    waiting: dict[Node, list[int]] = {}
    missing = []
    for i, (_, b) in enumerate(units):
        missing.append(set(b.nodes))
        for n in set(b.nodes):
            waiting.setdefault(n, []).append(i)
    held: dict[Node, Twin] = {}
    readers = {n: len(w) for n, w in waiting.items()}
    sizes = _Sizes()
    found: dict[int, Difference] = {}

    def see(node: Node, value: Twin) -> Twin:
        sizes.learn(node, value.value)
        if node not in waiting:
            return value
        held[node] = value
        for i in waiting[node]:
            missing[i].discard(node)
            if missing[i]:
                continue
            bound = units[i][1]
            if (d := _launched(bound, launches[i], held, sizes, rule)) is not None:
                found[i] = d
            for n in set(bound.nodes):
                readers[n] -= 1
                if not readers[n]:
                    del held[n]
        return value

    with seeded():
        run_twins(gm, inputs, see)
    return [(*units[i], found[i]) for i in sorted(found)]


def _launches(bounds: Sequence[Bound], options: Options) -> list[Launch]:
    """One launch for each."""
    distinct = list({b.kernel.name: b.kernel for b in bounds}.values())
    sequences = [(Call(b.kernel.name, tuple(range(len(b.nodes))), tuple(range(len(b.kernel.sizes)))),) for b in bounds]
    if kernels.emitter(options, HOST) == "triton":
        return kernels.triton_launches(distinct, sequences, on_gpu=False)
    cxx = kernels.compiler(options)
    assert cxx is not None, "asked only where kernels can be built"
    library = kernels.build_somewhere(cpp.emit_unit(distinct, sequences), options, cxx)
    return [kernels.cpp_launch(library.function(f"run_{i}"), s) for i, s in enumerate(sequences)]


def _launched(bound: Bound, launch: Launch, held: Mapping[Node, Twin], sizes: _Sizes, rule: Rule) -> Difference | None:
    count = len(bound.kernel.buffers) - sum(b.role != "in" for b in bound.kernel.buffers)
    given = [_as_traced(held[n].value, n) for n in bound.nodes[:count]]
    outputs = bound.nodes[count:]
    made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in (held[n].value for n in outputs)]
    if launch((*given, *made), tuple(sizes.known[s] for s in bound.kernel.sizes)):
        return None  # an index out of range: ATen raises its own error
    return worst(compare(m, held[n], rule) for m, n in zip(made, outputs))


def _as_traced(t: torch.Tensor, node: Node) -> torch.Tensor:
    """In the strides for which the kernel was made."""
    want = ops.tensor(node).stride()
    if any(not isinstance(s, int) for s in want) or t.stride() == want:
        return t
    return torch.empty_strided(t.shape, want, dtype=t.dtype).copy_(t)


class _Sizes:
    """Size symbols, read off the shapes that turn up."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def learn(self, node: Node, value: Any) -> None:
        fake = node.meta.get("val")
        if isinstance(fake, torch.SymInt) and isinstance(value, int):
            self.known.setdefault(str(fake), value)
        if isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor):
            for s, n in zip(fake.shape, value.shape):
                if isinstance(s, torch.SymInt):
                    self.known.setdefault(str(s), n)
