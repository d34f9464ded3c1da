"""Rewrite operators that do several jobs into ones that do a single job each, so that fusion can place them apart."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from dsc import ops
from dsc.manager import Pass, Remark, Report
from dsc.target import Target
from dsc.torch_shim import FakeTensorMode, detect_fake_mode

aten = torch.ops.aten
Rule = Callable[["Rewriter", Node], bool]


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Split compound operators; share repeated views; drop what nobody reads.

    1. ``native_dropout(x, p)`` -> ``x * bernoulli(1-p) * 1/(1-p)``: the same call to the generator, the rest pointwise.
       ``1/(1-p)`` is rounded to the dtype, as eager's noise tensor is, here and in the gradient.
    2. ``nll_loss_forward`` with a mean or a sum -> a loss a row, and the sum and count of them.
    3. ``native_layer_norm_backward`` -> the input's gradient (over rows), and the parameters' (over columns).
    4. Two equal views of one tensor -> one.
    5. ``prims.fma(x, y, z)``, which Dynamo makes of ``addcmul_`` -> ``x * y + z``, what it runs in ATen.
    6. Does not fire: weighted losses, dropout outside training or with p of 0 or 1, low-precision losses on CPUs, which
       round every partial sum (CUDA sums in fp32).
    """

    name: ClassVar[str] = "canonicalize"
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "both"

    def run(self, gm: GraphModule, target: Target) -> Report:
        rewriter = Rewriter(gm)
        remarks: list[Remark] = []
        for node in list(gm.graph.nodes):
            rule = RULES.get(ops.name_of(node)) if node.op == "call_function" else None
            if rule is not None and rule(rewriter, node):
                remarks.append(Remark(node.name, "did", (rule.__doc__ or "").splitlines()[0]))
        rewriter.finish()
        shared = share_views(gm)
        dead = drop_dead(gm) if remarks or shared else 0
        return Report(bool(remarks or shared or dead), tuple(remarks), (("views shared", shared), ("dead nodes", dead)))


