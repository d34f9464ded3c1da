"""Writes into inputs: stored by the kernel that computes the value, where nothing else reads what was there."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsc.compilation import Compilation


def run(f: Callable[..., object], *inputs: Tensor, emit: str = "cpp") -> tuple[Compilation, list[Tensor]]:
    """The compilation of ``f``, and what it left in its inputs."""
    made: list[Compilation] = []
    torch.compiler.reset()
    given = [t.clone() for t in inputs]
    options = {"emit": emit, "cache": False, "on_compile": made.append}
    with torch.no_grad():
        torch.compile(f, backend="dsc", options=options)(*given)
    return made[0], given


def adamw(w: Tensor, g: Tensor, m: Tensor, s: Tensor) -> None:
    w.mul_(1 - 1e-5)
    m.lerp_(g, 0.1)
    s.mul_(0.999).addcmul_(g, g, value=0.001)
    w.addcdiv_(m, s.sqrt().div_(0.5).add_(1e-8), value=-1e-3)


@pytest.mark.parametrize("emit", ["cpp", "triton"])
def test_an_optimizer_step_is_one_kernel_in_place(emit: str) -> None:
    tensors = [torch.rand(33, 65) for _ in range(4)]
    made, given = run(adamw, *tensors, emit=emit)
    assert made.program.numbers["kernels"] == 1 and made.program.numbers["aten_calls"] == 0
    assert made.program.numbers["bytes"] == 7 * 33 * 65 * 4
    with torch.no_grad():
        adamw(*tensors)
    for got, want in zip(given, tensors):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def transposed(x: Tensor) -> None:
    x.copy_(x.t() + 1)


def summed(x: Tensor) -> None:
    x.sub_(x.sum(1, keepdim=True))


def old_value_wanted(x: Tensor, y: Tensor) -> Tensor:
    out = x @ y
    x.mul_(2)
    return out + x


def two_readers(x: Tensor, y: Tensor) -> Tensor:
    before = (x * 3).t().contiguous()
    x.add_(y)
    return before + x


def strided(x: Tensor) -> None:
    x[:, :24].add_(x[:, 24:])


@pytest.mark.parametrize("f", [transposed, summed, old_value_wanted, two_readers, strided])
def test_what_reads_the_old_value_sees_it(f: Callable[..., object]) -> None:
    tensors = [torch.randn(48, 48) for _ in range(f.__code__.co_argcount)]
    made: list[Compilation] = []
    torch.compiler.reset()
    given = [t.clone() for t in tensors]
    with torch.no_grad():
        got = torch.compile(f, backend="dsc", options={"cache": False, "on_compile": made.append})(*given)
        want = f(*tensors)
    for a, b in zip(given, tensors):
        torch.testing.assert_close(a, b)
    if want is not None:
        torch.testing.assert_close(got, want)


def test_a_transposed_read_keeps_the_write_apart() -> None:
    made, _ = run(transposed, torch.randn(8, 8))
    assert "copy_" in made.program.source
