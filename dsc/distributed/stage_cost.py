"""What each node of a forward graph costs in a train step on one card: forward, input gradients, weight gradients, bytes.

1. Products, convolutions and attention: a launch each by ``dsc.cost``.  Their backward does the same arithmetic once for
   each operand that has a gradient; attention's does 2.5 times the forward's.
2. All else is taken as fused: a value costs traffic only where it is read or written by another launch.  What stands
   between the same two products in the program is one launch.
3. A weight gradient is added to that of the micro-batches before: three times its bytes.
4. Saved for the backward: operands of products and attention, attention's result, operands of nonlinear functions; but
   not what pointwise functions make again of saved values.
5. With tensor parallelism, a product of whole operands makes a divided result (and its input gradient is summed over the
   cards), a product of a divided operand makes a whole one (and is summed itself): Shoeybi et al., "Megatron-LM", 2019
   (arXiv:1909.08053).  Experts are divided over the cards of ``expert``; their tokens travel twice each way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Node

from dsc import cost, ops
from dsc.distributed.cluster import Cluster
from dsc.distributed.forward import Forward
from dsc.distributed.plan import Degrees

CONVOLUTIONS = frozenset("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d".split())
LOOKUPS = frozenset(("embedding",))
RESHAPES = frozenset("reshape flatten contiguous _unsafe_view view_as".split())
LINEAR = frozenset(
    "add sub neg cat stack sum mean expand clone reshape contiguous index index_select gather scatter scatter_add "
    "index_add index_put dropout to _to_copy where masked_fill pad".split()
)
"""Functions whose backward needs no operand with a gradient."""
ATTENTION_BACKWARD = 2.5


@dataclass(slots=True)
class NodeCost:
    forward: float = 0.0
    dgrad: float = 0.0
    wgrad: float = 0.0
    saved: dict[Node, int] = field(default_factory=dict)
    """Values that the backward reads -> bytes on one card, by the node that made their storage."""
    late: int = 0
    """Bytes that the weight gradient reads."""


@dataclass(frozen=True)
class Layout:
    """How one card's share relates to the whole, and what sums over cards cost."""

    cluster: Cluster
    degrees: Degrees

    def sum_over_tensor(self, nbytes: float) -> float:
        """Seconds of an all-reduce of ``nbytes`` over the cards of a tensor-parallel group: a ring on the fastest link."""
        n = self.degrees.tensor
        if n == 1:
            return 0.0
        link = self.cluster.inside if n <= self.cluster.per_node else self.cluster.between
        return 2 * (n - 1) / n * link.seconds(nbytes) + 2 * math.log2(n) * link.latency

    def exchange(self, nbytes: float) -> float:
        """Seconds of an all-to-all of ``nbytes`` of each card over those that share experts."""
        n = self.degrees.expert
        if n == 1:
            return 0.0
        spread = n * self.degrees.tensor <= self.cluster.per_node
        link = self.cluster.inside if spread else self.cluster.between
        return (n - 1) / n * link.seconds(nbytes)


def costs(forward: Forward, layout: Layout) -> dict[Node, NodeCost]:
    """Of all calls of the graph, for one micro-batch on one card."""
    return _Pricing(forward, layout).run()


def packet(node: Node) -> str:
    """``linear`` of ``aten.linear.default``; of another function its name."""
    name = ops.name_of(node)
    return name.split(".")[0]


def has_experts(node: Node) -> bool:
    """Whether a three-dimensional parameter that the call reads holds an expert a slice: it multiplies batches of matrices."""
    return packet(node) in ("matmul", "bmm", "baddbmm", "_grouped_mm")


