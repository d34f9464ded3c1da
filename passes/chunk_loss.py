"""A linear layer and the cross entropy of what it gives, in chunks of rows: the logits are never there as a whole."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from dsc import ops
from dsc.manager import Pass, Remark, Report
from dsc.passes.canonicalize import Rewriter
from dsc.steps import view_chain
from dsc.target import Target
from dsc.torch_shim import optimization_hint

aten = torch.ops.aten
HALF = (torch.bfloat16,)


@dataclass(frozen=True)
class ChunkLoss(Pass):
    """``cross_entropy(x @ w + b, target)`` and its gradients, some rows at a time.

    1. Each chunk makes its logits, its part of the loss, and at once its part of the gradients of ``x``, ``w`` and
       ``b`` for a loss whose own gradient is 1, so that the logits die with the chunk.  The backward multiplies by the
       gradient of the loss.  The idea is Liger Kernel's FusedLinearCrossEntropy (Hsu et al. 2024).
    2. Fires if the logits (counted as fp32) have ``least`` bytes or more.  A chunk has about ``chunk`` bytes of them;
       there are at most ``most`` chunks, for each adds to the gradient of ``w`` in memory.  The number of rows may vary.
    3. Rows are computed as before; the gradients of ``w`` and ``b`` are sums of chunks, in fp32.
    4. Does not fire: 16 bits and so wide a layer that the sums take more than half of the logits, logits that something else reads too, class weights, label smoothing, a loss a row, no gradient,
       fp16 (its gradients need the scale of the loss), bf16 on a CPU (whose products round to it).
    """

    name: ClassVar[str] = "chunk-loss"
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"

    least: int | None = None
    """Bytes of logits; None: 256 MiB, on GPUs no less than 1/8 of the memory, since chunks cost time there."""
    chunk: int = 1 << 25
    """Bytes of logits at a time."""
    most: int = 16
    rows: int = 512
    """Fewest rows of a chunk on a GPU, whose products would be slow."""

    def run(self, gm: GraphModule, target: Target) -> Report:
        rw = Rewriter(gm)
        remarks = []
        order = {n: i for i, n in enumerate(gm.graph.nodes)}
        for node in list(gm.graph.nodes):
            if node.op != "call_function" or ops.name_of(node) != "nll_loss_forward.default":
                continue
            found = match(node, order)
            if isinstance(found, str):
                remarks.append(Remark(node.name, "skipped", f"logits stay whole: {found}"))
                continue
            size, on_gpu = bytes_of(found.logits), target.kind == "cuda"
            least = max(1 << 28, int(target.memory) // 8 if on_gpu else 0) if self.least is None else self.least
            if size < least:
                remarks.append(Remark(node.name, "skipped", f"logits stay whole: {size} bytes, less than {least}"))
                continue
            if found.products and (extra := 2 * sums_bytes(found)) > size // 2:
                remarks.append(
                    Remark(node.name, "skipped", f"logits stay whole: sums in fp32 would take {extra} bytes")
                )
                continue
            count = chunks(found.logits, self.chunk, self.most, self.rows if on_gpu else 1)
            if count < 2:
                remarks.append(Remark(node.name, "skipped", "logits stay whole: too few rows for chunks"))
                continue
            rewrite(rw, found, count)
            remarks.append(Remark(node.name, "did", f"{size} bytes of logits in {count} chunks"))
        return Report(any(r.verdict == "did" for r in remarks), tuple(remarks))


@dataclass(frozen=True)
class Product:
    """A gradient that a product with the gradient of the logits ``g`` gives."""

    node: Node
    kind: Literal["rows", "left", "right", "sum"]
    """rows: g @ other; left: g.t() @ other; right: other.t() @ g; sum: of the rows of g."""
    other: Node | None = None


@dataclass(frozen=True)
class Loss:
    logits: Node
    """The product that makes them: mm or addmm."""
    wide: torch.dtype
    """Of the log-softmax."""
    forward: Node
    target: Node
    gradient: Node
    """Of the loss, in the backward."""
    products: tuple[Product, ...]


def match(forward: Node, order: Mapping[Node, int]) -> Loss | str:
    """The parts of a loss, or why it stays as it is."""
    logp, target, weight, reduction, ignore = forward.args
    if not (isinstance(logp, Node) and isinstance(target, Node)) or weight is not None or reduction == 0:
        return "class weights, or a loss a row"
    if ops.name_of(logp) != "_log_softmax.default" or logp.args[1:] not in ((1, False), (-1, False)):
        return "no log-softmax of rows before it"
    top = through(ops.operand(logp, 0))
    *between, product = top
    if ops.name_of(product) not in ("mm.default", "addmm.default"):
        return "no matrix product before it"
    if ops.name_of(product) == "addmm.default" and (product.kwargs or ops.tensor(ops.operand(product, 0)).dim() != 1):
        return "a product that is scaled"
    t, shape = ops.tensor(product), ops.tensor(product).shape
    if ops.tensor(logp).shape != shape or t.dtype not in (torch.float32, *HALF):
        return f"{t.dtype} logits, or in another shape"
    if t.dtype in HALF and (t.device.type != "cuda" or not hasattr(aten.mm, "dtype")):
        return "products of 16 bits on a CPU round to them"
    backward = [u for u in logp.users if ops.name_of(u) == "nll_loss_backward.default"]
    copies = followers(logp)
    ends = [u for c in copies for u in c.users if ops.name_of(u) == "_log_softmax_backward_data.default"]
    if len(backward) != 1 or len(ends) != 1 or ends[0].args[0] is not backward[0] or ends[0].args[1] not in copies:
        return "no gradient, or the log-probabilities are read"
    if any(u not in (forward, backward[0], ends[0], *copies) for c in copies for u in c.users):
        return "the log-probabilities are read"
    if any(len(n.users) != 1 for n in (*between, product)) or set(backward[0].users) != {ends[0]}:
        return "the logits are read"
    if backward[0].args[2:6] != (target, None, reduction, ignore):
        return "another loss in the backward"
    gradient = ops.operand(backward[0], 0)
    products = list(gradients(ends[0], shape))
    if not products or any(p is None for p in products):
        return "gradients that are no products"
    found = tuple(p for p in products if p is not None)
    roots = [view_chain(p.other)[-1] for p in found if p.other is not None]
    if any(not in_forward(r) or order[r] > order[forward] for r in roots):
        return "gradients that need the backward"
    return Loss(product, ops.tensor(logp).dtype, forward, target, gradient, found)


def through(n: Node) -> list[Node]:
    """From a value to the one that it is a view or a wider copy of, all on the way included."""
    out = [n]
    while out[-1].op == "call_function" and (ops.is_view(out[-1]) or widens(out[-1])):
        out.append(ops.operand(out[-1], 0))
    return out


def widens(n: Node) -> bool:
    return ops.name_of(n) == "_to_copy.default" and ops.tensor(n).device == ops.tensor(ops.operand(n, 0)).device


def followers(n: Node) -> list[Node]:
    """A value and its detached aliases."""
    out = [n]
    for m in out:
        out += [u for u in m.users if ops.name_of(u) in ("detach.default", "alias.default")]
    return out


def in_forward(n: Node) -> bool:
    return n.meta.get("partitioner_tag") != "is_backward"


def gradients(g: Node, shape: Any) -> Iterator[Product | None]:
    """What reads the gradient of the logits, through views and copies; None: something that is no product."""
    for u in g.users:
        name = ops.name_of(u)
        if name in KEEPS or widens(u):
            yield from gradients(u, shape)
        elif ops.tensor(g).shape != shape:
            yield None
        elif name == "mm.default" and u.args[0] is g and u.args[1] is not g:
            yield Product(u, "rows", ops.operand(u, 1))
        elif name == "mm.default" and u.args[1] is g:
            yield Product(u, "right", ops.operand(u, 0))
        elif name in ("t.default", "permute.default", "transpose.int") and ops.tensor(u).shape == shape[::-1]:
            for v in u.users:
                fits = ops.name_of(v) == "mm.default" and v.args[0] is u and v.args[1] is not u
                yield Product(v, "left", ops.operand(v, 1)) if fits else None
        elif name == "sum.dim_IntList" and tuple(u.args[1]) == (0,) and not u.kwargs:  # type: ignore[arg-type]
            yield Product(u, "sum")
        else:
            yield None


KEEPS = frozenset("view.default _unsafe_view.default reshape.default detach.default alias.default".split())


def bytes_of(logits: Node) -> int:
    t = ops.tensor(logits)
    return int(optimization_hint(t.numel())) * 4  # as fp32, in which they are or soon would be


def sums_bytes(loss: Loss) -> int:
    """Of the gradients that are summed in fp32 though they have 16 bits: memory that the unfused form does not take."""
    sums = [ops.tensor(p.node) for p in loss.products if p.kind in ("left", "right")]
    return sum(int(optimization_hint(t.numel())) * 4 for t in sums if t.dtype != torch.float32)


def chunks(logits: Node, size: int, most: int, least_rows: int) -> int:
    """Near the number wanted; one that leaves chunks of equal length if there is such a one."""
    rows = ops.tensor(logits).shape[0]
    wanted = min(most, -(-bytes_of(logits) // size), int(optimization_hint(rows)) // least_rows)
    if not isinstance(rows, int):
        return wanted
    return next((c for c in range(wanted, wanted // 2, -1) if rows % c == 0), wanted)


# --- rewriting -----------------------------------------------------------------------------------------------------------


def rewrite(rw: Rewriter, loss: Loss, count: int) -> None:
    old = below(loss.logits, {p.node for p in loss.products})
    with rw.gm.graph.inserting_before(loss.forward):
        made = Chunks(rw, loss, count)
        total, weight = made.run()
    rw.replace_items(loss.forward, {0: total, 1: weight})
    for p in loss.products:
        with rw.gm.graph.inserting_before(p.node):
            t = ops.tensor(p.node)
            found = made.found[p.node]
            scaled = rw.call(p.node, aten.mul.Tensor, found, loss.gradient)
            if ops.tensor(scaled).dtype != t.dtype:
                scaled = rw.call(p.node, aten._to_copy.default, scaled, dtype=t.dtype)
        p.node.replace_all_uses_with(scaled)
    for n in reversed(list(rw.gm.graph.nodes)):
        if n in old and not n.users:
            rw.gm.graph.erase_node(n)


def below(start: Node, ends: set[Node]) -> set[Node]:
    """All that needs ``start``, down to ``ends``."""
    out, stack = {start}, [start]
    while stack:
        for u in stack.pop().users:
            if u not in out and u.op == "call_function":
                out.add(u)
                stack += [] if u in ends else [u]
    return out


@dataclass
class Chunks:
    """Makes the nodes of all chunks, in the forward."""

    rw: Rewriter
    loss: Loss
    count: int

    def __post_init__(self) -> None:
        self.like = self.loss.forward
        self.parts: dict[Node, list[Node]] = {}
        self.views: dict[Any, Node] = {}
        self.found: dict[Node, Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.rw.call(self.like, target, *args, **kwargs)

    def run(self) -> tuple[Node, Node]:
        """The loss, and the weight of all rows."""
        logits, forward = self.loss.logits, self.loss.forward
        with_bias = ops.name_of(logits) == "addmm.default"
        x, w = (ops.operand(logits, i + with_bias) for i in (0, 1))
        reduction, ignore = forward.args[3], forward.args[4]
        wide = self.loss.wide
        device = ops.tensor(logits).device
        counted = self.call(aten.sum.default, self.call(aten.ne.Scalar, self.loss.target, ignore))
        weight32 = self.call(aten._to_copy.default, counted, dtype=torch.float32)
        weight = weight32 if wide == torch.float32 else self.call(aten._to_copy.default, counted, dtype=wide)
        one = self.call(aten.full.default, [], 1.0, dtype=wide, device=device, pin_memory=False)
        losses: Node | None = None
        for i in range(self.count):
            target = self.rows(self.loss.target, i)
            part = self.rows(x, i)
            product = (aten.addmm.default, logits.args[0]) if with_bias else (aten.mm.default,)
            made = self.call(*product, part, w)
            z = made if ops.tensor(made).dtype == wide else self.call(aten._to_copy.default, made, dtype=wide)
            logp = self.call(aten._log_softmax.default, z, 1, False)
            lost = self.call(aten.nll_loss_forward.default, logp, target, None, 0, ignore)
            rows = self.call(operator.getitem, lost, 0)
            summed = self.call(aten.sum.default, rows, dtype=torch.float32)
            losses = summed if losses is None else self.call(aten.add.Tensor, losses, summed)
            picked = self.call(aten.nll_loss_backward.default, one, logp, target, None, reduction, ignore, weight)
            g = self.call(aten._log_softmax_backward_data.default, picked, logp, 1, wide)
            if wide != ops.tensor(made).dtype:
                g = self.call(aten._to_copy.default, g, dtype=ops.tensor(made).dtype)
            for p in self.loss.products:
                self.add(p, g, i)
        for p in self.loss.products:
            if p.kind == "rows":
                self.found[p.node] = self.call(aten.cat.default, self.parts[p.node], 0)
        assert losses is not None
        total = losses if reduction == 2 else self.call(aten.div.Tensor, losses, weight32)
        return total if wide == torch.float32 else self.call(aten._to_copy.default, total, dtype=wide), weight

    def add(self, p: Product, g: Node, i: int) -> None:
        """One chunk's part of a gradient."""
        if p.kind == "rows":
            self.parts.setdefault(p.node, []).append(self.call(aten.mm.default, g, self.seen(p.other)))
            return
        have = self.found.get(p.node)
        if p.kind == "sum":
            summed = self.call(
                aten.sum.dim_IntList, g, [0], bool(p.node.args[2:] and p.node.args[2]), dtype=torch.float32
            )
            self.found[p.node] = summed if have is None else self.call(aten.add.Tensor, have, summed)
            return
        if p.kind == "left":
            left, right = self.call(aten.t.default, g), self.rows(p.other, i)
        else:
            left, right = self.columns(p.other, i), g
        self.found[p.node] = self.product(have, left, right)

    def product(self, have: Node | None, left: Node, right: Node) -> Node:
        """``left @ right`` in fp32, added to what there is (in its place: see ``dsc.link``)."""
        if ops.tensor(left).dtype == torch.float32:
            if have is None:
                return self.call(aten.mm.default, left, right)
            return self.call(aten.addmm.default, have, left, right)
        made = self.call(aten.mm.dtype, left, right, torch.float32)
        return made if have is None else self.call(aten.add.Tensor, have, made)

    def seen(self, n: Node | None) -> Node:
        """A value of the forward, its views made again there."""
        assert n is not None
        if n.op != "call_function" or not ops.is_view(n):
            return n
        inner = self.seen(ops.operand(n, 0))
        key = ("seen", n)
        if key not in self.views:
            self.views[key] = self.call(n.target, inner, *n.args[1:], **n.kwargs)
        return self.views[key]

    def rows(self, n: Node | None, i: int) -> Node:
        """Chunk ``i`` of the first dimension."""
        return self.piece(self.seen(n), 0, i)

    def columns(self, n: Node | None, i: int) -> Node:
        return self.piece(self.seen(n), 1, i)

    def piece(self, n: Node, dim: int, i: int) -> Node:
        if ("pieces", n, dim) not in self.views:
            # targets get memory of their own: one kernel serves all chunks, which would else differ in where theirs start
            split = aten.split_with_sizes_copy if n is self.loss.target else aten.split_with_sizes
            self.views["pieces", n, dim] = self.call(split.default, n, self.lengths(), dim)
        if ("piece", n, dim, i) not in self.views:
            self.views["piece", n, dim, i] = self.call(operator.getitem, self.views["pieces", n, dim], i)
        return self.views["piece", n, dim, i]

    def lengths(self) -> list[Any]:
        """Rows of every chunk: numbers, or nodes of sizes."""
        rows = ops.tensor(self.loss.logits).shape[0]
        if isinstance(rows, int):
            each = rows // self.count
            return [each + (i < rows % self.count) for i in range(self.count)]
        if "lengths" not in self.views:
            whole = self.call(aten.sym_size.int, self.loss.target, 0)
            self.views["each"] = self.call(operator.floordiv, whole, self.count)
            before = self.call(operator.mul, self.views["each"], self.count - 1)
            self.views["lengths"] = self.call(operator.sub, whole, before)
        return [self.views["each"]] * (self.count - 1) + [self.views["lengths"]]
