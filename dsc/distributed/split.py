"""A backward graph to two functions: input gradients now (dgrad), weight gradients later (wgrad).

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023) send the gradients of a stage's inputs on
before they compute those of its weights.  torch splits by walking the autograd graph from the stage's inputs, which
finds no weight on a branch that depends on none of them; here the split is a matter of reachability in one graph:
whatever the input gradients do not need belongs to wgrad, so no gradient can be lost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.fx import Graph, GraphModule, Node

from dsc import notes, ops

Boxed = Callable[[list[object]], Sequence[object]]
"""Takes a list of inputs, which it empties."""


@dataclass(frozen=True)
class Halves:
    """Two graphs that together compute what one backward graph does.

    ``dgrad`` gives the results that are no weight's, then ``passed`` values that ``wgrad`` reads;
    ``wgrad`` takes its own inputs of the backward, then those values, and gives the weights' results.
    """

    dgrad: GraphModule
    wgrad: GraphModule
    dgrad_inputs: tuple[int, ...]
    """Positions in the backward's inputs, in the order of the placeholders."""
    wgrad_inputs: tuple[int, ...]
    dgrad_results: tuple[int, ...]
    """Positions in the backward's results."""
    wgrad_results: tuple[int, ...]
    passed: int
    results: int


def split(backward: GraphModule, weights: Collection[int]) -> Halves:
    """Split by what each result needs; ``weights`` are the positions of the results that may come later.

    1. A node that some other result needs is dgrad's.  One that writes, or draws random numbers, is too, in its order.
    2. Every other node is wgrad's.
    3. What wgrad reads of dgrad's nodes is passed on, but for views: those are taken again from what they look at.
       Of a call with several results each that is read is passed, not their tuple.
    4. Inputs of the backward go to whoever reads them.
    """
    order = list(backward.graph.nodes)
    inputs = [n for n in order if n.op == "placeholder"]
    (results,) = next(n for n in reversed(order) if n.op == "output").args
    assert isinstance(results, (list, tuple))
    late = [i for i in range(len(results)) if i in weights]
    soon = [i for i in range(len(results)) if i not in weights]
    first = needed([*_nodes(results[i] for i in soon), *(n for n in order if _must_run(n))])
    first |= {n for n in order if n.target is operator.getitem and n.args[0] in first}
    second = needed(_nodes(results[i] for i in late)) - first
    second |= _views_again(second, [results[i] for i in late])
    crossing = {a for n in second for a in n.all_input_nodes} | set(_nodes(results[i] for i in late))
    passed = [n for n in order if n in crossing and n not in second and n.op == "call_function"]
    dgrad, dgrad_inputs = _extract(backward, first, [*(results[i] for i in soon), *passed], inputs, ())
    wgrad, wgrad_inputs = _extract(backward, second, [results[i] for i in late], inputs, passed)
    return Halves(dgrad, wgrad, dgrad_inputs, wgrad_inputs, tuple(soon), tuple(late), len(passed), len(results))


def needed(roots: Iterable[Node]) -> set[Node]:
    """``roots`` and all that they are computed from."""
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack += n.all_input_nodes
    return found


def _nodes(results: Iterable[object]) -> list[Node]:
    return [r for r in results if isinstance(r, Node)]


def _must_run(n: Node) -> bool:
    """Whether the order of the call counts: it writes into an operand, changes a random state, or has a graph inside."""
    if n.op != "call_function":
        return False
    return bool(ops.mutated(n)) or (ops.is_ordered(n) and ops.info(n).kind != "collective")


def _views_again(second: set[Node], results: Sequence[object]) -> set[Node]:
    """Views and parts of multiple results that ``second`` reads: free to take again, and aliases if passed on."""
    again: set[Node] = set()
    stack = [a for n in second for a in n.all_input_nodes] + _nodes(results)
    while stack:
        n = stack.pop()
        if n in second or n in again or n.op != "call_function" or not (ops.is_view(n) or ops.is_split(n)):
            continue
        again.add(n)
        stack += n.all_input_nodes
    return again


def _extract(
    gm: GraphModule, nodes: set[Node], results: Sequence[object], inputs: Sequence[Node], passed: Sequence[Node]
) -> tuple[GraphModule, tuple[int, ...]]:
    """A graph of ``nodes``: which inputs it takes, ``passed`` behind them; nodes keep their meta but for the notes."""
    read = {a for n in nodes if n.op != "placeholder" for a in n.all_input_nodes} | set(_nodes(results))
    graph = Graph()
    known: dict[Node, Node] = {}
    taken = [i for i, n in enumerate(inputs) if n in read]
    for n in [*(inputs[i] for i in taken), *passed]:
        known[n] = graph.placeholder(n.name)
        known[n].meta = {k: v for k, v in n.meta.items() if k != notes.KEY}
    for n in gm.graph.nodes:
        if n in nodes and n not in known and n.op in ("call_function", "get_attr"):
            known[n] = graph.node_copy(n, known.__getitem__)
            known[n].meta.pop(notes.KEY, None)
        elif n.op == "get_attr" and n in read:
            known[n] = graph.node_copy(n, known.__getitem__)
    graph.output(tuple(known[r] if isinstance(r, Node) else None for r in results))
    return GraphModule(gm, graph), tuple(taken)


def run(halves: Halves, dgrad: Boxed, wgrad: Boxed, later: Callable[[Callable[[], Sequence[object]]], None]) -> Boxed:
    """The backward as one boxed function: weights' results are None, ``later`` gets the function that computes them."""

    def call(args: list[object]) -> tuple[object, ...]:
        ahead, behind = ([args[i] for i in taken] for taken in (halves.dgrad_inputs, halves.wgrad_inputs))
        args.clear()
        found = dgrad(ahead)
        soon = len(halves.dgrad_results)
        later(partial(torch.no_grad()(wgrad), [*behind, *found[soon:]]))  # it runs outside of autograd's own backward
        out: list[object] = [None] * halves.results
        for i, value in zip(halves.dgrad_results, found):
            out[i] = value
        return tuple(out)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