class _Pricing:
    def __init__(self, forward: Forward, layout: Layout) -> None:
        self.forward, self.layout = forward, layout
        self.target = layout.cluster.target
        self.bandwidth = self.target.bandwidth * cost.BANDWIDTH_EFFICIENCY
        self.launch = cost.LAUNCH_SECONDS[self.target.kind]
        self.weights: set[Node] = set()
        """Parameters, and views of them."""
        self.whole: set[Node] = set()
        """Parameters, buffers, and what is made of them alone."""
        self.graded: set[Node] = set()
        """Values that have a gradient."""
        self.root: dict[Node, Node] = {}
        """View -> the node that made its storage."""
        self.epoch: dict[Node, int] = {}
        """Products before a node in the program: launches of pointwise functions do not reach over them."""
        self.divided: set[Node] = set()
        self.expert: set[Node] = set()
        self.summed: set[Node] = set()
        """Values whose gradients are already counted as summed over cards."""
        self.remade: set[Node] = set()
        """Values that the backward makes again of saved ones."""
        self.kept: set[Node] = set()
        self.read_late: set[Node] = set()
        """Storages that weight gradients read, counted."""
        self.costs: dict[Node, NodeCost] = {}
        nodes = list(forward.gm.graph.nodes)
        self.order = {n: i for i, n in enumerate(nodes)}
        self.next_product = [len(nodes)] * len(nodes)
        """The place of the first product behind each node."""
        ahead = len(nodes)
        for i in range(len(nodes) - 1, -1, -1):
            self.next_product[i] = ahead
            if nodes[i].op == "call_function" and self.is_product(nodes[i]):
                ahead = i

    def run(self) -> dict[Node, NodeCost]:
        epoch = 0
        for node in self.forward.gm.graph.nodes:
            self.root[node] = node
            self.epoch[node] = epoch
            if node.op == "placeholder":
                if node.name in self.forward.parameters:
                    self.weights.add(node)
                if node.name not in self.forward.inputs:
                    self.whole.add(node)
                continue
            if node.op != "call_function":
                continue
            self.inherit(node)
            c = self.costs[node] = NodeCost()
            if self.is_view(node):
                self.root[node] = self.root[node.all_input_nodes[0]] if node.all_input_nodes else node
            elif node in self.whole:
                continue
            elif self.is_product(node):
                epoch += 1
                self.product(node, c)
            elif packet(node) in LOOKUPS and node.args and node.args[0] in self.weights:
                self.lookup(node, c)
            elif ops.info(node).kind != "create":
                self.pointwise(node, c)
        return self.costs

    # --- facts ---------------------------------------------------------------------------------------------------------

    def inherit(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if (inputs and all(a in self.whole for a in inputs)) or not inputs:
            self.whole.add(node)
        if self.is_view(node) and any(a in self.weights for a in inputs):
            self.weights.add(node)
        if any(a in self.weights or a in self.graded for a in inputs) and _is_float(node):
            self.graded.add(node)
        if not self.is_product(node):
            if any(a in self.divided for a in inputs):
                self.divided.add(node)
            if any(a in self.expert for a in inputs):
                self.expert.add(node)

    def is_view(self, node: Node) -> bool:
        """Whether a call gives its operand's bytes again; a reshape of what is spread out has to copy it."""
        if packet(node) not in RESHAPES:
            return ops.info(node).kind in ("view", "item")
        before = ops.value(node.all_input_nodes[0]) if node.all_input_nodes else None
        return not isinstance(before, Tensor) or all(s != 0 for n, s in zip(before.shape, before.stride()) if n != 1)

    def is_product(self, node: Node) -> bool:
        return cost.unit(node) != "vector" or packet(node) in CONVOLUTIONS

    def nbytes(self, node: Node) -> int:
        """Of a value on one card."""
        value = ops.value(node)
        if not isinstance(value, Tensor):
            return 0
        return int(cost.stored_bytes(value) / self.share(node))

    def share(self, node: Node) -> int:
        """Over how many cards of a tensor-parallel group a value is spread."""
        if node in self.divided:
            return self.layout.degrees.tensor
        return max(self.layout.degrees.sequence, 1) if node not in self.whole else 1

    def operands(self, node: Node) -> list[Node]:
        return [a for a in ops.tensor_operands(node) if isinstance(ops.value(a), Tensor)]

    def traffic(self, nbytes: float) -> float:
        return nbytes / self.bandwidth + self.launch if nbytes else 0.0

    # --- kinds of nodes --------------------------------------------------------------------------------------------------

    def product(self, node: Node, c: NodeCost) -> None:
        """Of a matrix product, a convolution or attention."""
        operands = self.operands(node)
        weights = [a for a in operands if a in self.weights]
        values = [a for a in operands if a not in self.weights]
        tensor, attention = self.layout.degrees.tensor, cost.unit(node) == "attention"
        is_expert = has_experts(node) and any(_rank(w) == 3 for w in weights)
        split = tensor > 1 and bool(weights or any(a in self.divided for a in values))
        enters = split and not any(a in self.divided for a in values)
        if split and (enters or not weights):
            self.divided.add(node)
        if is_expert or (not weights and any(a in self.expert for a in values)):
            self.expert.add(node)
        parts = tensor if split else max(self.layout.degrees.sequence, 1)
        once = self.arithmetic(node, parts)
        c.forward = once
        graded = [a for a in values if a in self.graded]
        if attention:
            c.dgrad = once * ATTENTION_BACKWARD if graded else 0.0
        else:
            c.dgrad = once * len(graded)
        heavy = [w for w in weights if _rank(w) > 1]
        c.wgrad = sum(once + self.traffic(3 * self.weight_bytes(w)) for w in heavy)
        c.wgrad += sum(self.traffic(self.nbytes(node) + 3 * self.weight_bytes(w)) for w in weights if w not in heavy)
        if graded or heavy:
            for a in values:
                self.save(a, c)
        if attention:
            self.save(node, c)
        if heavy:
            late = {self.root[a] for a in values} - self.read_late - self.whole
            self.read_late |= late
            c.late = sum(self.nbytes(a) for a in late) + self.nbytes(node)
        self.speak(node, c, enters, split and not enters and bool(weights), graded)
        if is_expert and not any(a in self.expert for a in values):
            moved = sum(cost.stored_bytes(ops.tensor(a)) for a in graded or values[:1])
            c.forward += 2 * self.layout.exchange(moved)
            c.dgrad += 2 * self.layout.exchange(moved)

    def speak(self, node: Node, c: NodeCost, enters: bool, leaves: bool, graded: list[Node]) -> None:
        """Add the sums over cards that tensor parallelism needs."""
        if leaves:
            c.forward += self.layout.sum_over_tensor(cost.stored_bytes(ops.tensor(node)))
        if enters:
            for a in graded:
                if (root := self.root[a]) not in self.summed:
                    self.summed.add(root)
                    c.dgrad += self.layout.sum_over_tensor(cost.stored_bytes(ops.tensor(a)))

    def arithmetic(self, node: Node, parts: int) -> float:
        """Seconds of one launch on one of ``parts`` cards."""
        if packet(node) in CONVOLUTIONS:
            flops = _convolution_flops(node)
            rate = self.convolution_rate(node)
        else:
            flops, rate = cost.flops(node), cost.rate(node, self.target)
        moved = cost.bytes_moved(node) / parts
        return max(flops / parts / rate, moved / self.bandwidth) + self.launch

    def convolution_rate(self, node: Node) -> float:
        names = cost.RATES.get(ops.tensor(node).dtype, ("fp32",))
        names = ("tf32", "fp32") if names == ("fp32",) else names
        peak = next((self.target.peak[n] for n in names if n in self.target.peak), self.target.peak["fp32"])
        return peak * cost.EFFICIENCY["convolution"]

    def weight_bytes(self, weight: Node) -> float:
        nbytes = cost.stored_bytes(ops.tensor(weight))
        return nbytes / (self.layout.degrees.expert if _rank(weight) == 3 else 1) / self.layout.degrees.tensor

    def lookup(self, node: Node, c: NodeCost) -> None:
        """Of rows of a table: its dense gradient is written and added whole, as eager does."""
        rows = self.nbytes(node)
        c.forward = self.traffic(2 * rows) + self.layout.sum_over_tensor(cost.stored_bytes(ops.tensor(node)))
        table = node.args[0]
        assert isinstance(table, Node)
        c.wgrad = self.traffic(2 * rows) + self.traffic(4 * self.weight_bytes(table))
        c.late = rows

    def pointwise(self, node: Node, c: NodeCost) -> None:
        """Of anything that fuses with its neighbours."""
        operands = self.operands(node)
        outside = [a for a in operands if a not in self.whole and self.is_outside(a, node)]
        read = sum(self.nbytes(a) for a in dict.fromkeys(outside))
        written = self.nbytes(node) if self.leaves(node) else 0
        c.forward = self.traffic(read + written)
        if node not in self.graded:
            return
        linear = packet(node) in LINEAR or (
            packet(node) in ("mul", "div") and sum(a not in self.whole for a in operands) < 2
        )
        values = [a for a in operands if a in self.graded and a not in self.weights]
        if not linear:
            for a in values:
                self.save(a, c)
            if packet(node) in ("softmax", "_softmax", "sigmoid", "tanh"):
                self.save(node, c)
        if all(self.root[a] in self.kept or self.root[a] in self.remade for a in values):
            self.remade.add(node)
        c.dgrad = self.traffic(read + written + (0 if linear else read))
        weights = [a for a in operands if a in self.weights]
        if weights:
            c.wgrad = self.traffic(2 * self.nbytes(node))
            c.late = self.nbytes(node)

    def is_outside(self, operand: Node, user: Node) -> bool:
        """Whether another launch made the operand."""
        root = self.root[operand]
        return root.op == "placeholder" or self.is_product(root) or self.epoch[root] != self.epoch[user]

    def leaves(self, node: Node) -> bool:
        """Whether another launch reads the value, or nothing does."""
        stack, seen = list(node.users), set()
        if not stack:
            return True
        while stack:
            user = stack.pop()
            if user in seen:
                continue
            seen.add(user)
            if user.op == "output" or self.is_product(user):
                return True
            if ops.info(user).kind in ("view", "item") or packet(user) in RESHAPES:
                stack += user.users
            elif self.later(user, node):
                return True
        return False

    def later(self, user: Node, node: Node) -> bool:
        """Whether a product stands between a node and one of its readers."""
        return self.order[user] > self.next_product[self.order[node]]

    def save(self, value: Node, c: NodeCost) -> None:
        """Keep a value for the backward, once, by the storage that it is in."""
        root = self.root[value]
        if root.op == "placeholder" or any(root in known for known in (self.whole, self.kept, self.remade)):
            return
        self.kept.add(root)
        size = self.nbytes(root) if isinstance(ops.value(root), Tensor) else self.nbytes(value)
        c.saved[root] = size


def _is_float(node: Node) -> bool:
    value = ops.value(node)
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in tensors)


def _rank(node: Node) -> int:
    return ops.tensor(node).dim()


def _convolution_flops(node: Node) -> float:
    weight = node.args[1]
    assert isinstance(weight, Node)
    w = ops.tensor(weight)
    result = ops.tensor(node) if "transpose" not in packet(node) else ops.tensor(ops.operand(node, 0))
    return 2.0 * result.numel() * w.numel() / max(int(w.shape[0]), 1)
