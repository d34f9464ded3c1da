"""The fuzzer's programs against eager and float64, and the fuzzer itself."""

from __future__ import annotations

import functools
import itertools
import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dsc import ops
from dsc.compilation import Compilation
from dsc.debug.fuzz import Input, Line, Program, campaign, lines, maker, noise, rules, script, shrinking, trial
from dsc.debug.fuzz.__main__ import main
from dsc.debug.fuzz.observe import Seen, in_eager, in_float64, runs

A_FEW = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # shrinking.shrink works on the program that fails, not on its batch
    suppress_health_check=list(HealthCheck),
)


def differ(programs: list[Program], **options: object) -> None:
    verdicts = trial.check_all(programs, options)
    found = [(p, why) for p, why in zip(programs, verdicts) if trial.is_fault(why)]
    if found:
        p, why = found[0]
        small = shrinking.shrink(p, lambda q: trial.is_fault(trial.check(q, options)), attempts=30)
        pytest.fail(f"{len(found)} of {len(programs)}: {why}\n{script([small], str(why), options)}")


def batches(count: int, **kind: object) -> st.SearchStrategy[list[Program]]:
    """Programs whose every choice hypothesis makes."""
    programs = st.builds(lambda rng: maker.generate(rng, **kind), st.randoms(use_true_random=False))  # type: ignore[arg-type]
    return st.lists(programs, min_size=count, max_size=count)


@given(batches(12))
@settings(A_FEW, max_examples=4)
def test_programs_that_train(programs: list[Program]) -> None:
    differ(programs)


@given(batches(12, grad=False, edges=True))
@settings(A_FEW, max_examples=2)
def test_programs_on_infinities(programs: list[Program]) -> None:
    differ(programs)


@given(batches(6, worlds=({"a": 5, "b": 3, "c": 16}, {"a": 4, "b": 7, "c": 9})))
@settings(A_FEW, max_examples=2)
def test_programs_in_several_sizes(programs: list[Program]) -> None:
    differ(programs)


@given(batches(8))
@settings(A_FEW, max_examples=2)
def test_programs_in_tritons_interpreter(programs: list[Program]) -> None:
    differ(programs, emit="triton")


# --- what is drawn -----------------------------------------------------------------------------------------------------


def program_of(row: str, fits: tuple[str, ...]) -> Program | None:
    """A program of one row, and of whatever makes its operands."""
    for seed in range(400):
        draft = maker.Maker(random.Random(f"{row} {seed}"), ({},), False, True, False)
        draft.open()
        for _ in range(2 * (seed % 4)):
            draft.step()
        operands = draft.operands(fits)
        if operands is None or not draft.add(row, operands):
            continue
        whole = draft.drawn()
        program = shrinking.only(whole, whole.size - 1)
        if runs(program):
            return program
    return None


NOT_COMPUTED = {"view", "view any", "matmul", "random", "write", "write 2"}
"""Kinds of rows whose operators no kernel computes."""


@pytest.fixture(scope="module")
def of_rows() -> dict[str, dict[str, Program | None]]:
    return {kind: {row: program_of(row, fits) for row in rows} for kind, (_, rows, fits) in lines.KINDS.items()}


def test_every_row_is_one_that_eager_runs(of_rows: dict[str, dict[str, Program | None]]) -> None:
    assert [row for made in of_rows.values() for row, p in made.items() if p is None] == []


def test_every_operator_that_kernels_compute_is_drawn(of_rows: dict[str, dict[str, Program | None]]) -> None:
    programs = [p for kind, made in of_rows.items() if kind not in NOT_COMPUTED for p in made.values() if p is not None]
    names = set[str]()

    def hear(record: Compilation) -> None:
        called = re.findall(r"= (?:aten\.)?(\w+(?:\.\w+)?)\(", record.text)
        names.update(n if "." in n else f"{n}.default" for n in called)

    for i in range(0, len(programs), 60):
        batch = programs[i : i + 60]
        verdicts = trial.check_all(batch, {"emit": "aten", "on_compile": hear})
        assert [(p.source(), v) for p, v in zip(batch, verdicts) if trial.is_fault(v)] == []
    fused = {n for n, info in ops.table().items() if info.kind in ("pointwise", "create", "reduction", "rowwise")}
    assert sorted(n for n in fused - names if not n.startswith("dsc.")) == []  # those are no operators of users


