"""What users say of saved tensors themselves: save_on_cpu and other hooks, and checkpoint policies, under a budget."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kit_memory
from dsc.errors import OffloadFailed
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.memory_plan import Search
from dsc.passes.memory_problem import extract
from kit_graphs import CPU
from kit_memory import Stack, compiled, gradients, stack


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


class Counter:
    """Hooks that count what they are given; ``copy`` stands for a device of its own."""

    def __init__(self, copy: bool) -> None:
        self.copy = copy
        self.packed = self.unpacked = 0

    def pack(self, t: Tensor) -> Tensor:
        self.packed += 1
        return t.detach().clone() if self.copy else t

    def unpack(self, t: Tensor) -> Tensor:
        self.unpacked += 1
        return t


class OnTheHost(nn.Module):
    """Dynamo breaks the graph at ``save_on_cpu``: what the code inside saves, compiled or not, goes through its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            x = self.block(x)
        return self.head(x).relu().sum()


def test_a_region_under_save_on_cpu_keeps_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, ...]] = []
    there = Tensor.cpu

    def cpu(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        moved.append(tuple(t.shape))
        return there(t, *args, **kwargs)

    torch.manual_seed(0)
    model, inputs = OnTheHost(), (torch.randn(16, 32),)
    monkeypatch.setattr(Tensor, "cpu", cpu)
    want = gradients(model, inputs, model)
    in_eager = len(moved)
    moved.clear()
    call, _ = compiled(model, memory_budget="1GiB", emit="aten")
    close(gradients(model, inputs, call), want)
    assert 0 < len(moved) <= in_eager


def test_hooks_around_a_compiled_model_get_all_that_the_plan_saves() -> None:
    planner = kit_memory.search(stack)
    budget = (planner.default.peak + planner.least().peak) // 2
    model, inputs = stack()
    want = gradients(model, inputs, model)
    call, _ = compiled(model, memory_budget=budget, emit="aten")
    hooks = Counter(copy=True)

    def hooked(*args: Tensor) -> Tensor:
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            return call(*args)

    close(gradients(model, inputs, hooked), want)
    assert hooks.packed == hooks.unpacked >= len(planner.default.schedule.saved) // 4 > 0


def test_save_on_cpu_around_a_model_that_moves_values_itself() -> None:
    planner = kit_memory.search(stack)
    budget = int(planner.default.peak * 0.7)
    model, inputs = stack()
    want = gradients(model, inputs, model)
    call, found = compiled(model, memory_budget=budget, offload="cpu", emit="aten")

    def hooked(*args: Tensor) -> Tensor:
        with save_on_cpu():
            return call(*args)

    close(gradients(model, inputs, hooked), want)
    assert found.numbers["bytes away"] > 0


def test_hooks_that_copy_what_is_away_are_refused_in_one_sentence() -> None:
    planner = kit_memory.search(stack)
    model, inputs = stack()
    call, found = compiled(model, memory_budget=int(planner.default.peak * 0.7), offload="cpu", emit="aten")
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = call(*inputs)
    assert found.numbers["bytes away"] > 0
    with pytest.raises(OffloadFailed, match="saved_tensors_hooks such as save_on_cpu"):
        loss.backward()


def keep_products(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Stack):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, keep_products)
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def test_selective_policies_bind_the_planner() -> None:
    torch.manual_seed(0)
    model, inputs = Selective(rate=0.0), stack()[1]
    want = gradients(model, inputs, model)
    step = kit_memory.train_step(model, inputs)
    Canonicalize().run(step.joint, CPU)
    planner = Search(step.joint, extract(step.joint, CPU, False), CPU, False, format="bf16")
    problem = planner.found.problem
    assert problem.pinned and problem.barred
    least = planner.least()
    saved = set(least.schedule.saved)
    read = {v for op in problem.ops if not op.forward for v, _ in op.reads}
    assert {v for v in problem.pinned & read if problem.values[v].maker >= 0} <= saved
    assert not {v for v in problem.barred & saved if problem.ops[problem.values[v].maker].again}
    assert not {planner.found.values[v].name for v in problem.pinned} & set(least.short)  # kept as they are
    call, found = compiled(model, memory_budget=planner.default.peak, emit="aten")
    close(gradients(model, inputs, call), want)
    assert found.numbers["planned peak"] <= planner.default.peak
