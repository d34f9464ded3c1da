"""Train steps within a memory budget: eager's gradients at every budget, and a peak that is what was planned."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import kit_memory
from dsc import cost, kernels, link, liveness
from dsc import plan as plans
from dsc.manager import PassPipeline
from dsc.models.zoo import load
from dsc.options import Options
from dsc.partition import partition
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.passes.memory import Memory
from dsc.passes.memory_again import is_dropped
from dsc.passes.memory_apply import rebuilt
from dsc.passes.memory_plan import Search
from dsc.passes.memory_problem import extract
from dsc.runtime import run
from dsc.runtime.pool import Pool
from kit_graphs import CPU
from kit_memory import Stack, compiled, gradients, peaks, search, stack


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3, 0.0])
def test_gradients_with_dropout_are_eagers_at_every_budget(share: float) -> None:
    most, least = peaks()
    budget = int(least + share * (most - least))
    model, inputs = stack()
    want = gradients(model, inputs, model)
    call, found = compiled(model, memory_budget=budget, emit="aten")
    got = gradients(model, inputs, call)
    assert found.numbers["planned peak"] <= budget
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["resnet-tiny", "gpt-tiny", "llama-tiny"])
def test_models_at_their_smallest_peak(name: str) -> None:
    entry = load(name)
    want_model = entry.build()
    least = search(lambda: (entry.build(), entry.inputs())).least().peak
    want = gradients(want_model, entry.inputs(), want_model)
    model = entry.build()
    call, found = compiled(model, memory_budget=least, emit="aten")
    got = gradients(model, entry.inputs(), call)
    assert found.numbers["planned peak"] <= least < found.numbers["default peak"]
    for a, b in zip([*got, *model.buffers()], [*want, *want_model.buffers()], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("emit", ["aten", "cpp"])
def test_the_measured_peak_is_the_planned_one(share: float, emit: str) -> None:
    planner = search(stack, emit == "cpp")
    least = planner.least().peak
    budget = int(least + share * (planner.default.peak - least))
    planned: list[float] = []

    def partition_within(joint: GraphModule, inputs: Any, **rest: Any) -> tuple[GraphModule, GraphModule]:
        Canonicalize().run(joint, CPU)
        planned.append(dict(Memory(budget, fused=emit == "cpp").run(joint, CPU).numbers)["planned peak"])
        return partition(joint, inputs, **rest)

    step = kit_memory.train_step(*stack(), partition_within)
    options = Options(emit=emit, memory_budget=budget)  # type: ignore[arg-type]
    calls = []
    for gm, kind in ((step.forward, "forward"), (step.backward, "backward")):
        if emit == "cpp":
            PassPipeline((Canonicalize(), Fuse())).run(gm, CPU)
        program, _, remarks = link.link(gm, options, kind)
        assert not remarks
        calls.append(run.load(program, kernels.launches(program, options), Pool(), kind))
    measured, _, _ = kit_memory.measured_peak(step, *calls)  # type: ignore[arg-type]
    assert measured <= budget
    assert planned[0] == pytest.approx(measured, rel=0.01)


def test_the_look_at_a_plan_is_what_the_split_gives() -> None:
    """A plan is judged on graphs that are built directly: they are those that torch's partitioner makes of it."""
    planner = search(stack, fused=True)
    program = planner.least()
    found = planner.found
    saved = [found.values[v] for v in program.schedule.saved]
    joint = rebuilt(planner.gm, found, saved, [found.nodes[o] for o in program.schedule.script])
    forward, backward = partition(joint, (), num_fwd_outputs=found.results, static_lifetime_input_indices=[])
    places = liveness.saved_places(forward, backward)
    for gm in (forward, backward):
        PassPipeline((Canonicalize(), Fuse())).run(gm, CPU)
    assert liveness.profile_step(forward, backward, places).peak == program.peak
    assert sum(cost.graph_cost(gm, CPU).seconds for gm in (forward, backward)) == pytest.approx(program.seconds)


