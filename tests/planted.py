"""Twenty mistakes for the tools to find: a pass that runs as it should and then gets one node wrong, or a wrong lowering.

``Planted*`` passes are our passes with a field ``bug``, so that they can be named in a pipeline and printed as Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal
from unittest import mock

import torch
from torch.fx import GraphModule, Node

from dsc import bind, compiler, ops
from dsc.codegen.kernel import COMPUTE
from dsc.codegen.lower import Lowering, Rule, Value
from dsc.debug.capture import Region, RegionRecorder, Session
from dsc.manager import Pass, Report
from dsc.options import Options
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.passes.recompute import Recompute
from dsc.target import Target

aten = torch.ops.aten


def calls(gm: GraphModule, name: str) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and ops.name_of(n) == name]


# Mistakes: each breaks one node of the graph, if its like is there, and gives it back.


def argument(node: Node | None, place: int, value: Any) -> Node | None:
    if node is not None:
        node.args = (*node.args[:place], value, *node.args[place + 1 :])
    return node


def first(nodes: list[Node]) -> Node | None:
    return next(iter(nodes), None)


def layer_norm_eps(gm: GraphModule) -> Node | None:
    """native_layer_norm(..., 1e-5) -> 1e-3"""
    return argument(first(calls(gm, "native_layer_norm.default")), 4, 1e-3)


def gelu_form(gm: GraphModule) -> Node | None:
    """gelu(x, approximate='tanh') -> gelu(x)"""
    node = first(calls(gm, "gelu.default"))
    if node is not None:
        node.kwargs = {}
    return node


def scaled_residual(gm: GraphModule) -> Node | None:
    """add(x, y) -> add(x, y, alpha=1.01), where x comes from a layer norm's input"""
    for node in calls(gm, "add.Tensor"):
        if all(isinstance(a, Node) and ops.tensor(a).dim() == 3 for a in node.args):
            node.kwargs = {"alpha": 1.01}
            return node
    return None


def same_item(gm: GraphModule) -> Node | None:
    """The second piece of unbind -> the first (keys that are queries)"""
    for node in calls(gm, "getitem"):
        if ops.name_of(ops.operand(node, 0)) == "unbind.int" and node.args[1] == 1:
            return argument(node, 1, 0)
    return None


def not_causal(gm: GraphModule) -> Node | None:
    """attention(q, k, v, 0.0, True) -> not causal: a mask that is gone"""
    return argument(first(calls(gm, "_scaled_dot_product_flash_attention_for_cpu.default")), 4, False)


def softmax_dim(gm: GraphModule) -> Node | None:
    """_log_softmax(x, 1) -> over dimension 0"""
    return argument(first(calls(gm, "_log_softmax.default")), 1, 0)


def inverted_mean(gm: GraphModule) -> Node | None:
    """total / number -> total * number"""
    node = first([n for n in calls(gm, "div.Tensor") if ops.tensor(n).dim() == 0])
    if node is not None:
        node.target = aten.mul.Tensor
    return node


def swapped_gelu_backward(gm: GraphModule) -> Node | None:
    """gelu_backward(grad, x) -> gelu_backward(x, grad)"""
    node = first(calls(gm, "gelu_backward.default"))
    if node is not None:
        node.args = (node.args[1], node.args[0])
    return node


def own_gradient(gm: GraphModule) -> Node | None:
    """a + b, gradients that meet -> a + a"""
    for node in calls(gm, "add.Tensor"):
        both = [a for a in node.args if isinstance(a, Node)]
        if len(both) == 2 and all(_layer_norm_gradient(a) for a in both):
            return argument(node, 1, node.args[0])
    return None


def _layer_norm_gradient(node: Node) -> bool:
    return node.target is operator.getitem and "layer_norm_backward" in ops.name_of(ops.operand(node, 0))


def causal_gradient(gm: GraphModule) -> Node | None:
    """The backward of causal attention -> of one that is not"""
    node = first(calls(gm, "_scaled_dot_product_flash_attention_for_cpu_backward.default"))
    return argument(node, 7, False)


def swapped_stack(gm: GraphModule) -> Node | None:
    """stack([dq, dk, dv]) -> stack([dk, dq, dv])"""
    node = first(calls(gm, "stack.default"))
    if node is None:
        return None
    a, b, *rest = node.args[0]  # type: ignore[misc,union-attr]
    return argument(node, 0, [b, a, *rest])


