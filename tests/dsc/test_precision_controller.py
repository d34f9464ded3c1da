"""Formats that change while a model trains: one compilation, what rules and budgets do, and a run that goes on."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsc
from dsc.errors import BadControl, BadOption
from dsc.precision import rules as control
from dsc.precision import writers
from dsc.precision.controller import PrecisionController
from dsc.precision.formats import SEEN
from dsc.precision.plan import Choice, PrecisionPlan
from dsc.precision.rules import Product
from dsc.runtime.state import State

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.tanh(self.up(x))) - x).pow(2).mean()


def batch(i: int) -> torch.Tensor:
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(i))


def gradient(loss: torch.Tensor, net: nn.Module) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def test_switches_at_once_and_compiles_once() -> None:
    net, c, seen = Net(), PrecisionController(), []
    options = {"precision": {"*": "int8"}, "controller": c, "on_compile": seen.append}
    call = torch.compile(net, backend="dsc", fullgraph=True, options=options)
    exact = gradient(net(batch(0)), net)

    def error() -> float:
        return float((gradient(call(batch(0)), net) - exact).norm() / exact.norm())

    with torch._dynamo.config.patch(error_on_recompile=True):
        error()
        assert set(c.formats()) == {f"{n}.{r}" for n in ("up", "down") for r in ("forward", "wgrad")} | {"down.dgrad"}
        eighth = error()
        for site in c.formats():
            c.switch(site, "bf16")
        sixteenth = error()
        for site in c.formats():
            c.switch(site, "fp32")
        assert error() < 1e-6 < sixteenth < 0.02 and 2e-3 < eighth < 0.1
        for site in c.formats():
            c.switch(site, "int8-blockwise")
        assert error() == eighth
    assert len(seen) == 2
    assert c.metrics() == {}  # nobody called step


def test_a_rule_is_one_line() -> None:
    net, heard = Net(), []
    c = PrecisionController(callback=lambda step, numbers: heard.append((step, dict(numbers))))
    c.when(lambda layer: layer.gradient_norm > 0.05, "fp32", roles="backward")
    call = torch.compile(net, backend="dsc", options={"precision": "int8", "controller": c})
    for i in range(4):
        c.scale(call(batch(i))).backward()
        c.step()
    last = heard[-1][1]
    steep = {p.layer for p in c.products.values() if last[f"{p.layer}/gradient norm"] > 0.05}
    assert steep
    for site, f in c.formats().items():
        layer, _, role = site.rpartition(".")
        assert f == ("fp32" if layer in steep and role != "forward" else "int8-blockwise")
    assert [step for step, _ in heard] == [1, 2, 3, 4]
    assert 1e-4 < last["up.forward/noise"] < 0.1
    assert last["promoted products"] == sum(f == "fp32" for f in c.formats().values()) == last["switches"]


def test_a_run_that_stopped_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    def run(net: Net, steps: range, c: PrecisionController, opt: torch.optim.Optimizer) -> list[float]:
        torch._dynamo.reset()
        call = torch.compile(net, backend="dsc", options={"precision": "int8", "controller": c})
        losses = []
        for i in steps:
            loss = call(batch(i))
            opt.zero_grad()
            c.scale(loss).backward()
            c.step(opt)
            losses.append(loss.item())
        return losses

    def fresh() -> tuple[Net, PrecisionController, torch.optim.Optimizer]:
        net, c = Net(), PrecisionController(patience=2)
        c.when(lambda layer: layer.gradient_norm > 0.06, "fp32", roles="backward")
        return net, c, torch.optim.AdamW(net.parameters(), lr=1e-2)

    whole = run(*_spread(fresh(), range(8)))
    net, c, opt = fresh()
    first = run(net, range(4), c, opt)
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "precision": c.state_dict()}, tmp_path / "saved")
    saved = torch.load(tmp_path / "saved")
    net, c, opt = fresh()
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
    c.load_state_dict(saved["precision"])
    assert first + run(net, range(4, 8), c, opt) == whole


def _spread(made: tuple[Any, Any, Any], steps: range) -> tuple[Any, ...]:
    net, c, opt = made
    return net, steps, c, opt


def test_fp16_scales_the_loss_and_skips_steps_that_overflow() -> None:
    net = Net()
    c = PrecisionController()
    call = torch.compile(net, backend="dsc", options={"precision": "fp16", "controller": c})
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    before = copy.deepcopy(net.state_dict())
    c.scale(call(batch(0) * 1e4)).backward()
    c.step(opt)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.values()))
    assert c.metrics()["loss scale"] == 2.0**15
    for i in range(1, 4):
        opt.zero_grad()
        c.scale(call(batch(i))).backward()
        c.step(opt)
    assert not torch.equal(net.state_dict()["up.weight"], before["up.weight"])
    assert c.metrics()["loss scale"] == 2.0**15


def reports(c: PrecisionController, numbers: Mapping[str, Mapping[str, float]]) -> None:
    """What the products say of the next step."""
    for site, given in numbers.items():
        row = torch.full((len(SEEN),), math.nan)
        for name, value in given.items():
            row[SEEN.index(name)] = value
        c.state[control.seen_name(site)].copy_(row)


def two_products(**options: Any) -> PrecisionController:
    c = PrecisionController(**options)
    for site, error, seconds in (("a.forward", 0.008, 1.0), ("b.wgrad", 0.016, 1.0)):
        layer, _, role = site.rpartition(".")
        c.register(Product(site, layer, role, control.choices("int8-blockwise"), error, seconds), CPU)  # type: ignore[arg-type]
    return c


def test_the_budget_promotes_what_errs_most_and_gives_it_back() -> None:
    c = two_products(budget=0.02, patience=5)
    quiet = {"a.forward": {"noise": 0.01, "not finite": 0.0}, "b.wgrad": {"noise": 0.01, "not finite": 0.0}}
    for _ in range(3):
        reports(c, quiet)
        c.step()
    assert c.estimate() == pytest.approx(math.hypot(0.008, 0.016))
    loud = {**quiet, "b.wgrad": {"noise": 0.02, "not finite": 0.0}}
    for _ in range(4):
        reports(c, loud)
        c.step()
    assert c.formats() == {"a.forward": "int8-blockwise", "b.wgrad": "bf16"}
    assert c.estimate() == pytest.approx(0.008)
    for _ in range(8):
        reports(c, quiet)
        c.step()
    assert c.formats()["b.wgrad"] == "bf16"  # 0.7 of the budget would be exceeded
    c.budget = 0.03
    for _ in range(8):
        reports(c, quiet)
        c.step()
    assert c.formats()["b.wgrad"] == "int8-blockwise"


@pytest.mark.parametrize(
    ("said", "want"),
    [({"noise": 0.7}, "bf16"), ({"lost left": 0.1}, "bf16"), ({"not finite": 1.0}, "bf16"), ({"noise": 0.1}, None)],
)
def test_rules_that_are_always_there(said: Mapping[str, float], want: str | None) -> None:
    c = two_products()
    for _ in range(2):
        reports(c, {"a.forward": {}, "b.wgrad": said})
        c.step()
    assert c.formats() == {"a.forward": "int8-blockwise", "b.wgrad": want or "int8-blockwise"}


def test_a_plan_brings_its_errors() -> None:
    net, c = Net(), PrecisionController()
    plan = PrecisionPlan((Choice("up.forward", "int8-rowwise", 0.003), Choice("down.wgrad", "tf32", 0.001)))
    call = torch.compile(net, backend="dsc", options={"precision": plan, "controller": c})
    call(batch(0)).backward()
    assert c.formats() == {"up.forward": "int8-rowwise", "down.wgrad": "tf32"}
    assert c.estimate() == pytest.approx(math.hypot(0.003, 0.001))
    assert c.products["down.wgrad"].formats == ("tf32", "fp32")


def test_what_it_refuses() -> None:
    c = two_products()
    with pytest.raises(BadControl, match="a rule cannot switch to 'fp8'; use one of 'bf16', 'fp32'"):
        c.when(lambda layer: True, "fp8")
    with pytest.raises(BadControl, match="'back' is no role"):
        c.when(lambda layer: True, "bf16", roles="back")
    with pytest.raises(
        BadControl, match=r"'c\.forward' cannot be switched to 'bf16'; use one of: a\.forward, b\.wgrad"
    ):
        c.switch("c.forward", "bf16")
    with pytest.raises(BadControl, match=r"use one of: int8-blockwise, bf16, fp32"):
        c.switch("a.forward", "fp16")
    with pytest.raises(BadOption, match=r"Option 'controller' cannot be 3; give a dsc.PrecisionController"):
        dsc.options.parse({"controller": 3}, None, {})


def test_a_state_that_is_given_holds_the_controllers_too() -> None:
    state, c, net = State(), PrecisionController(), Net()
    call = torch.compile(net, backend="dsc", options={"precision": "int8", "controller": c, "state": state})
    call(batch(0)).backward()
    assert c.state is state
    assert "precision.up.forward.slot" in state


def test_writers(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    pytest.importorskip("tensorboard")
    registry = client.CollectorRegistry()
    write = writers.both(writers.tensorboard(str(tmp_path)), writers.prometheus(registry))
    write(3, {"up.forward/noise": 0.25, "estimated error": 0.01})
    assert registry.get_sample_value("dsc_noise", {"product": "up.forward"}) == 0.25
    assert registry.get_sample_value("dsc_estimated_error") == 0.01
    assert registry.get_sample_value("dsc_step") == 3
    assert any(f.name.startswith("events") for f in tmp_path.iterdir())


class Broken(nn.Module):
    """Two graphs, with a break between them, and a third layer that only some calls reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, deep: bool = False) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        y = self.second(y)
        return ((self.third(y) if deep else y) - x).pow(2).mean()


