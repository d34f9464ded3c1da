"""State in graphs: forward and backward see the very same tensors, updates are seen, nothing is compiled again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

import dsc
import kit
from dsc import live
from dsc.errors import BadOption, BadState
from dsc.manager import Pass, Report
from dsc.runtime.state import State
from dsc.steps import view_chain
from dsc.target import Target

aten = torch.ops.aten


def new(gm: GraphModule, before: Node, target: object, *args: object) -> Node:
    with gm.graph.inserting_before(before):
        node = gm.graph.call_function(target, args)
    tag = before.meta.get("partitioner_tag")
    node.meta.update({"partitioner_tag": tag} if tag else {})
    shown = [a.meta["val"] if isinstance(a, Node) else a for a in args]
    with next(v for v in shown if isinstance(v, torch.Tensor)).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = target(*shown)  # type: ignore[operator]
    return node


@dataclass(frozen=True)
class Masked(Pass):
    """Every square weight times a mask from the state: in the forward, and again for the gradient of its input."""

    name: ClassVar[str] = "masked"
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"
    state: State = field(default_factory=State, compare=False)
    count: bool = False

    def run(self, gm: GraphModule, target: Target) -> Report:
        square = [p for p in gm.graph.find_nodes(op="placeholder") if tuple(p.meta["val"].shape) == (8, 8)]
        for product in [n for n in gm.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]:
            for turned in product.all_input_nodes:
                chain = view_chain(turned)
                if chain[-1] in square:
                    self.mask(gm, product, turned, chain, f"mask.{square.index(chain[-1])}")
        if self.count:
            self.counted(gm)
        return Report(True)

    def mask(self, gm: GraphModule, product: Node, turned: Node, chain: list[Node], name: str) -> None:
        """``weight -> views -> product`` becomes ``weight -> where(mask) -> views -> product``."""
        self.state.put(name, lambda: torch.ones(8, 8, dtype=torch.bool))
        with gm.graph.inserting_before(product):
            mask = live.read(gm, self.state, name)
        weight = chain[-1]
        at = new(gm, product, aten.where.self, mask, weight, new(gm, product, aten.zeros_like.default, weight))
        for view in reversed(chain[:-1]):
            at = new(gm, product, view.target, at, *view.args[1:])
        product.replace_input_with(turned, at)

    def counted(self, gm: GraphModule) -> None:
        """``seen.forward`` counts calls; ``largest.backward`` is the largest tangent so far; both depend on themselves."""
        self.state.put("seen.forward", lambda: torch.zeros((), dtype=torch.float32))
        self.state.put("largest.backward", lambda: torch.zeros((), dtype=torch.float32))
        products = [n for n in gm.graph.nodes if n.target is aten.mm.default or n.target is aten.addmm.default]
        first, last = products[0], products[-1]
        for node, name, work in ((first, "seen.forward", self.more), (last, "largest.backward", self.larger)):
            with gm.graph.inserting_before(node):
                old = live.read(gm, self.state, name)
            live.update(gm, self.state, name, work(gm, node, old))

    def more(self, gm: GraphModule, node: Node, old: Node) -> Node:
        return new(gm, node, aten.add.Tensor, old, 1.0)

    def larger(self, gm: GraphModule, node: Node, old: Node) -> Node:
        found = new(gm, node, aten.amax.default, new(gm, node, aten.abs.default, node.args[0]), [0, 1])
        return new(gm, node, aten.maximum.default, old, found)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))).sum()


class Reference(Net):
    """Multiplies by masks that it is given."""

    def forward(self, x: torch.Tensor, masks: list[torch.Tensor] | None = None) -> torch.Tensor:
        assert masks is not None
        for layer, m in zip((self.a, self.b), masks):
            weight = layer.weight + (layer.weight * m - layer.weight).detach()  # the gradient goes to all weights
            x = torch.tanh(x @ weight.t() + layer.bias)
        return torch.tanh(self.c(x)).sum()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(loss: torch.Tensor, net: nn.Module) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize("more", [{}, {"emit": "aten"}, {"memory_budget": "1GiB"}])
def test_forward_and_backward_see_every_change(more: dict[str, object]) -> None:
    state, net, seen = State(), Net(), []
    options = {"passes": ["canonicalize", Masked(state), "default"], "state": state, "on_compile": seen.append, **more}
    compiled, x = torch.compile(net, backend="dsc", options=options), torch.randn(16, 8)
    reference = Reference()
    gradients(compiled(x), net)
    masks = list(state.values())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(5):
            for m in masks:
                m.bernoulli_(0.5, generator=torch.Generator().manual_seed(step))
            got, want = gradients(compiled(x), net), gradients(reference(x, masks), reference)
            assert (found := kit.difference(got, want)) is None, found
    assert [r.kind for r in seen] == ["forward", "backward"]
    assert all(r.state is state for r in seen)
    assert all("_dsc_state_mask" in r.text for r in seen)


def test_a_change_between_forward_and_backward_is_seen_too() -> None:
    state, net = State(), Net()
    compiled = torch.compile(net, backend="dsc", options={"passes": [Masked(state), "default"], "state": state})
    x = torch.randn(16, 8, requires_grad=True)
    compiled(x).backward()
    loss = compiled(x)
    for m in state.values():
        m.fill_(False)
    (gradient,) = torch.autograd.grad(loss, x)
    assert bool((gradient == 0).all())


def test_graphs_update_state_inside_of_a_step() -> None:
    state, net = State(), Net()
    passes = ["canonicalize", Masked(state, count=True), "default"]
    compiled, x = torch.compile(net, backend="dsc", options={"passes": passes, "state": state}), torch.randn(16, 8)
    for step in range(1, 4):
        loss = compiled(x)
        assert state["seen.forward"].item() == step
        before = state["largest.backward"].item()
        gradients(loss * step, net)
        assert state["largest.backward"].item() > before
    largest = state["largest.backward"].item()
    gradients(compiled(x) * 0.1, net)
    assert state["largest.backward"].item() == largest
    assert state["seen.forward"].item() == 4


def test_state_is_saved_and_loaded_in_place_and_before_anybody_asked() -> None:
    state = State()
    mask = state.put("m", lambda: torch.zeros(3))
    state.load_state_dict({"m": torch.ones(3), "later": torch.arange(2)})
    assert state["m"] is mask
    assert mask.tolist() == [1, 1, 1]
    assert state.put("later", lambda: torch.zeros(2, dtype=torch.int64)).tolist() == [0, 1]
    assert set(state.state_dict()) == {"m", "later"}
    assert dsc.State is State


def test_what_does_not_fit_says_so() -> None:
    state = State()
    state.put("a.b", lambda: torch.zeros(3))
    with pytest.raises(
        BadState, match=r"'a.b' is float32\[3\], and int64\[2\] is needed; give the model its own State"
    ):
        state.put("a.b", lambda: torch.zeros(2, dtype=torch.int64))
    with pytest.raises(BadState, match=r"'a_b' cannot be told from 'a.b' in a graph"):
        state.put("a_b", lambda: torch.zeros(3))
    with pytest.raises(BadState, match=r"'a.b' is not in what was saved"):
        state.load_state_dict({})
    with pytest.raises(BadState, match=r"'a.b' is float32\[3\], and what was saved is float32\[4\]"):
        state.load_state_dict({"a.b": torch.zeros(4)})
    with pytest.raises(BadOption, match=r"Option 'state' cannot be \{\}; give a dsc.State, or None"):
        dsc.options.parse({"state": {}}, None, {})


def test_graphs_with_state_are_not_kept_on_disk() -> None:
    state, net = State(), Net()
    options = {"passes": [Masked(state), "default"], "state": state, "cache": True}
    x = torch.randn(16, 8)
    torch.compile(net, backend="dsc", options=options)(x).backward()
    torch._dynamo.reset()
    for m in state.values():
        m.fill_(False)
    got = torch.compile(net, backend="dsc", options=options)(x)
    want = Reference()(x, [torch.zeros(8, 8), torch.zeros(8, 8)])
    torch.testing.assert_close(got, want)