class Checkpointed(Stack):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_checkpointed_regions_save_nothing_inside_but_masks() -> None:
    torch.manual_seed(0)
    model, inputs = Checkpointed(), stack()[1]
    want = gradients(model, inputs, model)
    step = kit_memory.train_step(model, inputs)
    Canonicalize().run(step.joint, CPU)
    planner = Search(step.joint, extract(step.joint, CPU, False), CPU, False)
    problem = planner.found.problem
    assert problem.barred
    kept = set(planner.default.schedule.saved) & problem.barred
    assert all(not problem.ops[problem.values[v].maker].again for v in kept)
    call, _ = compiled(model, memory_budget=planner.default.peak, emit="aten")
    got = gradients(model, inputs, call)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_plans_are_saved_and_replayed(tmp_path: Path) -> None:
    most, least = peaks()
    file, budget = tmp_path / "plan.json", (most + least) // 2
    options = {"memory_budget": budget, "memory_plan": str(file), "emit": "aten"}
    model, inputs = stack()
    first = gradients(model, inputs, compiled(model, **options)[0])
    (plan,) = plans.read(file).values()
    assert plan.peak <= budget
    assert plan.decisions[0].nbytes == max(d.nbytes for d in plan.decisions)
    file.write_text(plans.dump({key: replace(p, peak=7) for key, p in plans.read(file).items()}))
    call, found = compiled(model, **options)
    again = gradients(model, inputs, call)
    assert found.numbers["planned peak"] == 7  # read, not planned anew
    assert all(map(torch.equal, first, again))


def test_what_cannot_be_met_names_the_smallest_peak() -> None:
    model, inputs = stack()
    call, _ = compiled(model, memory_budget="100KiB", emit="aten")
    message = r"100.00 KiB cannot be met: .* more time .* made of .*; give at least \d+ bytes \(.*iB\)"
    with pytest.raises(BackendCompilerFailed, match=message):
        call(*inputs)


def test_a_tighter_budget_has_neither_a_larger_peak_nor_less_time() -> None:
    torch.manual_seed(0)
    step = kit_memory.train_step(Stack(layers=3), stack()[1])
    Canonicalize().run(step.joint, CPU)
    found = extract(step.joint, CPU)
    planner = Search(step.joint, found, CPU)
    low, high = planner.least().peak, planner.default.peak
    budgets = [low + (high - low) * i // 6 for i in (0, 1, 2, 3, 5)]
    programs = [Search(step.joint, found, CPU).within(b) for b in budgets]
    assert all(p is not None and p.peak <= b for p, b in zip(programs, budgets))
    peaks, seconds = zip(*((p.peak, p.seconds) for p in programs if p is not None))
    assert list(peaks) == sorted(peaks)
    assert list(seconds) == sorted(seconds, reverse=True)
    assert len(set(peaks)) > 2


def test_without_a_budget_nothing_changes() -> None:
    model, inputs = stack()
    call, found = compiled(model)
    call(*inputs)
    assert found.numbers == {}


def test_a_dropout_that_is_one_call_is_had_again_from_its_mask() -> None:
    """As on CUDA, where dropout is not taken apart: its result is not saved, and no number is drawn twice."""
    step = kit_memory.train_step(*stack())
    planner = Search(step.joint, extract(step.joint, CPU, False), CPU, False)
    least = planner.least()
    again = [planner.found.nodes[o].name for o in least.schedule.script if planner.found.problem.ops[o].forward]
    assert any(is_dropped(n) for n in planner.found.nodes if n.name in again)
    model, inputs = stack()
    want = gradients(model, inputs, model)
    call, found = compiled(model, memory_budget=least.peak, passes="recompute,fuse", emit="aten")
    got = gradients(model, inputs, call)
    assert found.numbers["planned peak"] <= least.peak
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
