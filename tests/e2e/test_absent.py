"""Gradients that eager does not give: absent after compilation too, in all that autograd and optimizers make of that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).tanh()
        return self.a(h), self.b(h)


def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), y.cos()


def compiled(fn: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend="dsc")


def leaves() -> tuple[Tensor, Tensor]:
    return torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)


def test_decay_leaves_a_head_alone_that_has_no_loss() -> None:
    ends = []
    for wrap in (lambda m: m, compiled):
        model = Heads()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        step = wrap(model)
        for seed in range(3):
            optimizer.zero_grad()
            step(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)))[0].square().sum().backward()
            optimizer.step()
        ends.append(model.state_dict())
    for name, want in ends[0].items():
        torch.testing.assert_close(ends[1][name], want, msg=name)


def test_autograd_tells_of_an_input_without_use() -> None:
    x, y = leaves()
    a, b = compiled(two)(x, y)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(b.sum(), [x], retain_graph=True)
    gone, there = torch.autograd.grad(b.sum(), [x, y], retain_graph=True, allow_unused=True)
    assert gone is None
    torch.testing.assert_close(there, -y.sin())
    torch.testing.assert_close(torch.autograd.grad(a.sum() + b.sum(), [x, y])[0], x.cos())


def test_what_lies_before_the_graph_is_not_reached_either() -> None:
    u, y = leaves()
    _, b = compiled(two)(u * 2, y)
    b.sum().backward()
    assert u.grad is None and y.grad is not None


def test_graphs_before_a_break_are_not_reached_either() -> None:
    def broken(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h, k = x.exp() * 2, y.exp() * 3
        torch._dynamo.graph_break()
        h = h.sin() + 1
        torch._dynamo.graph_break()
        return h.cos(), k.cos()

    x, y = leaves()
    _, b = compiled(broken)(x, y)
    b.sum().backward()
    assert x.grad is None and y.grad is not None

    def apart(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = x.exp() * 2
        torch._dynamo.graph_break()
        h = h.sin() + 1
        torch._dynamo.graph_break()
        return h.cos(), y.cos()

    x, y = leaves()
    a, b = compiled(apart)(x, y)
    b.sum().backward(retain_graph=True)
    assert x.grad is None and y.grad is not None
    a.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
def test_a_hook_never_gets_none(leaf: bool, late: bool) -> None:
    """Autograd would call it with None; eager does not call it.  Zeros reach it instead."""
    heard: list[Tensor] = []
    u, y = leaves()
    x = u if leaf else u * 2
    if not late:
        x.register_hook(heard.append)
    _, b = compiled(two)(x, y)
    if late:
        x.register_hook(heard.append)
    b.sum().backward()
    assert all(not g.any() for g in heard)
    assert u.grad is None or not u.grad.any()


def test_a_hook_after_accumulation_is_not_called_without_a_gradient() -> None:
    x, y = leaves()
    heard: list[bool] = []
    x.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad is not None))
    _, b = compiled(two)(x, y)
    b.sum().backward()
    assert all(heard)


def test_nothing_is_hooked_where_all_gradients_depend_on_all_results() -> None:
    from dsc import absent

    assert absent.reach(absent.Depends(2, (3, 3, 0))) is None
    assert absent.reach(absent.Depends(1)) is None


def test_one_backward_serves_every_choice_of_results() -> None:
    def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x.tanh()
        return h.sin(), (h - h).log(), h @ h.T

    fn = compiled(three)
    for used in ((0,), (0, 2), (2,), (1,), (0, 1, 2), (0,)):
        x = torch.randn(3, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
        got, want = fn(x), three(x)
        for i in used:
            assert got[i].requires_grad
        (g,), (w,) = (
            torch.autograd.grad([r[i] for i in used], x, [torch.ones_like(r[i]) for i in used]) for r in (got, want)
        )
        torch.testing.assert_close(g, w, equal_nan=True)


SCRIPT = """
import torch
def two(x, y): return x.sin(), y.cos()
x, y = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
torch.compile(two, backend="dsc", options={"cache": True, "cache_dir": %r})(x, y)[1].sum().backward()
print(x.grad, y.grad is not None, torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_so_it_is_after_a_restart(tmp_path: Path) -> None:
    seen = []
    script = tmp_path / "script.py"
    script.write_text(SCRIPT % str(tmp_path / "cache"))
    for _ in range(2):
        ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
        seen.append(ran.stdout.split())
    assert seen == [["None", "True", "0"], ["None", "True", "1"]]