@dataclass
class Rewriter:
    """Makes nodes with fake values, in front of the node that they replace."""

    gm: GraphModule
    given_out: dict[Node, Node] = field(default_factory=dict)
    """Results of the graph -> what is to be given out instead."""
    emptied: list[Node] = field(default_factory=list)
    """Nodes whose items are among them."""

    @functools.cached_property
    def mode(self) -> FakeTensorMode | None:
        """The fake mode of the graph's values, looked for when a node is first made: most graphs need none."""
        return detect_fake_mode([n.meta.get("val") for n in self.gm.graph.nodes])

    def call(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node; its fake value is computed."""
        node = self.make(like, None, target, *args, **kwargs)
        fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode or contextlib.nullcontext():
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def make(self, like: Node, value: object, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node whose fake value is known."""
        node = self.gm.graph.call_function(target, args, kwargs)
        for key in (
            "stack_trace",
            "nn_module_stack",
            "seq_nr",
            "partitioner_tag",
            "recompute",
            "ac_graph_id",
            "autograd_backward",
        ):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        node.meta["val"] = value
        return node

    def replace_items(self, node: Node, results: Mapping[int, Node]) -> None:
        """Puts ``results`` in place of the items of ``node``."""
        self.replace_items_later(node, results)
        self.finish()

    def replace_items_later(self, node: Node, results: Mapping[int, Node]) -> None:
        """The same, but among the results of the graph only in ``finish``, which has to be called."""
        for user in list(node.users):
            assert user.target is operator.getitem
            place = user.args[1]
            assert isinstance(place, int)
            user.replace_all_uses_with(results[place], delete_user_cb=lambda u: u.op != "output")
            if user.users:
                self.given_out[user] = results[place]
            else:
                self.gm.graph.erase_node(user)
        if node.users:
            self.emptied.append(node)
        else:
            self.gm.graph.erase_node(node)

    def finish(self) -> None:
        """Every change of a long list of results copies it: all of them at once."""
        if not self.given_out:
            return
        output = self.gm.graph.output_node()
        output.args = torch.fx.node.map_arg(output.args, lambda n: self.given_out.get(n, n))
        for node in (*self.given_out, *self.emptied):
            self.gm.graph.erase_node(node)
        self.given_out.clear()
        self.emptied.clear()


def only_items(node: Node) -> bool:
    return all(u.target is operator.getitem for u in node.users)


def split_dropout(rw: Rewriter, node: Node) -> bool:
    """native_dropout(x, p) -> x * bernoulli(1-p) * 1/(1-p)"""
    x, p, train = ops.operand(node, 0), node.args[1], node.args[2]
    t = ops.tensor(x)
    if not isinstance(p, float) or not 0 < p < 1 or train is not True or not only_items(node):
        return False
    if t.device.type != "cpu" or t.dtype not in ops.SHORT:
        return False
    if not t.is_contiguous():
        return False  # ATen draws in the order of memory; bernoulli(p) alone in that of the indices
    scale = float(torch.tensor(1.0, dtype=t.dtype) / (1 - p))  # rounded to the dtype, as eager's noise tensor is
    with rw.gm.graph.inserting_before(node):
        like = rw.call(node, aten.empty_like.default, x, dtype=torch.bool)
        mask = rw.call(node, aten.bernoulli.p, like, 1 - p)
        kept = rw.call(node, aten.mul.Tensor, x, mask)
        out = rw.call(node, aten.mul.Tensor, kept, scale)
    for reader in backwards_of(node):
        reader.args = (*reader.args[:2], scale)
    rw.replace_items_later(node, {0: out, 1: mask})
    return True


def backwards_of(node: Node) -> list[Node]:
    """The gradients of a dropout: those that read its mask, or a detached alias of it."""
    masks = [i for i in node.users if i.args[1] == 1]
    for mask in masks:
        masks += [a for a in mask.users if ops.name_of(a) in ("detach.default", "alias.default")]
    return [r for m in masks for r in m.users if ops.name_of(r) == "native_dropout_backward.default"]


def split_nll(rw: Rewriter, node: Node) -> bool:
    """nll_loss_forward(logp, target) -> losses of rows, their sum, and how many count"""
    logp, target, weight, reduction, ignore = node.args
    assert isinstance(logp, Node)
    t = ops.tensor(logp)
    exact = t.dtype in (torch.float32, torch.float64)
    if weight is not None or reduction == 0 or t.dim() != 2 or not (exact or t.device.type == "cuda"):
        return False
    if not only_items(node):
        return False
    with rw.gm.graph.inserting_before(node):
        rows = rw.call(node, aten.nll_loss_forward.default, logp, target, None, 0, ignore)
        losses = rw.call(node, operator.getitem, rows, 0)
        wide = t.dtype if exact else torch.float32
        total = rw.call(node, aten.sum.default, losses, **({} if exact else {"dtype": wide}))
        counted = rw.call(node, aten.ne.Scalar, target, ignore)
        number = rw.call(node, aten.sum.default, counted)
        weight_sum = rw.call(node, aten._to_copy.default, number, dtype=t.dtype)
        loss = total
        if reduction == 1:
            divisor = weight_sum if exact else rw.call(node, aten._to_copy.default, number, dtype=wide)
            loss = rw.call(node, aten.div.Tensor, total, divisor)
        if not exact:
            loss = rw.call(node, aten._to_copy.default, loss, dtype=t.dtype)
    rw.replace_items_later(node, {0: loss, 1: weight_sum})
    return True


def split_layer_norm_backward(rw: Rewriter, node: Node) -> bool:
    """native_layer_norm_backward -> dx, and dweight with dbias"""
    mask = node.args[7]
    if not isinstance(mask, (list, tuple)) or not mask[0] or not (mask[1] or mask[2]) or not only_items(node):
        return False
    rest = node.args[:7]
    if len({ops.tensor(a).dtype for a in rest[:2] + rest[5:] if isinstance(a, Node)}) > 1:
        return False  # ATen computes it, in one call
    with rw.gm.graph.inserting_before(node):
        value = node.meta["val"]
        first = rw.make(node, (value[0], None, None), node.target, *rest, [True, False, False])
        second = rw.make(node, (None, *value[1:]), node.target, *rest, [False, mask[1], mask[2]])
        sources = {0: first, 1: second, 2: second}
        results = {}
        for place in sorted({u.args[1] for u in node.users}):  # type: ignore[type-var]
            assert isinstance(place, int)
            results[place] = rw.make(node, value[place], operator.getitem, sources[place], place)
    rw.replace_items_later(node, results)
    return True


def split_fma(rw: Rewriter, node: Node) -> bool:
    """prims.fma(x, y, z) -> x * y + z"""
    x, y, z = node.args
    with rw.gm.graph.inserting_before(node):
        out = rw.call(node, aten.add.Tensor, rw.call(node, aten.mul.Tensor, x, y), z)
    node.replace_all_uses_with(out)
    rw.gm.graph.erase_node(node)
    return True


RULES: Mapping[str, Rule] = {
    "prims.fma.default": split_fma,
    "native_dropout.default": split_dropout,
    "nll_loss_forward.default": split_nll,
    "native_layer_norm_backward.default": split_layer_norm_backward,
}


def share_views(gm: GraphModule) -> int:
    """Two views of one node with the same arguments -> the first of them, unless one of them is a result itself."""
    seen: dict[tuple[object, ...], Node] = {}
    results = set(next(n for n in reversed(gm.graph.nodes) if n.op == "output").all_input_nodes)
    count = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not ops.is_alias(node) or node in results:
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), node.meta.get("partitioner_tag"))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
            count += 1
    return count


def _frozen(a: object) -> object:
    if isinstance(a, (list, tuple)):
        return tuple(_frozen(x) for x in a)
    if isinstance(a, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(a.items()))
    return (type(a).__name__, a)


def drop_dead(gm: GraphModule) -> int:
    """Nodes that nobody reads and that neither write, draw random numbers, nor check anything."""
    count = 0
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "call_function" or node.users or not is_pure(node):
            continue
        gm.graph.erase_node(node)
        count += 1
    return count


def is_pure(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    return ops.info(node).kind in ("pointwise", "reduction", "rowwise", "create", "view") and not ops.may_fail(node)