def test_graphs_share_a_controller_and_new_ones_find_their_place(tmp_path: Path) -> None:
    net, c = Broken(), PrecisionController(patience=2)
    c.when(lambda layer: layer.gradient_norm > 1e-3, "fp32", roles="backward")
    call = torch.compile(net, backend="dsc", options={"precision": "int8", "controller": c})

    def step(deep: bool, rows: int = 24) -> None:
        c.scale(call(batch(0)[:rows], deep)).backward()
        c.step()

    for _ in range(3):
        step(deep=False)
    assert {p.layer for p in c.products.values()} == {"first", "second"}
    before = dict(c.formats())
    assert before["second.wgrad"] == "fp32"
    step(deep=False, rows=16)  # compiled anew for another size: products of the same names go on
    assert c.formats() == before
    for _ in range(3):
        step(deep=True)
    assert c.formats()["third.wgrad"] == "fp32"
    assert not math.isnan(c.metrics()["third/gradient norm"])
    torch.save(c.state_dict(), tmp_path / "saved")

    torch._dynamo.reset()
    again = PrecisionController(patience=2)
    call = torch.compile(net, backend="dsc", options={"precision": "int8", "controller": again})
    again.scale(call(batch(0), True)).backward()  # its products come in another order
    again.step()
    again.load_state_dict(torch.load(tmp_path / "saved"))
    assert again.formats() == c.formats()
    assert again.metrics() == c.metrics()


def test_evaluation_follows_the_formats_and_reports_nothing() -> None:
    net, c = Net(), PrecisionController()
    call = torch.compile(net, backend="dsc", options={"precision": "int8", "controller": c})
    call(batch(0)).backward()
    c.step()
    before = {k: v.clone() for k, v in c.state.items()}
    with torch.no_grad():
        eighth = call(batch(1))
        for site in c.formats():
            c.switch(site, "fp32")
        torch.testing.assert_close(call(batch(1)), net(batch(1)))
        assert not torch.equal(eighth, net(batch(1)))
    assert all(torch.equal(v, before[k]) or torch.isnan(v).any() for k, v in c.state.items() if k.endswith(".seen"))
