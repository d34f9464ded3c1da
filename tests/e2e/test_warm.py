"""Compiled graphs on disk: the next process compiles none, and never gets a program that was made for something else."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from dsc import compiler, warm
from dsc.debug.capture import untouched
from dsc.models.zoo import load
from dsc.options import Options
from dsc.target import find


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DSC_CACHE", "1")
    monkeypatch.setenv("DSC_CACHE_DIR", str(tmp_path / "cache"))
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def again(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """The result of ``fn``, compiled as in a new process: Dynamo has forgotten all."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    return torch.compile(fn, backend="dsc", dynamic=dynamic, options=options)(*args)


def hits() -> int:
    return counters["aot_autograd"]["autograd_cache_hit"]


def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds of the graphs that get compiled from now on."""
    seen: list[str] = []
    plan = compiler.plan

    def spy(gm: Any, kind: str, *rest: Any, **more: Any) -> Any:
        seen.append(kind)
        return plan(gm, kind, *rest, **more)

    monkeypatch.setattr(compiler, "plan", spy)
    return seen


def mlp(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ x.T).sum(-1)


@pytest.mark.parametrize("name", ["gpt-tiny", "resnet-tiny", "moe-tiny"])
def test_a_train_step_is_taken_from_disk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = load(name).build(), load(name).inputs()

    def step() -> list[torch.Tensor]:
        with untouched(model):
            model.zero_grad()
            loss = again(model, *inputs)
            loss.backward()
            return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    first = step()
    assert not hits()
    seen = compiles(monkeypatch)
    second = step()
    assert hits() == 1
    assert not seen
    assert all(map(torch.equal, first, second))


def test_another_process_finds_it(tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(
        "import torch\n"
        "from torch._dynamo.utils import counters\n"
        "f = torch.compile(lambda x: torch.nn.functional.gelu(x @ x.T).sum(-1), backend='dsc')\n"
        "x = torch.arange(12.0).reshape(3, 4).div(9).requires_grad_()\n"
        "f(x).sum().backward()\n"
        "print(counters['aot_autograd']['autograd_cache_hit'], x.grad.tolist())\n"
    )
    out = [
        subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert out[0].startswith("0 ")
    assert out[1] == "1" + out[0][1:]


def test_dropout_draws_eagers_masks_from_disk() -> None:
    x = torch.ones(64, requires_grad=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, True) * 2

    torch.manual_seed(0)
    want = fn(x)
    for hit in (0, 1):
        assert torch.equal(again(fn, x), want)
        assert hits() == hit


def test_one_entry_serves_all_sizes() -> None:
    def grads(n: int) -> torch.Tensor:
        x = torch.linspace(0, 1, n * 4).reshape(n, 4).requires_grad_()
        torch.autograd.backward(again(mlp, x, dynamic=True).sum())
        assert x.grad is not None
        return x.grad

    first = grads(5)
    assert torch.equal(grads(5), first)
    assert hits() == 1
    x = torch.linspace(0, 1, 28).reshape(7, 4).requires_grad_()
    torch.autograd.backward(mlp(x).sum())
    torch.testing.assert_close(grads(7), x.grad)
    assert hits() == 1


def test_one_compilation_serves_all_sizes_after_the_first_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch and length change together; the second size is compiled for all that follow, forward and backward."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    seen = compiles(monkeypatch)
    step = torch.compile(layer, backend="dsc")
    for i, (batch, length) in enumerate([(2, 3), (4, 5), (3, 7), (6, 4), (5, 9)]):
        x = torch.linspace(-1, 1, batch * length * 8).reshape(batch, length, 8)
        layer.zero_grad()
        result = step(x)
        result.square().mean().backward()
        grads = [p.grad for p in layer.parameters()]
        layer.zero_grad()
        layer(x).square().mean().backward()
        for got, p in zip(grads, layer.parameters()):
            torch.testing.assert_close(got, p.grad, rtol=1e-4, atol=1e-6)
        assert len(seen) <= (2 if i == 0 else 4)


def test_a_learning_rate_that_changes_compiles_nothing_after_the_first_change(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = compiles(monkeypatch)
    step = torch.compile(lambda p, g, rate: p - rate * g / (1 + rate), backend="dsc")
    p, g = torch.ones(8), torch.linspace(0, 1, 8)
    counts = []
    for rate in (0.1, 0.05, 0.025, 0.0125, 1e-3):
        torch.testing.assert_close(step(p, g, rate), p - rate * g / (1 + rate))
        counts.append(len(seen))
    assert counts[1:] == [counts[1]] * 4
    for rate in (0.1, 0.2, 0.3):  # as a tensor it never does
        again_seen = len(seen)
        torch.testing.assert_close(step(p, g, torch.tensor(rate)), p - rate * g / (1 + rate))
        assert rate == 0.1 or len(seen) == again_seen


def test_results_that_are_views_of_others() -> None:
    """How a view is made again is kept by PyTorch in memory that does not survive pickling."""

    def views(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x.reshape(x.numel()), y * 2
        return (
            a,
            a.narrow(0, 0, 1),
            b,
            b.view(-1),
            b.t()[1:],
            b.unflatten(0, (1, 2)),
            y.view(-1),
            *y.chunk(2),
            b.unfold(1, 2, 1),
        )

    def grads(results: tuple[torch.Tensor, ...], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(sum(r.sin().sum() for r in results), (x, y))

    x = torch.randn(2, 1).expand(2, 16).detach().requires_grad_()
    y = torch.randn(2, 16, requires_grad=True)
    want = views(x, y)
    for k in range(3):
        got = again(views, x, y)
        assert hits() == (k > 0)
        for a, b in zip((*got, *grads(got, x, y)), (*want, *grads(views(x, y), x, y)), strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()


def test_a_number_that_was_compiled_in_is_no_part_of_the_key() -> None:
    """So that graph is not kept: ``sqrt`` of a float that changes fixes its value."""

    def scaled(x: torch.Tensor, a: float) -> torch.Tensor:
        return x * a + math.sqrt(a)

    torch.compiler.reset()
    fn = torch.compile(scaled, backend="dsc")
    for _ in range(2):
        for a in (0.5, 2.0, 3.0, 7.0):
            torch.testing.assert_close(fn(torch.ones(3), a), scaled(torch.ones(3), a))
        torch.compiler.reset()


def test_effects_are_compiled_anew() -> None:
    """What hands an operator with effects its tokens is not part of what is kept."""
    x = torch.eye(3) * 2
    for _ in range(2):
        torch.testing.assert_close(again(lambda v: torch.linalg.cholesky(v * 2) + 1, x), torch.eye(3) * 2 + 1)


def test_mutated_buffers_and_inputs() -> None:
    bn = nn.BatchNorm1d(4)
    x = torch.linspace(-1, 1, 32).reshape(8, 4)

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        return bn(x) * y

    states = []
    for hit in (0, 1):
        bn.reset_running_stats()
        y = torch.zeros(4)
        result = again(fn, x, y)
        assert hits() == hit
        states.append([result, y, bn.running_mean.clone(), bn.running_var.clone()])  # type: ignore[union-attr,operator]
    assert all(map(torch.equal, *states))


@pytest.mark.parametrize(
    "options", [{"numerics": "fast"}, {"emit": "aten"}, {"passes": "canonicalize"}, {"target": "h100"}], ids=str
)
def test_other_options_do_not_find_it(options: dict[str, Any]) -> None:
    x = torch.ones(3, 4)
    again(mlp, x)
    again(mlp, x, **options)
    assert not hits()
    again(mlp, x, **options)
    assert hits() == 1


def test_other_sources_do_not_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    again(mlp, torch.ones(3, 4))
    monkeypatch.setattr(warm, "sources", lambda: "of another version")
    again(mlp, torch.ones(3, 4))
    assert not hits()


def test_whoever_listens_hears_every_compilation() -> None:
    for _ in range(2):
        seen: list[object] = []
        again(mlp, torch.ones(3, 4), on_compile=seen.append)
        assert len(seen) == 1


def test_switched_off() -> None:
    for _ in range(2):
        again(mlp, torch.ones(3, 4), cache=False)
        assert not hits()


def test_what_was_left_to_aten_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a compiler that is installed later would never be used."""
    with monkeypatch.context() as patch:
        patch.setattr(compiler.kernels.build, "find_compiler", lambda preferred=None: None)
        with pytest.warns(UserWarning, match="No C\\+\\+ compiler"):
            again(mlp, torch.ones(3, 4))
    seen = compiles(monkeypatch)
    again(mlp, torch.ones(3, 4))
    assert not hits()
    assert seen == ["inference"]


