"""The fuzzer's programs against eager and float64, and the fuzzer itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dsc.debug import fuzz
from dsc.debug.fuzz import Input, Line, Program

TOGETHER = 25
NO_SHRINKING = (Phase.explicit, Phase.generate)  # fuzz.shrink works on the program that fails, not on its batch


def differ(seed: int, options: dict[str, object], count: int = TOGETHER) -> None:
    programs = [fuzz.generate(random.Random(seed * 1000 + i)) for i in range(count)]
    found = [(p, why) for p, why in zip(programs, fuzz.check_all(programs, options)) if why is not None]
    if found:
        p, why = found[0]
        small = fuzz.shrink(p, lambda q: fuzz.check(q, options) is not None, attempts=30)
        pytest.fail(f"{len(found)} of {count}: {why}\n{small.script()}")


@given(st.integers(0, 1 << 16))
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=NO_SHRINKING,
    suppress_health_check=list(HealthCheck),
)
def test_programs_in_cpp(seed: int) -> None:
    differ(seed, {})


@given(st.integers(0, 1 << 16))
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    database=None,
    phases=NO_SHRINKING,
    suppress_health_check=list(HealthCheck),
)
def test_programs_in_tritons_interpreter(seed: int) -> None:
    differ(seed, {"emit": "triton"})


SMALL = Program(
    (Input("float32", (3, 5), "plain", 1), Input("float32", (5,), "plain", 2)),
    (Line("torch.sin({0})", (0,)), Line("{0} + {1}", (2, 1)), Line("{0} * 2", (3,))),
)


def test_a_seed_gives_one_program() -> None:
    assert fuzz.generate(random.Random(7)) == fuzz.generate(random.Random(7))


def test_the_source_of_a_program() -> None:
    assert SMALL.source() == (
        "def program(x0, x1):\n    v0 = torch.sin(x0)\n    v1 = v0 + x1\n    v2 = v1 * 2\n    return v2,\n"
    )


def test_shrinking_keeps_the_line_that_fails() -> None:
    small = fuzz.shrink(SMALL, lambda p: any("sin" in x.text for x in p.lines))
    assert small.source() == "def program(x0):\n    v0 = torch.sin(x0)\n    return v0,\n"


@pytest.mark.parametrize("wrong", ["values", "strides", "dtype"])
def test_a_wrong_answer_is_seen(wrong: str) -> None:
    right = fuzz.evaluate(SMALL.function(), SMALL.tensors())
    got = list(right)
    assert got[0] is not None
    got[0] = {"values": got[0] + 1e-3, "strides": got[0].t().contiguous().t(), "dtype": got[0].double()}[wrong]
    assert fuzz.verdict(SMALL, right) is None
    assert fuzz.verdict(SMALL, got) is not None


def test_the_script_shows_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    exec(SMALL.script(), {})
    assert capsys.readouterr().out == "None\n"


ODD = Program(
    (Input("float32", (1, 1, 2), "transposed", 1), Input("float32", (2, 1), "plain", 2)), (Line("{0} * {1}", (0, 1)),)
)


def test_broadcast_strides_of_size_one_dimensions_are_atens() -> None:
    assert fuzz.check(ODD) is None
