"""The rewrite of ``sparsify``: masks, masked products, and what a layer leaves in the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsc import cost, live, nm, ops
from dsc.notes import notes, set_notes
from dsc.passes import sparsify_kernels
from dsc.passes.canonicalize import Rewriter
from dsc.passes.linears import PRODUCTS, Linear
from dsc.passes.sparsify_cost import Times
from dsc.runtime.state import State
from dsc.target import Target
from dsc.torch_shim import unset_fake_temporarily

if TYPE_CHECKING:
    from dsc.passes.sparsify import Sparsify

aten = torch.ops.aten
SMOOTH = 0.95
"""How much of a running mean stays at each step."""


def entry(layer: str, name: str) -> str:
    """The state's name of what a layer keeps there."""
    return f"sparsity.{layer}.{name}"


def form(p: Sparsify) -> list[int]:
    """What the state says of a layer's masks, for those who have no graph: see ``nm.FORM``."""
    return [*p.nm, int(p.transposable), p.refresh, nm.IMPORTANCES.index(p.importance)]


def apply(gm: GraphModule, p: Sparsify, chosen: Sequence[tuple[Linear, Times]], target: Target) -> float:
    """Rewrite the layers; the operations of products that have a sparse operand now."""
    rw = Rewriter(gm)
    first = min((n for x, _ in chosen for n in x.weight.users), key=list(gm.graph.nodes).index)
    shared = _shared(rw, p, first, training=any(x.gradient is not None for x, _ in chosen))
    return sum(_Layer(rw, p, x, how.kernel, target, shared).rewrite() for x, how in chosen)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Nodes that stand for what all layers read."""

    step: Node
    dense_from: Node


def put(rw: Rewriter, state: State, name: str, make: Callable[[], Tensor], device: torch.device) -> None:
    """An entry of the state on a device; where a graph is planned for a GPU that is not here, one without values."""

    def absent() -> Tensor:
        assert rw.mode is not None
        with rw.mode:
            return make()

    here = device.type != "cuda" or torch.cuda.is_available()
    state.put(name, make if here else absent)


def _shared(rw: Rewriter, p: Sparsify, first: Node, training: bool) -> _Shared:
    dense_from = -1 if p.dense_tail is None else p.dense_tail
    state = p.state
    device = ops.tensor(first).device
    state.put("sparsity.step", lambda: torch.zeros((), dtype=torch.int64))
    state.put("sparsity.dense_from", lambda: torch.tensor(dense_from))
    put(rw, state, "sparsity.decay", lambda: torch.full((), float(p.decay), device=device), device)
    put(rw, state, "sparsity.gate", lambda: torch.full((), float(p.gate_threshold), device=device), device)
    with rw.gm.graph.inserting_before(first):
        step = _tagged(live.read(rw.gm, state, "sparsity.step"), first)
        since = _tagged(live.read(rw.gm, state, "sparsity.dense_from"), first)
        if training:
            live.update(rw.gm, state, "sparsity.step", rw.call(first, aten.add.Tensor, step, 1))
    return _Shared(step, since)


def _tagged(node: Node, like: Node) -> Node:
    if "partitioner_tag" in like.meta:
        node.meta["partitioner_tag"] = like.meta["partitioner_tag"]
    return node


@dataclass(frozen=True)
class _Layer:
    """One layer on its way to being sparse."""

    rw: Rewriter
    p: Sparsify
    x: Linear
    kernel: str
    target: Target
    shared: _Shared

    @property
    def graph(self) -> torch.fx.Graph:
        return self.rw.gm.graph

    def read(self, name: str, like: Node, make: Callable[[], Tensor]) -> Node:
        """An entry of this layer, made if it is not there yet, at the insertion point."""
        key = entry(self.x.layer, name)
        put(self.rw, self.p.state, key, make, ops.tensor(self.x.weight).device)
        return _tagged(live.read(self.rw.gm, self.p.state, key), like)

    def store(self, name: str, value: Node) -> None:
        live.update(self.rw.gm, self.p.state, entry(self.x.layer, name), value)

    def rewrite(self) -> float:
        x = self.x
        weight, shape = x.weight, tuple(int(d) for d in ops.tensor(x.weight).shape)
        users = list(weight.users)
        first = min(users, key=list(self.graph.nodes).index)
        work = cost.flops(x.forward)
        self.p.state.put(entry(x.layer, "work"), lambda: torch.tensor(work, dtype=torch.float64))
        with self.graph.inserting_before(first):
            mask, keep = self.mask(first, shape)
            hidden = self.rw.call(first, aten.logical_not.default, mask)
            masked = self.rw.call(first, aten.masked_fill.Scalar, weight, hidden, 0)
        for u in users:
            if u.op != "output":
                u.replace_input_with(weight, masked)
        if self.kernel != "masked":
            x = sparsify_kernels.replaced(self.rw, x, self.kernel, self.p, masked, keep)
        sparse = [x.forward]
        if x.dgrad is not None and self.p.transposable:
            sparse.append(x.dgrad)
        done = work * len(sparse)
        for n in sparse:
            set_notes(n, replace(notes(n), sparsity=self.p.pattern))
        if x.gradient is not None:
            replace(self, x=x).backward(mask)
        return done

    # --- forward -------------------------------------------------------------------------------------------------------

    def mask(self, first: Node, shape: tuple[int, ...]) -> tuple[Node, Node]:
        """The mask of this step, of which the state keeps what is told, and how many of M it keeps."""
        p, (n, m) = self.p, self.p.nm
        device = ops.tensor(self.x.weight).device
        old = self.read("mask", first, lambda: torch.ones(shape, dtype=torch.bool, device=device))
        keep = self.read("keep", first, lambda: torch.tensor(n))
        keep = self.rw.call(first, torch.ops.dsc.nm_keep.default, keep, self.shared.step, self.shared.dense_from, m)
        training = self.x.gradient is not None
        self.p.state.put(entry(self.x.layer, "form"), lambda: torch.tensor(form(p)))
        if not training and p.refresh > 1:
            return old, keep
        score = self.score(first, shape)
        if p.refresh == 1:
            mask = self.rw.call(first, torch.ops.dsc.nm_mask.default, score, keep, m, p.transposable)
        else:
            op = torch.ops.dsc.nm_refresh.default
            mask = self.rw.call(first, op, score, keep, old, self.shared.step, p.refresh, m, p.transposable)
        if training:
            stats = self.read("stats", first, lambda: torch.zeros(len(nm.STATS), dtype=torch.float64, device=device))
            told = self.rw.call(first, torch.ops.dsc.nm_stats.default, self.x.weight, mask, old, stats)
            self.store("mask", mask)
            self.store("stats", told)
        return mask, keep

    def score(self, first: Node, shape: tuple[int, ...]) -> Node:
        """[N, K], not negative: the larger, the more is lost without the weight."""
        weight, size = self.x.weight, self.rw.call(first, aten.abs.default, self.x.weight)
        kind = self.p.importance
        if kind == "magnitude":
            return size
        like = ops.tensor(weight)
        wide = (shape[1],) if kind == "wanda" else shape
        scale = self.read("scale", first, lambda: torch.ones(wide, dtype=torch.float32, device=like.device))
        match kind:
            case "wanda":
                if self.x.gradient is not None:
                    self.follow_inputs(scale)
                return self.rw.call(first, aten.mul.Tensor, size, self.rw.call(first, aten.sqrt.default, scale))
            case "taylor":
                return self.rw.call(first, aten.mul.Tensor, size, self.rw.call(first, aten.abs.default, scale))
            case _:
                scale = self.rw.call(first, aten.clamp_min.default, scale, 0.0)
                square = self.rw.call(first, aten.mul.Tensor, size, size)
                return self.rw.call(first, aten.mul.Tensor, square, scale)

    def follow_inputs(self, scale: Node) -> None:
        """Running mean of the squares of each input column, for the next step."""
        product = self.x.forward
        x = ops.operand(product, PRODUCTS[ops.name_of(product)])
        with self.graph.inserting_before(product):
            wide = self.rw.call(product, aten._to_copy.default, x, dtype=torch.float32)
            square = self.rw.call(product, aten.mul.Tensor, wide, wide)
            new = self.rw.call(product, aten.mean.dim, square, [0])
            self.store("scale", self.mixed(product, scale, new))

    def mixed(self, like: Node, old: Node, new: Node) -> Node:
        kept = self.rw.call(like, aten.mul.Tensor, old, SMOOTH)
        return self.rw.call(like, aten.add.Tensor, kept, self.rw.call(like, aten.mul.Tensor, new, 1 - SMOOTH))

    # --- backward ------------------------------------------------------------------------------------------------------

    def backward(self, mask: Node) -> None:
        assert self.x.gradient is not None and self.x.wgrad is not None
        output = self.graph.output_node()
        results = list(output.args[0])  # type: ignore[arg-type]
        gradient = results[self.x.gradient]
        like = self.x.wgrad
        with self.graph.inserting_before(output):
            self.follow_gradients(like, gradient)
            decay = _tagged(live.read(self.rw.gm, self.p.state, "sparsity.decay"), like)
            pruned = self.rw.call(like, aten.masked_fill.Scalar, self.x.weight, mask, 0)
            pulled = self.rw.call(like, aten.mul.Tensor, pruned, decay)
            results[self.x.gradient] = self.rw.call(like, aten.add.Tensor, gradient, pulled)
        output.args = (tuple(results), *output.args[1:])
        if self.target.kind == "cpu":
            self.gate()

    def follow_gradients(self, like: Node, gradient: Node) -> None:
        """What importance and balance want to know of the gradient, for the next step."""
        shape, device = tuple(ops.tensor(self.x.weight).shape), ops.tensor(self.x.weight).device
        wide = gradient
        if self.p.importance in ("fisher", "taylor"):
            if ops.tensor(gradient).dtype != torch.float32:
                wide = self.rw.call(like, aten._to_copy.default, gradient, dtype=torch.float32)
            new = self.rw.call(like, aten.mul.Tensor, wide, wide) if self.p.importance == "fisher" else wide
            old = self.read("scale", like, lambda: torch.ones(shape, dtype=torch.float32, device=device))
            self.store("scale", self.mixed(like, old, new))
        if self.p.balanced:
            old = self.read("cost", like, lambda: torch.zeros((), dtype=torch.float32, device=device))
            each = self.rw.call(like, aten.mul.Tensor, gradient, self.x.weight)
            square = self.rw.call(like, aten.mul.Tensor, each, each)
            new = self.rw.call(like, aten.sum.default, square, dtype=torch.float32)
            self.store("cost", self.mixed(like, old, new))

    def gate(self) -> None:
        """``mm(g, w)`` and ``mm(g.T, x)`` -> the same over the rows of g that are alive."""
        dgrad, wgrad = self.x.dgrad, self.x.wgrad
        g = gradient_rows(wgrad)
        if g is None or wgrad is None or (dgrad is not None and dgrad.args[0] is not g):
            return
        both = [n for n in (dgrad, wgrad) if n is not None]
        early = min(both, key=list(self.graph.nodes).index)
        with self.graph.inserting_before(early):
            gate = _tagged(live.read(self.rw.gm, self.p.state, "sparsity.gate"), early)
            alive = self.rw.call(early, torch.ops.dsc.alive_rows.default, g, gate)
            counted = self.rw.call(early, aten._to_copy.default, alive, dtype=torch.float32)
            share = self.rw.call(early, aten.mean.default, counted)
            self.p.state.put(entry(self.x.layer, "alive"), lambda: torch.ones((), dtype=torch.float32))
            self.store("alive", share)
        for n, op, right in (
            (dgrad, torch.ops.dsc.mm_of_rows.default, None if dgrad is None else dgrad.args[1]),
            (wgrad, torch.ops.dsc.mm_over_rows.default, wgrad.args[1]),
        ):
            if n is None:
                continue
            with self.graph.inserting_before(n):
                new = self.rw.call(n, op, g, right, alive)
            set_notes(new, notes(n))
            n.replace_all_uses_with(new)
            self.graph.erase_node(n)


def gradient_rows(wgrad: Node | None) -> Node | None:
    """G of ``mm(g.T, x)``: [M, N]."""
    turned = wgrad.args[0] if wgrad is not None else None
    if isinstance(turned, Node) and ops.name_of(turned) == "t.default":
        return ops.operand(turned, 0)
    return None


def fill(tensor: Tensor, values: Sequence[float]) -> None:
    """Write numbers into an entry of a state, while a graph is traced."""
    with unset_fake_temporarily(), torch.no_grad():
        tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
