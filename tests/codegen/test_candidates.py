"""Which schedule is taken and why the others are not: the rules, the model, the compiled code, and what is kept on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from dsc.codegen import tune
from dsc.codegen.alternatives import alternatives, modelled, traffic, troubled, work
from dsc.codegen.candidates import FEW, Choice, Code, as_data, choose, from_data, measure
from dsc.codegen.cubin import inspect, instructions
from dsc.codegen.kernel import Kernel
from dsc.codegen.roofline import Work, clock, seconds
from dsc.codegen.schedule import Schedule
from dsc.codegen.triton_nest import default_schedule
from dsc.codegen.triton_plan import plan
from dsc.codegen.triton_time import arguments, length
from dsc.debug.candidates import choices_of, jobs
from dsc.debug.kernels import Listed
from dsc.target import find
from kit_kernels import pointwise
from kit_triton import apply, gather_kernel, layernorm_kernel, softmax_kernel

H100 = find("h100")
CODE = Code(32, 0, 0, 4, 16, 1.0, 100, {"x": 16}, {"x": 1})
A, B, C, D = (Schedule(XB=1 << i) for i in (8, 9, 10, 11))


def taken(found: dict[Schedule, Code | str], times: dict[Schedule, float]) -> Choice[Schedule]:
    return choose("k", "h100", A, found, lambda s, _: times[s])


def why(choice: Choice[Schedule], s: Schedule) -> str:
    return next(c.lost for c in choice.candidates if c.schedule == s)


def test_the_default_stays_unless_clearly_beaten() -> None:
    near = taken({A: CODE, B: CODE}, {A: 10e-6, B: 9.5e-6})
    assert near.chosen == A
    assert why(near, B) == "modelled 9.5 us, 5.0% faster: less than the 10% for which the default is left"
    far = taken({A: CODE, B: CODE, C: CODE}, {A: 10e-6, B: 8e-6, C: 9e-6})
    assert [c.schedule for c in far.candidates] == [B, C, A]
    assert why(far, A) == "modelled 10.0 us, 25.0% slower"
    assert far.why == "instead of the default 256, 4 warps: modelled 10.0 us, 25.0% slower"


def test_what_is_ruled_out_says_why() -> None:
    found: dict[Schedule, Code | str] = {
        A: replace(CODE, spilled=64),
        B: "Triton refuses it",
        C: replace(CODE, blocks=0, shared=300_000),
        D: CODE,
        Schedule(XB=1): replace(CODE, widths={"x": 8}),
    }
    choice = taken(found, dict.fromkeys(found, 1e-06))
    assert choice.chosen == D, "the default spills, and another does not"
    assert why(choice, A) == "spills 64 bytes a thread, where another spills 0"
    assert why(choice, B) == "Triton refuses it"
    assert "300000 bytes of shared memory" in why(choice, C)
    assert why(choice, Schedule(XB=1)) == "x in accesses of 8 bytes, where the default has 16"


def test_nothing_usable_leaves_the_default() -> None:
    choice = taken({B: "no", A: "no"}, {})
    assert choice.chosen == A
    assert len(choice.candidates) == 2


def test_measuring_takes_the_fastest_of_the_best() -> None:
    times = {A: 10e-6, B: 9.9e-6, C: 9.8e-6, D: 30e-6}
    choice = taken(dict.fromkeys(times, CODE), times)
    assert choice.chosen == A
    asked: list[Schedule] = []

    def timer(s: Schedule) -> float:
        asked.append(s)
        if s == C:
            raise RuntimeError("out of memory\nand more")
        return {A: 12e-6, B: 11e-6}[s]

    found = measure(choice, timer, few=3)
    assert found.chosen == B
    assert found.how == "measured"
    assert D not in asked
    assert why(found, A) == "measured 12.0 us, 9.1% slower"
    assert why(found, C) == "failed when it was measured: out of memory"
    assert why(found, D) == "not measured: modelled 30.0 us"
    assert from_data(json.loads(json.dumps(as_data(found))), Schedule) == found


def test_seconds_grow_with_what_binds() -> None:
    moved = 1e9
    wide = Work(100_000, 1, 1, moved)
    floor = moved / (H100.bandwidth * 0.85)
    assert seconds(wide, CODE, H100) == pytest.approx(floor, rel=0.05)
    assert seconds(wide, replace(CODE, instructions=100_000), H100) > 2 * floor, "instructions"
    assert seconds(replace(wide, programs=2_000_000), replace(CODE, blocks=1), H100) > 2 * floor, "waves"
    assert seconds(replace(wide, again=moved), CODE, H100) > 1.2 * floor, "bytes read again"
    assert seconds(wide, replace(CODE, blocks=0), H100) == float("inf")
    few, many = Work(8, 50, 50, 1e6), Work(800, 1, 1, 1e6)
    assert seconds(few, CODE, H100) > 5 * seconds(many, CODE, H100), "too few programs"
    assert 1.3e9 < clock(find("a100")) < 1.5e9 < 1.7e9 < clock(H100) < 2.1e9


@pytest.mark.parametrize(
    "kernel", [pointwise("add", 4096, ["bf16", "bf16"], "bf16"), layernorm_kernel(64, 1024)], ids=lambda k: k.name
)
def test_alternatives_are_few_and_launchable(kernel: Kernel) -> None:
    found = alternatives(kernel, default_schedule(kernel))
    assert found[0] == default_schedule(kernel)
    assert 2 <= len(found) <= 6
    for s in found:
        assert s.XB & (s.XB - 1) == s.RB & (s.RB - 1) == s.num_warps & (s.num_warps - 1) == 0
        assert 32 * s.num_warps <= s.XB * s.RB


def test_alternatives_compute_the_same() -> None:
    kernel = softmax_kernel(6, 80)
    x = torch.randn(6, 80, generator=torch.Generator().manual_seed(0))
    default = Schedule(2, 128, 4)
    for s in alternatives(kernel, default):
        torch.testing.assert_close(apply(kernel, x, schedule=s), torch.softmax(x, -1))


def test_sizes_that_are_not_known_leave_the_default() -> None:
    kernel = softmax_kernel("n", 80)
    assert alternatives(kernel, default_schedule(kernel)) == (default_schedule(kernel),)


def test_work_and_traffic() -> None:
    kernel = layernorm_kernel(64, 1024)
    once = sum(traffic(kernel).values())
    assert once >= 2 * 64 * 1024 * 2
    whole = work(kernel, Schedule(2, 1024), CODE)
    assert (whole.programs, whole.loops, whole.again) == (32, 1, 0)
    code = replace(CODE, passes={"x": 3})
    looped = work(kernel, Schedule(2, 256), code)
    assert (looped.programs, looped.loops, looped.rounds) == (32, 4, 12)
    assert looped.again == 2 * traffic(kernel)["x"]


def test_a_loop_over_few_long_rows_takes_longer_steps() -> None:
    """Compiled for sm_90: the model sees a chain of loads, and the runners-up say what they lack."""
    kernel = layernorm_kernel(256, 50_000)
    default = default_schedule(kernel)
    found = {s: inspect(kernel, s, 90).code for s in (default, replace(default, RB=default.RB * 2))}
    choice = modelled(kernel, default, H100, found)
    assert choice.chosen.RB == 2 * default.RB
    assert "slower" in why(choice, default)
    assert all(c.blocks >= 1 and not troubled(c) for c in found.values())


def test_instructions_are_those_of_the_machine_code() -> None:
    facts = inspect(pointwise("add", 4096, ["f32", "f32"], "f32"), None, 80)
    listed = sum(line.lstrip().startswith("/*") and line.rstrip().endswith(";") for line in facts.sass().splitlines())
    assert instructions(facts.cubin) == facts.code.instructions == listed


def test_a_measured_choice_is_kept_for_later_processes(tmp_path: Path) -> None:
    kernel = layernorm_kernel(64, 1024)
    timed: list[Schedule] = []

    def timer(_: Kernel, s: Schedule) -> float:
        timed.append(s)
        return 1e-6 if s.num_warps == 2 else 2e-6

    def code(_: Kernel, s: Schedule, capability: int) -> Code:
        assert capability == 90
        return replace(CODE, warps=s.num_warps)

    def refuse(*_: object) -> float:
        raise AssertionError("it is kept")

    first = tune.tuned([plan(kernel)], H100, tmp_path / "cache", timer, code)
    assert first["layernorm"].chosen.num_warps == 2
    assert first["layernorm"].how == "measured"
    assert 2 <= len(timed) <= FEW + 1
    again = tune.tuned([plan(kernel)], H100, tmp_path / "cache", refuse, refuse)  # type: ignore[arg-type]
    assert again == first
    other = tune.tuned([plan(kernel)], find("h200"), tmp_path / "cache", timer, code)
    assert other["layernorm"].target == "h200", "another machine measures for itself"
    [file, _] = sorted((tmp_path / "cache").glob("*.choice"))
    file.write_bytes(b"damaged")
    file.with_name(f"{tune.key(kernel, default_schedule(kernel), H100)}.choice").write_bytes(b"damaged")
    assert tune.tuned([plan(kernel)], H100, tmp_path / "cache", timer, code) == first


def test_a_plan_takes_other_schedules() -> None:
    kernel = layernorm_kernel(64, 1024)
    chosen = replace(default_schedule(kernel), num_warps=2)
    [part] = plan(kernel).with_schedules({"layernorm": chosen}).parts
    assert part.schedule == chosen
    assert plan(kernel).with_schedules({"other": chosen}) == plan(kernel)


def test_arguments_reach_as_far_as_indices() -> None:
    assert length(layernorm_kernel(64, 1024), "x") >= 64 * 1024
    kernel = gather_kernel(8)
    tensors = arguments(kernel, torch.device("cpu"))
    assert [t.dtype.is_floating_point for t in tensors] == [b.dtype.startswith(("f", "bf")) for b in kernel.buffers]
    assert all(t.numel() > 0 for t in tensors)


def test_kernels_with_one_schedule_have_no_choice() -> None:
    kernel = softmax_kernel("n", 80)
    listed = Listed(0, "forward", kernel, 1, {}, (), "", default_schedule(kernel))
    assert jobs([listed], H100) == []
    assert choices_of([listed], H100) == {}
