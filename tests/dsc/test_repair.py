"""What is changed in a Dynamo graph before AOTAutograd sees it, and what runs in eager instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from dsc import traps
from dsc.dynamo import name_of, written
from dsc.repair import buried, for_eager, repair
from kit_graphs import captured


def calls(gm: GraphModule) -> list[str]:
    return [getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes if n.op.startswith("call")]


X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("fn", [lambda x: F.dropout(x, 0.5, False) + 1, lambda x: F.dropout(x, 0.0) + 1])
def test_idle_dropout_goes(fn: Callable[[Tensor], Tensor]) -> None:
    gm = captured(fn, X)
    repair(gm)
    assert calls(gm) == ["add"]


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_working_dropout_stays(p: float) -> None:
    gm = captured(lambda x: F.dropout(x, p) + 1, X)
    repair(gm)
    assert calls(gm) == ["dropout", "add"]


def test_unread_draws_and_checks_are_given_out_and_taken_away() -> None:
    def fn(x: Tensor, i: Tensor) -> Tensor:
        y = x * 2
        torch.rand(3)
        F.embedding(i, x) + 1
        x.exp()
        return y

    gm = captured(fn, X, torch.tensor([0, 1]))
    before = len(gm.graph.output_node().args[0])
    restored = repair(gm)
    assert len(gm.graph.output_node().args[0]) == before + 2  # exp neither draws nor checks
    out = restored(gm.forward)(X, torch.tensor([0, 1]))
    assert len(out) == 1 and torch.equal(out[0], X * 2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.type_as(F.dropout(x, 0.2).softmax(0)),
        lambda x: torch.zeros_like(F.dropout(x, 0.2)) + x,
        lambda x: x[:1].expand_as(F.dropout(x, 0.2) * 2),
        lambda x: F.dropout(x, 0.2).new_ones(3) + x[0, 0],
        lambda x: x.view_as(torch.rand_like(x)).exp(),
    ],
)
def test_numbers_drawn_for_a_shape_or_dtype_alone_are_drawn(fn: Callable[[Tensor], Tensor]) -> None:
    states = []
    for run in (fn, torch.compile(fn, backend="dsc")):
        torch.manual_seed(3)
        run(X)
        states.append(torch.random.get_rng_state())
    assert torch.equal(*states)


def test_nothing_to_repair_changes_nothing() -> None:
    gm = captured(lambda x: (x + torch.rand_like(x)).softmax(-1), X)
    text = str(gm.graph)
    assert repair(gm)(len) is len
    assert str(gm.graph) == text


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: F.softshrink(x), "gradient of softshrink"),
        (lambda x: F.dropout(x, 1.0), "p=1"),
        (lambda x: F.interpolate(x[None, None].bfloat16(), size=(4, 4), mode="bicubic"), "in 16 bits"),
        (lambda x: (x * 1).t(), None),
        (lambda x: (x * 1)[:1].add_(1), None),
        (lambda x: (x * 1).unsqueeze(0).expand(1, 2, 3).add_(1), None),
    ],
)
def test_traps(fn: Callable[[Tensor], Tensor], words: str | None) -> None:
    found = traps.find(captured(fn, X))
    assert (found is None) if words is None else (found is not None and words in found)


def test_an_unread_draw_in_a_region_cannot_be_repaired() -> None:
    def block(x: Tensor) -> Tensor:
        torch.rand(3)
        return x.sin()

    def fn(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, use_reentrant=False)
        return y

    gm = captured(fn, X.clone().requires_grad_())
    assert "drops rand" in str(buried(gm))
    assert buried(captured(lambda x: x * 2, X)) is None


def test_regions_in_eager_draw_the_same_twice() -> None:
    def fn(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda v: F.dropout(v, 0.5), x, use_reentrant=False)
        return y

    x = torch.ones(50, requires_grad=True)
    gm = captured(fn, x)
    for_eager(gm)
    (out,) = gm.forward(x)
    (g,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out.detach(), g)


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_blocks_that_meet(offset: int) -> None:
    """Three numbers written, and three read from ``offset`` on: as eager refuses it."""
    g = torch.fx.Graph()
    base = torch.arange(6.0)
    x, y = g.placeholder("x"), g.placeholder("y")
    x.meta["example_value"], y.meta["example_value"] = base[:3], base[offset : offset + 3]
    g.output((g.call_method("add_", (x, y)),))
    found = traps.find(GraphModule(torch.nn.Module(), g))
    try:
        base[:3].add_(base[offset : offset + 3])
    except RuntimeError:
        assert "reads elsewhere" in str(found)
    else:
        assert found is None


def test_writes_into_shared_places_are_left_to_eager() -> None:
    """Eager refuses the write while Dynamo traces nothing of it: the graph is made by hand."""
    g = torch.fx.Graph()
    x = g.placeholder("x")
    wide = g.call_method("expand", (x, 4, 3))
    wide.meta["example_value"] = torch.ones(1, 3).expand(4, 3)
    g.output((g.call_method("add_", (wide, 1)),))
    assert "one place in memory" in str(traps.find(GraphModule(torch.nn.Module(), g)))


def test_overloads_are_named_as_methods_are() -> None:
    aten = torch.ops.aten

    def fn(x: Tensor) -> Tensor:
        aten.add_.Tensor(x, x)
        aten.t_.default(x)
        return aten.as_strided.default(aten.sin(x), (2,), (1,))

    nodes = [n for n in captured(fn, torch.ones(2, 2)).graph.nodes if n.op == "call_function"]
    assert [name_of(n) for n in nodes] == ["add_", "t_", "sin", "as_strided"]
    assert [written(n) is not None for n in nodes] == [True, False, False, False]
