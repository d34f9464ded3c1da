"""Results that are views of inputs: which leave the graph, and what comes back in their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from dsc import aliases
from kit_graphs import captured

X = torch.arange(24.0).reshape(4, 6)
Y = torch.ones(1, 6)


def results(gm: GraphModule) -> int:
    (found,) = gm.graph.output_node().args
    assert isinstance(found, tuple)
    return len(found)


def written_flat(x: Tensor) -> Tensor:
    flat = x.reshape(x.numel())
    flat.mul_(0.5)
    return flat[1:]


VIEWS: dict[str, Callable[..., Any]] = {
    "a view": lambda x: x.t(),
    "views of views": lambda x: x[1:].unsqueeze(0).expand(2, -1, -1),
    "one of several": lambda x: x.split(2)[1],
    "through a write": written_flat,
    "through another spelling of a write": lambda x: F.relu(x, inplace=True)[1:],
    "like another input": lambda x, y: y.expand_as(x),
    "a call that need not copy": lambda x: x.contiguous().to(torch.float32)[:, ::2],
    "sizes": lambda x: x.view(x.shape[1] // 2, -1),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "the input itself": lambda x: x,
    "the input, written": lambda x: x.mul_(2),
    "a new value": lambda x: x * 2,
    "a view of a new value": lambda x: (x * 2).t(),
    "a copy": lambda x: x.t().reshape(-1),
    "elements by a tensor": lambda x: x[torch.tensor([0, 1])],
    "a new value of an operator whose name is that of a write": lambda x: x.long() | x.long(),
    "like a new value": lambda x, y: y.expand_as(x * 2),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_inputs_leave_the_graph_and_come_back(name: str, dynamic: bool) -> None:
    fn, inputs = VIEWS[name], (X.clone(), Y.clone())[: VIEWS[name].__code__.co_argcount]
    gm = captured(lambda *a: (a[0].sum(), fn(*a), a[0] + 1), *inputs, dynamic=dynamic)
    back = aliases.take_out(gm)
    assert results(gm) == 2
    if dynamic:
        return  # sizes are arguments too, and Dynamo alone knows in which order
    given, other = [t.clone() for t in inputs], [t.clone() for t in inputs]
    total, view, more = back(gm.forward)(*given)
    expected = (other[0].sum(), fn(*other), other[0] + 1)
    for a, b in zip((total, view, more), expected):
        assert torch.equal(a, b) and a.stride() == b.stride()
    assert any(view.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in given)


@pytest.mark.parametrize("name", OTHERS)
def test_all_other_results_stay(name: str) -> None:
    fn = OTHERS[name]
    inputs = (X.clone(), Y.clone())[: fn.__code__.co_argcount]
    gm = captured(lambda *a: (a[0].sum(), fn(*a)), *inputs)
    before = results(gm)
    aliases.take_out(gm)
    assert results(gm) == before


def test_a_size_that_data_decides_is_not_asked_for_again() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        gm = captured(lambda x, n: (x[: n.item()], x.add_(1).sum()), X.clone(), torch.tensor(2))
    before = results(gm)
    aliases.take_out(gm)
    assert results(gm) == before


def test_grad_mode_is_that_of_each_view() -> None:
    def fn(x: Tensor) -> Any:
        y = x * 2
        with torch.no_grad():
            quiet = x.unsqueeze(0)[:, 1:].mT
        return y, quiet, x[1:]

    x = X.clone().requires_grad_()
    gm = captured(fn, x)
    _, quiet, loud = aliases.take_out(gm)(gm.forward)(x)
    assert results(gm) == 1 and torch.is_grad_enabled()
    assert quiet.grad_fn is None and loud.grad_fn is not None


def test_views_that_cannot_be_called_again_are_for_eager_if_the_input_was_written() -> None:
    def fn(x: Tensor) -> Any:
        x.mul_(2)
        return x.view_as(torch.cat([x[:2], x[2:]]))

    gm = captured(fn, X.clone(), dynamic=True)
    aliases.take_out(gm)
    assert "views of written inputs" in str(aliases.left(gm))
    still = captured(lambda x: x.view_as(torch.cat([x[:2], x[2:]])), X.clone(), dynamic=True)
    aliases.take_out(still)
    assert aliases.left(still) is None