def test_kernels_that_were_removed_are_built_again(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    want = again(mlp, torch.ones(3, 4), cache_dir=str(folder))
    for f in [*folder.glob("*.so"), *folder.glob("*.cpp")]:
        f.unlink()
    assert torch.equal(again(mlp, torch.ones(3, 4), cache_dir=str(folder)), want)
    assert hits() == 1
    assert list(folder.glob("*.so"))


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "writable"])
def test_a_damaged_entry_is_compiled_again(tmp_path: Path, damage: str) -> None:
    want = again(mlp, torch.ones(3, 4))
    (entry,) = (tmp_path / "cache").glob("*.graph")
    data = entry.read_bytes()
    match damage:
        case "cut":
            entry.write_bytes(data[:-1])
        case "bit":
            entry.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
        case "empty":
            entry.write_bytes(b"")
        case "writable":
            entry.chmod(0o666)  # anybody could have put code there
    assert torch.equal(again(mlp, torch.ones(3, 4)), want)
    assert not hits()
    again(mlp, torch.ones(3, 4))
    assert hits() == 1  # written anew


def test_the_front_door_is_the_one_that_users_take() -> None:
    assert warm.wanted(compiler.make(Options(), find("cpu")))


def test_every_process_has_the_same_tag() -> None:
    code = (
        "from dsc import compiler, target, warm; from dsc.options import Options;"
        "print(*(warm.tag(compiler.make(Options(target=n), target.find(n))) for n in ('h100', 'cpu')))"
    )
    seeds = (
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    )
    assert len(set(seeds)) == 1
