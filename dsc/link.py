"""A graph with noted groups to a Program: groups become kernel launches, everything else calls ATen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from dsc import bind, kernels, ops, products
from dsc.codegen.builder import Unlowerable
from dsc.codegen.lower import Bound
from dsc.emit import Writer
from dsc.manager import Remark
from dsc.notes import notes, set_notes
from dsc.options import Options
from dsc.program import Program
from dsc.steps import Step, steps, storage_of


def link(
    gm: GraphModule, options: Options, kind: str, prefix: str = "k"
) -> tuple[Program, dict[str, Bound], tuple[Remark, ...]]:
    """The program of a graph, the kernel of each group, and what could not become a kernel.  Nothing is built."""
    order = steps(gm)
    bound, remarks = bind_all(order, options, prefix)
    if remarks:  # what was refused runs node by node
        order = steps(gm, frozenset(r.node for r in remarks))
    writer = Writer(gm, order, bound, kind, pooled=options.memory_budget is None)
    writer.write()
    return writer.program(options), bound, tuple(remarks)


def bind_all(order: Sequence[Step], options: Options, prefix: str) -> tuple[dict[str, Bound], list[Remark]]:
    """Group -> its kernel; groups that no kernel computes get a remark named after them.

    A product of matrices that does not fit its group goes back to ATen, with a remark named after it.
    """
    binder, bound, remarks = bind.Binder(options.numerics, prefix), {}, []
    for step in order:
        if step.group is None:
            continue
        made = _bound(binder, step, options)
        rest = [step]
        if isinstance(made, Unlowerable) and any(products.of(n) is not None for n in step.nodes):
            rest = without_products(step)
            kept = {n for s in rest for n in s.nodes}
            remarks += [Remark(n.name, "skipped", f"ATen multiplies: {made}") for n in step.nodes if n not in kept]
        for step_ in rest:
            made = made if step_ is step else _bound(binder, step_, options)
            if isinstance(made, Unlowerable):
                remarks.append(Remark(str(step_.group), "skipped", bind.refused(step_, made)))
            else:
                bound[str(step_.group)] = made
    return bound, remarks


def _bound(binder: bind.Binder, step: Step, options: Options) -> Bound | Unlowerable:
    try:
        made = binder.bind(step)
    except Unlowerable as why:
        return why
    only = bind.only_triton(made.kernel) if _emitter(made, options) == "cpp" else None
    return made if only is None else Unlowerable(f"only Triton kernels {only}")


def without_products(step: Step) -> list[Step]:
    """The group without its products, which are taken out of it: what they need of it, and the rest, as two groups."""
    taken = {n for n in step.nodes if products.of(n) is not None}
    early: set[Node] = set()
    todo = [storage_of(a) for n in taken for a in n.all_input_nodes]
    while todo:
        n = todo.pop()
        if n in step.nodes and n not in early and n not in taken:
            early.add(n)
            todo += [storage_of(a) for a in n.all_input_nodes]
    early |= {n for n in step.nodes if ops.info(n).kind == "item" and n.args[0] in early}
    groups = ((early, f"{step.group}_rows"), ({*step.nodes} - taken - early, str(step.group)))
    for n in taken:
        set_notes(n, replace(notes(n), group=None))
    found = []
    for members, name in groups:
        for n in members:
            set_notes(n, replace(notes(n), group=name))
        if members:
            found.append(Step(tuple(n for n in step.nodes if n in members), name))
    return found


def _emitter(bound: Bound, options: Options) -> str:
    return kernels.emitter(options, ops.tensor(bound.nodes[0]).device)
