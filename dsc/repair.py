"""Changes to a Dynamo graph without which AOTAutograd would compute something else than eager.

What writes lose by being made functional is put right in ``dsc.layouts``, what views of inputs lose in ``dsc.aliases``.

1. Dropout that drops nothing (not training, or p of 0) is its input in eager, and a copy to AOTAutograd, which shows when
   either is written to: such a call is replaced by its input.
2. AOTAutograd drops calls whose result nobody reads.  In eager those that draw random numbers move the generator, and
   those that check indices may raise: their results are given out too, and taken away again from what the caller sees.
   Inside of a region of its own (a checkpoint) nothing can be given out: a graph with an unread draw there is for eager.
3. A graph that runs in eager after all must keep the generator's state for its checkpoint regions, as the user's call of
   ``checkpoint`` did, and as Dynamo's stand-in for it does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from dsc import aliases, layouts
from dsc.dynamo import DRAWS, name_of, written

DROPOUTS = ("dropout", "dropout_")

CHECKS = frozenset(
    """
    embedding embedding_bag gather index_select take take_along_dim index_add index_copy index_fill index_put scatter
    scatter_add scatter_reduce cross_entropy nll_loss one_hot cholesky cholesky_ex inv inverse solve binary_cross_entropy
    floordiv floor_divide mod remainder fmod repeat_interleave
    """.split()
)
"""Raise for some values of their operands."""

FIRST_IS_A_PATTERN = frozenset(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full
    new_empty_strided new_tensor size dim ndimension numel stride storage_offset element_size is_contiguous
    """.split()
)
SECOND_IS_A_PATTERN = frozenset("type_as expand_as view_as reshape_as resize_as".split())
"""Ask an operand for its shape, dtype or device alone: its values are not read."""


def repair(gm: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Change the graph in place.  What comes back turns its compiled function into one with the results of before."""
    drop_idle_dropout(gm)
    layouts.draw_in_order_of_memory(gm)
    layouts.keep_layout_of_writes(gm)
    layouts.keep_gaps(gm)
    layouts.read_in_order(gm)
    views, results = aliases.take_out(gm), with_unread(gm)
    return lambda compiled: views(results(compiled))


def with_unread(gm: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give out what nobody reads and what overlapping results are views of; what comes back takes them away again."""
    output = gm.graph.output_node()
    results = output.args[0]
    if not isinstance(results, (tuple, list)):
        return lambda compiled: compiled
    unread, sources = list(unread_calls(gm)), list(layouts.sources_of_overlaps(gm))
    if not unread and not sources:
        return lambda compiled: compiled
    extra = []
    for n in unread:
        value, place = n.meta["example_value"], first_tensor(n)
        with gm.graph.inserting_before(output):
            one = n if place is None else gm.graph.call_function(operator.getitem, (n, place))
            extra.append(gm.graph.call_method("detach", (one,)))
        one.meta["example_value"] = value if place is None else value[place]
        extra[-1].meta["example_value"] = one.meta["example_value"].detach()
    output.args = ((*results, *extra, *sources),)
    gm.recompile()
    return lambda compiled: lambda *inputs: tuple(compiled(*inputs))[: len(results)]


def buried(gm: GraphModule) -> str | None:
    """Why the graph cannot be repaired: an unread call inside of a region draws random numbers."""
    inner = (m for m in gm.modules() if isinstance(m, GraphModule) and m is not gm)
    names = [name for m in inner for n in unread_calls(m) if (name := name_of(n)) in DRAWS]
    return f"AOTAutograd drops {names[0]}, whose numbers nobody reads, from a region" if names else None


def for_eager(gm: GraphModule) -> None:
    """Change the checkpoint regions of a graph, in place, into calls of ``checkpoint`` that draw the same numbers twice."""
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        regions = [
            n for n in module.graph.nodes if n.op == "call_function" and name_of(n) == "tag_activation_checkpoint"
        ]
        for node in regions:
            node.target = region
            node.kwargs = {k: v for k, v in node.kwargs.items() if k == "preserve_rng_state"}
        if regions:
            module.recompile()


def region(body: GraphModule, *inputs: Any, preserve_rng_state: bool = True) -> Any:
    """What the user wrote; which of its values are kept is not what they are, so a selective policy is left out."""
    return checkpoint(body, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def drop_idle_dropout(gm: GraphModule) -> None:
    """``dropout(x, p, training=False)`` and ``dropout(x, 0)`` -> ``x``."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or name_of(node) not in DROPOUTS:
            continue
        arguments = {**dict(zip(("input", "p", "training"), node.args)), **node.kwargs}
        training = arguments.get("training", arguments.get("train", True))
        source, p = arguments.get("input"), arguments.get("p", 0.5)
        if isinstance(source, Node) and (training is False or (isinstance(p, (int, float)) and p == 0)):
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
            changed = True
    if changed:
        gm.recompile()


def unread_calls(gm: GraphModule) -> Iterator[Node]:
    """Calls that draw or check, that no result depends on, and that give a tensor or several."""
    read: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.op == "output" or node in read:
            read.update(values_read(node))
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method") or node in read:
            continue
        if first_tensor(node) is None and not isinstance(node.meta.get("example_value"), torch.Tensor):
            continue
        name = name_of(node)
        if written(node) is not None and aliases.input_of(node, gm) is not None:
            continue  # what writes to an input stays
        if name in DRAWS or name in CHECKS or (name == "getitem" and indexes_by_tensor(node)):
            yield node


def first_tensor(node: Node) -> int | None:
    """The place of the first tensor among several results; None of one result, and where there is none."""
    value = node.meta.get("example_value")
    several = value if isinstance(value, (tuple, list)) else ()
    return next((i for i, v in enumerate(several) if isinstance(v, torch.Tensor)), None)


def values_read(node: Node) -> set[Node]:
    """Operands on whose values the result depends."""
    name = name_of(node)
    place = 0 if name in FIRST_IS_A_PATTERN else 1 if name in SECOND_IS_A_PATTERN else len(node.args)
    patterns = {a for a in node.args[place : place + 1] if isinstance(a, Node)}
    others = {a for i, a in enumerate(node.args) if i != place and isinstance(a, Node)}
    return set(node.all_input_nodes) - (patterns - others - set(node.kwargs.values()))


def indexes_by_tensor(node: Node) -> bool:
    return any(isinstance(a.meta.get("example_value"), torch.Tensor) for a in node.all_input_nodes[1:])
