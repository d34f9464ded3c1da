"""Plans as JSON, and budgets as text."""

from pathlib import Path

import pytest
import torch

from dsc import budget, plan
from dsc.errors import BadOption, BadPlan
from kit_graphs import CPU, trace

ONE = plan.MemoryPlan(
    "cpu", 1000, 10, 990, 2.0, 1500, 1.0, "chain", ("a", "b"), ("c", "a", "d"), (plan.Decision("a", 64, "save"),)
)


def test_plans_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "plans" / "gpt.json"
    plan.add(file, "k0", ONE)
    plan.add(file, "k1", ONE)
    assert plan.read(file) == {"k0": ONE, "k1": ONE}
    assert plan.dump(plan.read(file)) == file.read_text()
    assert ONE.extra == 1.0
    assert plan.read(tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "JSONDecodeError"), ('{"version": 9}', "version 9"), ('{"version": 3}', "KeyError"), ("[]", "TypeError")],
)
def test_other_files_say_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(BadPlan, match=why):
        plan.parse(text)


def test_fingerprints_tell_graphs_apart() -> None:
    a, b, c = (trace(f, torch.zeros(n)) for f, n in ((torch.sin, 3), (torch.sin, 3), (torch.sin, 4)))
    assert plan.fingerprint(a) == plan.fingerprint(b) != plan.fingerprint(c)


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [(7, 7), ("40GiB", 40 << 30), ("1.5 MB", 1500000), ("12", 12), ("80%", 16 * 2**30 * 80 // 100), ("3kib", 3072)],
)
def test_budgets(given: int | str, nbytes: int) -> None:
    assert budget.bytes_of(given, CPU) == nbytes


def test_auto_leaves_a_reserve() -> None:
    assert 0.9 * CPU.memory < budget.bytes_of("auto", CPU) < CPU.memory


@pytest.mark.parametrize("given", ["", "much", "0", "-3GiB", "40 TiBs", 0, -1, True])
def test_budgets_that_are_none(given: int | str) -> None:
    with pytest.raises(BadOption, match="memory_budget"):
        budget.bytes_of(given, CPU)