def test_a_seed_gives_one_batch() -> None:
    assert campaign.batch(7, 3) == campaign.batch(7, 3)


def test_batches_of_all_kinds_are_made() -> None:
    kinds = {campaign.batch(seed, 0)[0] for seed in range(60)}
    assert kinds == {"training", "training, edges", "inference", "inference, edges", "dynamic=True", "mark_dynamic"}


def test_programs_have_what_the_language_offers() -> None:
    made = [maker.generate(random.Random(seed)) for seed in range(120)]
    inputs = [i for p in made for i in p.inputs]
    assert {i.layout for i in inputs} == {"plain", "transposed", "sliced", "stepped", "expanded"}
    assert {i.dtype for i in inputs} >= {"float32", "float64", "bfloat16", "float16", "int64", "int8", "uint8", "bool"}
    assert {0, 1} <= {n for i in inputs for n in i.shape}
    seen = [in_eager(p, {}) for p in made]
    assert any(s.shared for s in seen), "results that share memory"
    assert any(not s.gradients for s in seen) and any(s.gradients for s in seen)
    words = " ".join(x.text for p in made for x in p.lines)
    assert "dropout" in words and "add_(" in words and "rand" in words


# --- the parts ---------------------------------------------------------------------------------------------------------

SMALL = Program(
    (Input("float32", (3, 5), grad=True, seed=1), Input("float32", (5,), grad=True, seed=2)),
    (Line("torch.sin({0})", (0,)), Line("{0} + {1}", (2, 1)), Line("{0} * 2", (3,))),
)


def test_the_source_of_a_program() -> None:
    assert SMALL.source() == (
        "def program(x0, x1):\n    v0 = torch.sin(x0)\n    v1 = v0 + x1\n    v2 = v1 * 2\n    return v2,\n"
    )


def test_shrinking_keeps_the_line_that_fails() -> None:
    small = shrinking.shrink(SMALL, lambda p: any("sin" in x.text for x in p.lines))
    assert small.source() == "def program(x0):\n    v0 = torch.sin(x0)\n    return v0,\n"
    assert not small.grad


def test_shrinking_keeps_what_fails_only_together() -> None:
    many = [replace(SMALL, outputs=(i,)) for i in range(5)]
    few = shrinking.shrink_batch(many, lambda ps: many[1] in ps and many[4] in ps, attempts=40)
    assert few == [many[1], many[4]]


def sampled(p: Program, state: torch.Tensor, count: int, seed: int, how: rules.How) -> list[Seen]:
    return noise.samples(p, {}, state, count, seed, how=how)


def judged(got: Seen, p: Program = SMALL) -> str | None:
    want, exact = in_eager(p, {}), in_float64(p, {})
    return rules.difference(got, want, exact, functools.partial(sampled, p, torch.get_rng_state()))


@pytest.mark.parametrize("wrong", ["value", "last bits", "strides", "dtype", "no gradient", "memory", "wants grad"])
def test_a_wrong_answer_is_seen(wrong: str) -> None:
    seen = in_eager(SMALL, {})
    assert judged(seen) is None
    (y,) = seen.results
    changed = {
        "value": replace(seen, results=[y + 1e-3]),
        "last bits": replace(seen, results=[y * (1 + 1e-5)]),
        "strides": replace(seen, results=[y.t().contiguous().t()]),
        "dtype": replace(seen, results=[y.double()]),
        "no gradient": replace(seen, gradients=[None, seen.gradients[1]]),
        "memory": replace(seen, shared=((0, 1, 0),)),
        "wants grad": replace(seen, wants_grad=(False,)),
    }[wrong]
    assert judged(changed) is not None


def test_a_rounding_on_the_way_is_allowed() -> None:
    seen = in_eager(SMALL, {})
    assert judged(replace(seen, results=[seen.results[0] + 2e-7])) is None


def test_cancellation_widens_the_room() -> None:
    p = Program((Input("float32", (4,), seed=3),), (Line("({0} + 100) - 100", (0,)),))
    want, exact = in_eager(p, {}), in_float64(p, {})
    state = torch.get_rng_state()

    def room(q: Program, by: float = 4e-6) -> str | None:
        off = replace(want, results=[want.results[0] + by])
        return rules.difference(off, want, exact, functools.partial(sampled, q, state))

    two_lines = replace(p, lines=(Line("{0} + 100", (0,)), Line("{0} - 100", (1,))))
    assert room(two_lines) is None
    assert room(p) is None, "operators of one line round too"
    assert room(replace(p, lines=(Line("{0} * 1", (0,)),)), 2e-5) is not None


