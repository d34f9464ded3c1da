"""A capture holds every graph after every pass, and leaves the model and the process as they were."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from dsc import defaults, errors, passlist, text
from dsc.debug.capture import capture
from dsc.debug.source import Called, Model, loss_of
from dsc.manager import Pass, Report
from dsc.models import zoo
from dsc.notes import notes
from dsc.options import Options
from dsc.target import Target
from dsc.watch import Watcher
from kit_cli import session


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.norm(self.linear(x)).relu(), 0.5, self.training).sum()


def normed() -> Model:
    torch.manual_seed(0)
    return Model("normed", Normed(), (torch.randn(4, 6),))


def of(function: Callable[..., Any], *args: object) -> Model:
    return Model("f", Called(function), args)


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_every_graph_after_every_pass(target: str) -> None:
    s = session("mlp-tiny", target)
    (region,) = s.regions
    names = [(x.graph, x.name) for x in region.stages]
    joint = [("joint", "trace"), *(("joint", p.name) for p in defaults.joint(s.target, s.options))]
    graphs = [[(g, "trace"), *((g, p.name) for p in passlist.GRAPH)] for g in ("forward", "backward")]
    assert names == [*joint, *graphs[0], *graphs[1]]
    assert [p.kind for p in region.programs] == ["forward", "backward"]
    assert region.left == []
    for program in region.programs:
        assert text.show(region.of(program.kind)[-1].gm.graph) == program.text
        assert program.numbers["kernels"] == len({notes(n).group for n in program.gm.graph.nodes} - {None})
        assert program.program.code
    assert s.seconds > sum(x.seconds for x in region.stages) > 0


def test_stages_are_copies_that_later_passes_leave_alone() -> None:
    (region,) = session("mlp-tiny").regions
    first, *_, last = region.of("forward")
    assert all(notes(n).group is None for n in first.gm.graph.nodes)
    assert any(notes(n).group is not None for n in last.gm.graph.nodes)


def test_a_gpu_is_planned_for_without_one() -> None:
    (region,) = session("mlp-tiny", "h100").regions
    program = region.programs[0]
    assert "@cuda" in program.text
    assert "triton" in program.program.code
    assert "tl." not in session("mlp-tiny", "cpu").regions[0].programs[0].program.code


def test_the_model_and_the_random_numbers_stay_as_they_were() -> None:
    model = normed()
    grad = torch.ones(8, 6)
    model.module.linear.weight.grad = grad  # type: ignore[union-attr]
    before = {k: v.clone() for k, v in model.module.state_dict().items()}
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    capture(model)
    assert torch.equal(torch.rand(3), wanted)
    assert model.module.linear.weight.grad is grad  # type: ignore[union-attr]
    assert model.module.linear.bias.grad is None  # type: ignore[union-attr]
    for k, v in model.module.state_dict().items():
        assert torch.equal(v, before[k]), k


def test_the_outcome_is_eagers() -> None:
    model = Model("m", nn.Linear(3, 2), (torch.randn(4, 3),))
    got = capture(model).outcome
    model.module(*model.args).sum().backward()
    assert torch.allclose(got.results[0], model.module(*model.args))
    for mine, p in zip(got.gradients, model.module.parameters(), strict=True):
        assert p.grad is not None
        assert mine is not None
        assert torch.allclose(mine, p.grad)


def test_inference_has_one_graph() -> None:
    s = session("mlp-tiny", "cpu", False)
    assert {x.graph for x in s.regions[0].stages} == {"inference"}


def test_a_graph_break_makes_regions() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos() + 1

    regions = capture(of(f, torch.ones(3))).regions
    assert ["sin" in r.stages[0].gm.code for r in regions] == [True, False]


def test_calls_are_kept_where_they_are_wanted() -> None:
    x = torch.ones(3, requires_grad=True)
    f = of(lambda x: (x * x).sin(), x)
    assert capture(f).regions[0].calls == {}
    calls = capture(f, keep_values=True).regions[0].calls
    assert set(calls) == {"forward", "backward"}
    assert torch.equal(calls["forward"]["primals_1"], x)  # type: ignore[arg-type]


def test_a_chosen_pipeline() -> None:
    s = capture(of(lambda x: x.sin(), torch.ones(3)), "a100", Options(passes="canonicalize"))
    assert [x.name for x in s.regions[0].stages] == ["trace", "canonicalize"]
    assert s.options.target == s.target.name == "a100"


def test_watchers_hear_of_it_too() -> None:
    heard: list[str] = []

    class Listener(Watcher):
        def traced(self, stage: str, gm: GraphModule) -> None:
            heard.append(stage)

    capture(of(lambda x: x.sin(), torch.ones(3)), watchers=[Listener()])
    assert heard == ["inference"]


def test_a_model_that_raises() -> None:
    with pytest.raises(
        errors.ModelFailed, match=r"^f does not run on these inputs: RuntimeError: mat1 and mat2 shapes"
    ):
        capture(of(lambda x: x @ x, torch.ones(2, 3)))


@dataclass(frozen=True)
class Broken(Pass):
    name: ClassVar[str] = "broken"

    def run(self, gm: GraphModule, target: Target) -> Report:
        raise ZeroDivisionError("no way")


def test_a_pass_that_raises_is_not_hidden() -> None:
    with pytest.raises(errors.PassFailed, match="Pass 'broken' failed: ZeroDivisionError: no way"):
        capture(of(lambda x: x.sin(), torch.ones(3)), options=Options(passes=(Broken(),)))


def test_what_is_differentiated() -> None:
    x = torch.ones(3, requires_grad=True)
    assert loss_of(x.sum() * 2) is not None
    named = {"loss": (x * 2).sum(), "logits": x * 3}
    assert loss_of(named) is named["loss"]
    total = loss_of((x * 2, {"a": x * 3}, torch.ones(3)))
    assert total is not None
    assert total.item() == 15
    assert loss_of(torch.ones(3)) is None


def test_the_zoo_is_left_with_its_weights() -> None:
    assert torch.equal(
        next(iter(session("mlp-tiny").model.module.parameters())), next(iter(zoo.load("mlp-tiny").build().parameters()))
    )
