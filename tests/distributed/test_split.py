"""The backward as dgrad and wgrad: together the whole, and nothing lost that torch's own split loses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.fx import Interpreter

import kit_pipeline as hand
from dsc.distributed import assemble, forward
from dsc.distributed.assemble import Parts
from dsc.distributed.stage import StageModule
from dsc.models import zoo
from dsc.options import Options


class Stage:
    """The decoder's embedding and first self-attention: the encoder's memory passes by, and joins only in the next stage."""

    def __init__(self) -> None:
        entry = zoo.load("encdec-tiny")
        model = entry.build()
        traced = forward.trace(model, entry.inputs(2))
        tokens, norm = "idx", next(p for p, owner in traced.state.items() if owner == "decoder.0.norm2.weight")
        starts = [next(n for n in hand.runs(traced) if name in map(str, n.all_input_nodes)) for name in (tokens, norm)]
        self.plan = hand.plan(traced, 3, "1F1B", 4, 2, before=starts).stages[1]
        self.parts: Parts = assemble.assemble(traced, self.plan)
        self.values = dict((*model.named_parameters(), *model.named_buffers()))
        self.example = assemble.example(
            traced, self.plan.receives, assemble.differentiable(traced), torch.device("cpu")
        )
        torch.manual_seed(0)
        self.inputs = [torch.randn_like(t) if t.is_floating_point() else torch.ones_like(t) for t in self.example]

    def leaves(self) -> list[Tensor]:
        return [x.clone().requires_grad_(t.requires_grad) for x, t in zip(self.inputs, self.example)]

    def module(self, options: Options | None, split: bool) -> StageModule:
        fresh = {
            n: v.clone() if not v.requires_grad else torch.nn.Parameter(v.detach().clone())
            for n, v in self.values.items()
        }
        module = StageModule(self.parts, fresh, self.values.keys())
        module.compile(self.example, options, split)
        return module

    def gradients(self, module: StageModule) -> dict[str, Tensor]:
        """Of parameters and inputs, by F, I and, where the backward was split, W."""
        given = self.leaves()
        results = module(*given)
        assert isinstance(results, tuple)
        pairs = [(r, torch.ones_like(r)) for r in results if r.requires_grad]
        torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        if module.functions.later:
            assert all(p.grad is None for p in module.parameters())
            module.weight_gradients()()
        out = {n: p.grad for n, p in module.named_parameters()}
        return {**out, **{n: x.grad for n, x in zip(self.plan.receives, given) if x.requires_grad}}


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage()


@pytest.fixture(scope="module")
def whole(stage: Stage) -> dict[str, Tensor]:
    """What autograd gives, without any split."""
    return stage.gradients(stage.module(None, split=False))


def test_torch_loses_gradients_of_a_branch_without_float_inputs(stage: Stage, whole: dict[str, Tensor]) -> None:
    """The reason why the compiler splits: torch's own split gives none, and says nothing."""
    held = {n: torch.nn.Parameter(stage.values[n].detach().clone()) for n in stage.parts.weights}
    given = stage.leaves()
    results = Interpreter(stage.parts.graph).run(*held.values(), *(stage.values[n] for n in stage.parts.held), *given)
    results = [r * 1 for r in results if r.requires_grad]
    _, groups = stage_backward_input(results, [torch.ones_like(r) for r in results], given, iter(held.values()))
    stage_backward_weight(iter(held.values()), groups)
    lost = [n for n, p in held.items() if p.grad is None]
    assert "decoder.0.attention.q.weight" in lost
    assert all(whole[n] is not None for n in lost)


@pytest.mark.parametrize("options", [None, Options()], ids=["interpreted", "compiled"])
def test_both_halves_together_are_the_whole(stage: Stage, whole: dict[str, Tensor], options: Options | None) -> None:
    got = stage.gradients(stage.module(options, split=True))
    assert got.keys() == whole.keys()
    for name, want in whole.items():
        torch.testing.assert_close(got[name], want, rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_the_halves_share_the_work(stage: Stage) -> None:
    """dgrad of a stage whose weights no float input reaches computes nothing but what passes by."""
    sizes = stage.module(None, split=True).functions.sizes
    assert sizes["dgrad"] == 0 and sizes["wgrad"] > 20


def test_recompute_saves_nothing_but_inputs(stage: Stage, whole: dict[str, Tensor]) -> None:
    from dataclasses import replace

    module = StageModule(
        replace(stage.parts, plan=replace(stage.plan, recompute=True)), stage.values, stage.values.keys()
    )
    module.compile(stage.example, None, split_backward=True)
    for p in module.parameters():
        p.grad = None
    got = stage.gradients(module)
    assert all(torch.equal(got[n], whole[n]) for n in whole)