def transposed_weight(gm: GraphModule) -> Node | None:
    """mm(grad, w) -> mm(grad, w.T), w square"""
    for node in calls(gm, "mm.default"):
        w = ops.operand(node, 1)
        if ops.name_of(w) == "t.default" and ops.tensor(w).shape[0] == ops.tensor(w).shape[1] and _is_weight(w):
            return argument(node, 1, w.args[0])
    return None


def _is_weight(node: Node) -> bool:
    while ops.is_view(node):
        node = ops.operand(node, 0)
    return node.op == "placeholder"


def embedding_gradient(gm: GraphModule) -> Node | None:
    """embedding_dense_backward(...) -> scaled by how often a token comes"""
    return argument(first(calls(gm, "embedding_dense_backward.default")), 4, True)


def stale_statistics(gm: GraphModule) -> Node | None:
    """native_layer_norm_backward(grad, x, shape, mean, rstd, ...) with the mean for rstd"""
    node = first(calls(gm, "native_layer_norm_backward.default"))
    return argument(node, 4, node.args[3]) if node is not None else None


def log_softmax_gradient_dim(gm: GraphModule) -> Node | None:
    """_log_softmax_backward_data(grad, out, 1) -> over dimension 0"""
    return argument(first(calls(gm, "_log_softmax_backward_data.default")), 2, 0)


def other_saved_value(gm: GraphModule) -> Node | None:
    """A view that the backward takes of a saved value -> of another layer's"""
    saved = calls(gm, "gelu.default")
    for node in calls(gm, "view.default"):
        if node.meta.get("partitioner_tag") == "is_backward" and node.args[0] in saved:
            return argument(node, 0, next(s for s in saved if s is not node.args[0]))
    return None


def log_softmax_again(gm: GraphModule) -> Node | None:
    """_log_softmax, computed again in the backward -> over dimension 0"""
    found = [n for n in calls(gm, "_log_softmax.default") if n.meta.get("partitioner_tag") == "is_backward"]
    return argument(first(found), 1, 0)


def wrong_bias_gradient(gm: GraphModule) -> Node | None:
    """sum over rows, kept as a row -> mean over rows"""
    node = first([n for n in calls(gm, "sum.dim_IntList") if n.args[1:] == ([0], True)])
    if node is not None:
        node.target = aten.mean.dim
    return node


@dataclass(frozen=True)
class Mistake:
    """Where the mistake is made: by which pass, on which graph; and how."""

    by: str
    graph: Literal["joint", "forward", "backward"]
    make: Callable[[GraphModule], Node | None] | None = None
    op: str = ""
    """Of mistakes in the lowering: the operator whose rule is wrong."""
    wrong: Callable[[Rule], Rule] | None = None

    @property
    def title(self) -> str:
        text = (self.make or self.wrong).__doc__ or ""
        return f"{self.op.split('.')[0]}: {text}" if self.op else text


# Lowering rules that are wrong.


def scaled(rule: Rule) -> Rule:
    """the result times 1.01"""

    def broken(low: Lowering, n: Node) -> Value | tuple[Value, ...]:
        made = rule(low, n)
        head, *tail = made if isinstance(made, tuple) else (made,)

        def at(index: Any) -> str:
            v = head.at(index)
            return low.build.result(low.build.let("mul", (v, low.build.const(1.01, COMPUTE[head.dtype]))), head.dtype)

        wrong = Value(head.shape, head.dtype, at)
        return (wrong, *tail) if isinstance(made, tuple) else wrong

    return broken


def without_options(rule: Rule) -> Rule:
    """its keyword arguments left out"""

    def broken(low: Lowering, n: Node) -> Value | tuple[Value, ...]:
        kept = n.kwargs
        n.kwargs = {}
        try:
            return rule(low, n)
        finally:
            n.kwargs = kept

    return broken


def first_for_second(rule: Rule) -> Rule:
    """its second operand read as its first"""

    def broken(low: Lowering, n: Node) -> Value | tuple[Value, ...]:
        second = ops.operand(n, 1)
        odd = Lowering(low.build, low.group, low.rules, dict(low.values))
        odd.values[second, None] = low.of(n.args[0])
        return rule(odd, n)

    return broken


