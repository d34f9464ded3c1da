"""Keys of compiled graphs: the same for the same, another for whatever could change the program, none where unsure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dsc import fingerprint


def key(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> str:
    """The key of the one graph of ``fn``, or why it has none."""
    found: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        try:
            found.append(fingerprint.of(gm, inputs, ""))
        except fingerprint.Unnamed as why:
            found.append(f"none: {why}")
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    torch._dynamo.reset()
    (only,) = found
    return only


def base(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x * 2) + x.transpose(0, 1)


X = torch.ones(4, 4)
CHANGES: dict[str, Callable[[], str]] = {
    "a constant": lambda: key(lambda x: F.gelu(x * 3) + x.transpose(0, 1), X),
    "an operator": lambda: key(lambda x: F.silu(x * 2) + x.transpose(0, 1), X),
    "a keyword": lambda: key(lambda x: F.gelu(x * 2, approximate="tanh") + x.transpose(0, 1), X),
    "an integer for a float": lambda: key(lambda x: F.gelu(x * 2.0) + x.transpose(0, 1), X),
    "an argument": lambda: key(lambda x: F.gelu(x * 2) + x.transpose(1, 0), X),
    "a size": lambda: key(base, torch.ones(5, 5)),
    "a stride": lambda: key(base, torch.ones(4, 4).T.contiguous().T),
    "an offset": lambda: key(base, torch.ones(20)[4:].view(4, 4)),
    "a dtype": lambda: key(base, X.double()),
    "gradients": lambda: key(base, X.clone().requires_grad_()),
    "a parameter": lambda: key(base, nn.Parameter(X)),
    "sizes that may change": lambda: key(base, X, dynamic=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_program_changes_the_key(change: str) -> None:
    other = CHANGES[change]()
    assert len(other) == 32
    assert other != key(base, X)


def test_a_conjugate_is_another_input() -> None:
    x = torch.ones(4, dtype=torch.complex64)
    assert key(lambda x: x * 2, x.conj()) != key(lambda x: x * 2, x)


def test_modes_change_the_key() -> None:
    plain = key(base, X)
    with torch.no_grad():
        assert key(base, X) != plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert key(base, X) != plain
    torch.use_deterministic_algorithms(True)
    try:
        assert key(base, X) != plain
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.backends.mkldnn.flags(enabled=False):
        assert key(base, X) != plain
    assert key(base, X) == plain


def test_names_and_values_do_not() -> None:
    def other(argument: torch.Tensor) -> torch.Tensor:
        half = F.gelu(argument * 2)
        return half + argument.transpose(0, 1)

    assert key(other, X + 5) == key(base, X)
    assert key(nn.Sequential(nn.Linear(4, 4)), X) == key(nn.ModuleDict({"a": nn.Linear(4, 4)})["a"], X)


def test_constants_count_by_value() -> None:
    def adds(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x + torch.tensor([number, 1.0])

    x = torch.ones(2)
    assert key(adds(1.0), x) == key(adds(1.0), x)
    assert key(adds(1.0), x) != key(adds(2.0), x)


def test_another_process_finds_the_same() -> None:
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/dsc']\n"
        "import test_fingerprint as t\n"
        "print(t.key(t.base, t.X), t.key(t.base, t.X, dynamic=True))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [key(base, X), key(base, X, dynamic=True)]


@torch.library.custom_op("dsc_test_fingerprint::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def mutate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(y)


def test_what_has_no_name_has_no_key() -> None:
    shared = torch.ones(8)
    assert key(mutate, shared[:4], shared[4:]) == "none: inputs that share memory"
    assert key(lambda x: twice(x), X) == "none: operator dsc_test_fingerprint.twice.default"
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert len(key(base, X)) == 32  # hooks that Dynamo does not inline are called when the program runs