def test_a_line_that_names_a_value_twice_reads_it_once() -> None:
    """Two roundings of one value would make ``x == x`` false, and send its gradient elsewhere."""
    line = Line("torch.where({0}.detach() == {0}.detach(), {1}, {0})", (0, 1))
    p = Program((Input("float32", (40,), seed=1), Input("float32", (), seed=2, grad=True)), (line,))
    state = torch.get_rng_state()
    moved = [run.gradients[0] for run in sampled(p, state, 8, 0, "exact")]
    assert all(g is not None and g.abs() > 0 for g in moved)


def test_gradients_of_a_value_that_a_line_names_twice_are_added_in_its_dtype() -> None:
    """-0.517 + 0.484 - 0.033 in bfloat16: which two come first decides the last bits of what is left."""
    line = Line("torch.cat([{0}, {1}.to(torch.float64)], 0)", (0, 0))
    p = Program((Input("bfloat16", (19, 19), seed=1, grad=True),), (line, Line("{0}.reshape({0}.shape)", (0,))))
    want = in_eager(p, {})
    (g,) = want.gradients
    assert g is not None

    def off(by: float) -> str | None:
        return judged(replace(want, gradients=[g + by]), p)

    assert off(2.0**-10) is None
    assert off(2.0**-4) is not None


def test_partial_sums_that_grow_before_they_come_back_may_be_off() -> None:
    """256 numbers from -1 to 1 in order: one by one they are -64 in the middle, and 0 in the end."""
    p = Program(
        (Input("float32", (256,), seed=1, grad=True),), (Line("torch.sort({0}).values", (0,)), Line("{0}.sum()", (1,)))
    )
    want = in_eager(p, {})

    def off(by: float) -> str | None:
        return judged(replace(want, results=[*want.results[:-1], want.results[-1] + by]), p)

    assert off(2e-4) is None
    assert off(2e-2) is not None


def test_a_last_bit_decides_whether_numbers_of_16_bits_are_equal() -> None:
    """In float64 a number that was rounded another way never equals one of 16 bits."""
    inputs = (Input("bfloat16", (5, 5, 5, 16), seed=29861), Input("bfloat16", (), seed=32360))
    p = Program(inputs, (Line("torch.rsqrt({0} * {0} + 1)", (1,)), Line("{0} != {1}", (2, 0))))
    want = in_eager(p, {})
    x, y = p.tensors({})
    away = (x.double() - torch.rsqrt(y.double() ** 2 + 1)).abs().reshape(-1)

    def turned(at: int) -> str | None:
        flipped = want.results[-1].clone()
        flipped.view(-1)[at] ^= True
        return judged(replace(want, results=[*want.results[:-1], flipped]), p)

    assert turned(int(away.argmin())) is None
    assert turned(int(away.argmax())) is not None


def test_a_sum_within_a_line_may_be_rounded_the_other_way() -> None:
    """``log(x + 1)`` of a small number in float16: ``x + 1`` is a multiple of 2**-10, up or down."""
    p = Program(
        (Input("float16", (4096,), seed=5),), (Line("{0} * 0.01", (0,)), Line("torch.log({0}.abs() + 1)", (1,)))
    )
    want, exact = in_eager(p, {}), in_float64(p, {})
    small = (p.tensors({})[0] * 0.01).double().abs()
    place = ((small * 2**10) % 1 - 0.5).abs().argmin()

    def off(by: float) -> str | None:
        changed = want.results[-1].clone()
        changed[place] += by
        return judged(replace(want, results=[*want.results[:-1], changed]), p)

    up = 1 if exact.results[-1][place] > want.results[-1][place] else -1
    assert off(up * 2.0**-10) is None
    assert off(up * 2.0**-6) is not None


def test_a_norm_whose_bias_is_its_weight_may_be_off() -> None:
    """Of two numbers the lower is normalised to nearly -1: what is left are the roundings inside of the norm."""
    line = Line("F.layer_norm({0}, {0}.shape, {1}, {1})", (0, 1))
    p = Program((Input("float32", (2,), seed=2), Input("float32", (2,), seed=3)), (line,))
    want = in_eager(p, {})

    def off(by: float) -> str | None:
        return judged(replace(want, results=[want.results[0] + by]), p)

    assert off(5e-8) is None
    assert off(1e-3) is not None


