"""The harness itself: it finds each kind of difference, and programs that crash or hang do not end it."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from conformance import architectures, case, isolate
from conformance.case import Case, randn
from conformance.outcome import Outcome, once

TESTS = Path(__file__).parents[1]


def wrong(change: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., Any]:
    """A backend that changes the results of every graph."""

    def backend(gm: GraphModule, _: object) -> Callable[..., Any]:
        return lambda *inputs: tuple(change(list(gm.forward(*inputs))))

    return backend


def draws(outs: list[Any]) -> list[Any]:
    torch.rand(1)
    return outs


PROGRAM = Case(lambda x: (x * 2, x.t() * 1), [(randn(3, 4, grad=True),)], grad=True)
WRONG: dict[str, Callable[[list[Any]], Sequence[Any]]] = {
    "not close": lambda o: [o[0] + 1e-3, o[1]],
    "float64": lambda o: [o[0].double(), o[1]],
    r"compiled \(4, 3\)": lambda o: [o[0].reshape(4, 3), o[1]],
    "stride": lambda o: [o[0], o[1].contiguous()],
    "requires_grad": lambda o: [o[0].detach(), o[1]],
    "gradient 0": lambda o: [o[0] + (o[0] - o[0].detach()), o[1]],
    "generator": draws,
}


@pytest.mark.parametrize("words", list(WRONG))
def test_differences_are_found(words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        case.run(lambda: PROGRAM, wrong(WRONG[words]))  # type: ignore[arg-type]


def test_shared_storage_is_found() -> None:
    with pytest.raises(AssertionError, match="share with each other"):
        case.run(lambda: Case(lambda x: (x * 2, x + x), [(randn(3),)]), wrong(lambda o: [o[0], o[0]]))  # type: ignore[arg-type]


def test_equal_programs_pass() -> None:
    case.run(lambda: PROGRAM, wrong(lambda o: o))  # type: ignore[arg-type]


def test_errors_must_be_of_the_type_that_is_asked_for() -> None:
    def raises() -> Case:
        return Case(lambda x: x[5] + 1, [(randn(3),)], raises=IndexError)

    def refuses(gm: GraphModule, _: object) -> Callable[..., Any]:
        def run(*_: Any) -> Any:
            raise OverflowError("other")

        return run

    case.run(raises, "eager")
    with pytest.raises(AssertionError, match="eager raises IndexError"):
        case.run(lambda: Case(lambda x, i: x[i] + 1, [(randn(3), torch.tensor([5]))], raises=IndexError), refuses)  # type: ignore[arg-type]
    with pytest.raises(case.Unfit, match="was to raise"):
        case.run(lambda: Case(lambda x: x + 1, [(randn(3),)], raises=IndexError), "eager")


def crash() -> Outcome:
    faulthandler.disable()  # the stack of a crash on purpose would only be noise
    os.abort()


def hang() -> Outcome:
    time.sleep(60)
    return Outcome(passed=1)


def leave() -> Outcome:
    raise SystemExit("gone")


def test_one_crash_does_not_end_the_rest() -> None:
    tasks = [crash, lambda: Outcome(passed=3), leave, hang, lambda: once(lambda: 1 // 0), lambda: Outcome(passed=1)]
    begin = time.monotonic()
    outcomes = dict(isolate.run_all(tasks, 2, 2.0))
    assert time.monotonic() - begin < 30
    assert [outcomes[i].passed for i in range(6)] == [0, 3, 0, 0, 0, 1]
    assert "SIGABRT" in outcomes[0].failures[0]
    assert "gone" in outcomes[2].failures[0]
    assert "did not end in 2 s" in outcomes[3].failures[0]
    assert "ZeroDivisionError" in outcomes[4].failures[0]


def test_command(tmp_path: Path) -> None:
    """The command on one program, with another backend beside it."""
    out = tmp_path / "out.json"
    words = "--suite cases --only mutation/slice_copy --compare eager --jobs 1 --json".split()
    done = subprocess.run(
        [sys.executable, "-m", "conformance", *words, str(out)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "eager passes more than dsc in 0 programs: none" in done.stdout
    rows = json.loads(out.read_text())["results"]
    assert [(r["backend"], r["passed"], r["failures"]) for r in rows] == [("dsc", 1, []), ("eager", 1, [])]


@pytest.mark.parametrize("name", [members[0] for members in architectures.FAMILIES.values()])
def test_dropout_in_training(name: str) -> None:
    """The same seed drops the same values as in eager: losses, gradients and the generator of two steps."""
    pytest.importorskip("transformers")
    architectures.compare(name, "dsc", dropout=architectures.DROPOUT)


def test_a_parameter_without_elements_is_compared() -> None:
    empty = architectures.Step(torch.tensor(1.0), {"w": torch.zeros(0, 3)}, torch.get_rng_state())
    architectures.same(empty, empty)
    other = architectures.Step(torch.tensor(1.0), {"w": torch.zeros(3, 0)}, torch.get_rng_state())
    with pytest.raises(AssertionError):
        architectures.same(empty, other)


def test_tensors_of_the_harness_are_the_same_for_the_same_seed() -> None:
    a, b = randn(3, seed=1), randn(3, seed=1)
    assert isinstance(a, Tensor) and torch.equal(a, b) and not torch.equal(a, randn(3, seed=2))