MISTAKES: tuple[Mistake, ...] = (
    Mistake("canonicalize", "joint", layer_norm_eps),
    Mistake("canonicalize", "joint", gelu_form),
    Mistake("canonicalize", "joint", scaled_residual),
    Mistake("canonicalize", "joint", same_item),
    Mistake("canonicalize", "joint", inverted_mean),
    Mistake("canonicalize", "joint", swapped_gelu_backward),
    Mistake("canonicalize", "joint", own_gradient),
    Mistake("canonicalize", "joint", stale_statistics),
    Mistake("recompute", "joint", log_softmax_again),
    Mistake("recompute", "joint", other_saved_value),
    Mistake("recompute", "joint", causal_gradient),
    Mistake("canonicalize", "forward", not_causal),
    Mistake("fuse", "forward", softmax_dim),
    Mistake("canonicalize", "backward", transposed_weight),
    Mistake("fuse", "backward", swapped_stack),
    Mistake("fuse", "backward", embedding_gradient),
    Mistake("fuse", "backward", wrong_bias_gradient),
    Mistake("link", "forward", op="native_layer_norm.default", wrong=scaled),
    Mistake("link", "forward", op="gelu.default", wrong=without_options),
    Mistake("link", "backward", op="gelu_backward.default", wrong=first_for_second),
)


def broken(gm: GraphModule, by: str, bug: int | None, report: Report) -> Report:
    """Make the mistake if it is this pass's, and the graph has what it breaks."""
    if bug is None or (m := MISTAKES[bug]).by != by or m.make is None or (node := m.make(gm)) is None:
        return report
    BROKEN.append(node.name)
    return replace(report, changed=True)


BROKEN: list[str] = []
"""The nodes that mistakes broke since a ``planted`` block began."""


@dataclass(frozen=True)
class PlantedCanonicalize(Canonicalize):
    bug: int | None = None

    def run(self, gm: GraphModule, target: Target) -> Report:
        return broken(gm, self.name, self.bug, super().run(gm, target))


@dataclass(frozen=True)
class PlantedEarly(PlantedCanonicalize):
    """On the joint graph alone."""

    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"


@dataclass(frozen=True)
class PlantedLate(PlantedCanonicalize):
    """On the graphs after the split alone."""

    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "graph"


@dataclass(frozen=True)
class PlantedRecompute(Recompute):
    bug: int | None = None

    def run(self, gm: GraphModule, target: Target) -> Report:
        return broken(gm, self.name, self.bug, super().run(gm, target))


@dataclass(frozen=True)
class PlantedFuse(Fuse):
    bug: int | None = None

    def run(self, gm: GraphModule, target: Target) -> Report:
        return broken(gm, self.name, self.bug, super().run(gm, target))


def pipeline(bug: int) -> tuple[Pass, ...]:
    """The default passes, one of which makes the mistake on the graphs that have what it breaks."""
    joint = MISTAKES[bug].graph == "joint"
    early, late = PlantedEarly(bug=bug if joint else None), PlantedLate(bug=None if joint else bug)
    return early, PlantedRecompute(bug=bug), late, PlantedFuse(bug=bug)


@contextmanager
def planted(bug: int) -> Iterator[Options]:
    """Options under which compilations make the mistake, as long as the block lasts."""
    m = MISTAKES[bug]
    rules: Mapping[str, Rule] = {m.op: m.wrong(bind.RULES[m.op])} if m.wrong is not None else {}
    BROKEN.clear()
    with mock.patch.dict(bind.RULES, rules):
        yield Options(passes=pipeline(bug))


def planned_again(session: Session, options: Options) -> Session:
    """The capture of one training graph as it would be with other passes, without tracing the model again."""
    (region,) = session.regions
    fresh = Region(region.dynamo, region.inputs, calls=region.calls)
    make = compiler.make(replace(options, target=session.target.name), session.target, (RegionRecorder(fresh),))
    joint = compiler.copied(region.of("joint")[0].gm)
    results = len(joint.graph.output_node().args[0]) - len(region.of("backward")[0].gm.graph.output_node().args[0])  # type: ignore[arg-type]
    forward, backward = compiler.split(compiler.plan_joint(joint, make), (), num_fwd_outputs=results)
    for gm, kind in ((forward, "forward"), (backward, "backward")):
        compiler.tell(compiler.plan(gm, kind, make, build=False), make)
    return replace(session, options=make.options, regions=(fresh,))