def test_the_logarithm_of_a_sum_near_one_may_be_off() -> None:
    """``-log(1 + exp(-8))``: in float32 the sum is a multiple of 2**-23."""
    p = Program((Input("float32", (2,), seed=8),), (Line("{0} * 9", (0,)), Line("torch.log_softmax({0}, 0)", (1,))))
    want = in_eager(p, {})
    top = want.results[0].argmax()
    assert -1e-2 < want.results[0][top] < 0

    def off(by: float) -> str | None:
        changed = want.results[0].clone()
        changed[top] += by
        return judged(replace(want, results=[changed]), p)

    assert off(2.0**-23) is None
    assert off(2.0**-16) is not None


CANCELS = ("torch.softmax({0}, 0)", "F.log_softmax({0}, 0)", "F.layer_norm({0}, {0}.shape)")


@pytest.mark.parametrize("line", CANCELS)
def test_what_cancels_inside_of_an_operator_may_be_off(line: str) -> None:
    """Of one number, the gradient is 0 but for roundings, which no two machines share."""
    p = Program((Input("float32", (1,), seed=3, grad=True),), (Line(line, (0,)), Line("{0} * 0.3", (1,))))
    want = in_eager(p, {})

    def off(by: float) -> str | None:
        (g,) = want.gradients
        assert g is not None
        return judged(replace(want, gradients=[g + by]), p)

    assert off(1e-8) is None
    assert off(1e-2) is not None


def test_the_script_shows_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    exec(script([SMALL], "why"), {})
    assert capsys.readouterr().out == "[None]\n"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--programs 2 --batch 1 --workers 1 --seed 3 --emit aten".split()) == 0
    assert "2 programs" in capsys.readouterr().out


def test_the_command_fails_on_a_mismatch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(rules, "difference", lambda *_: f"made up {next(numbers)}")
    monkeypatch.setattr(campaign, "shrink", lambda p, _: p)
    assert main("--programs 1 --batch 1 --workers 1 --emit aten".split()) == 1
    assert "made up" in capsys.readouterr().out


# --- programs that once failed, one of a kind --------------------------------------------------------------------------

ODD = Program(
    (Input("float32", (1, 1, 2), "transposed", 1), Input("float32", (2, 1), seed=2)), (Line("{0} * {1}", (0, 1)),)
)


FLIPPED_NUMBER = Program(
    (Input("float32", (), grad=True, seed=1),), (Line("{0}.flip([0])", (0,)), Line("torch.lerp({0}, {1}, {1})", (1, 0)))
)
NARROW_CONSTANT = Program((Input("float64", (1, 3), seed=1),), (Line("torch.scalar_tensor(2.7) * {0}", (0,)),))
UNFORETOLD_STRIDES = Program(
    (Input("float32", (5, 1, 5), seed=1), Input("int32", (5, 4, 5), "transposed", seed=2)),
    (Line("{0}.logical_and({1})", (0, 1)), Line("{0}.float() + {1}", (1, 0))),
)
DROPOUT_ACROSS_MEMORY = Program(
    (Input("float32", (4, 3, 2, 4), "transposed", seed=1),), (Line("torch.softmax(F.dropout({0}, 0.3), 2)", (0,)),)
)
WHOLE_STORAGE = Program(
    (Input("float16", (), grad=True, seed=3),),
    (
        Line("{0}.as_strided({0}.shape, {0}.stride())", (0,)),
        Line("{0}.reshape(-1)", (0,)),
        Line("torch.lerp({0}, {1}, {2})", (1, 0, 2)),
    ),
)
WRITTEN_BEHIND_AUTOGRAD = Program(
    (Input("float32", (2, 3), seed=1), Input("float32", (5,), seed=2, grad=True)),
    (Line("{0}.sum(0)", (0,)), Line("{0}.mul_(2)", (0,)), Line("{0}.detach().mul_(0.5)", (1,))),
)


def test_programs_that_once_failed() -> None:
    assert (
        trial.check_all(
            [ODD, FLIPPED_NUMBER, NARROW_CONSTANT, UNFORETOLD_STRIDES, DROPOUT_ACROSS_MEMORY, WHOLE_STORAGE]
        )
        == [None] * 6
    )


def test_a_write_behind_autograds_back() -> None:
    assert trial.check(WRITTEN_BEHIND_AUTOGRAD) is None
