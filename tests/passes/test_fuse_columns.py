"""Sums over all rows in kernels that reduce rows: the backward of norms with their parameters, in one pass."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsc.compilation import Compilation

COLUMNS = "canonicalize,fuse{columns=true}"


def gradients(f: Callable[..., Tensor], *inputs: Tensor, dynamic: bool = False) -> tuple[Compilation, list[Tensor]]:
    """The backward of ``f`` in the interpreter, and the gradients that it gave."""
    made: list[Compilation] = []
    torch.compiler.reset()
    given = [t.clone().requires_grad_() for t in inputs]
    options = {"emit": "triton", "passes": COLUMNS, "cache": False, "on_compile": made.append}
    if dynamic:
        torch._dynamo.mark_dynamic(given[0], 0)
    torch.compile(f, backend="dsc", options=options)(*given).backward(torch.ones(given[0].shape))
    return next(m for m in made if m.kind == "backward"), [t.grad for t in given if t.grad is not None]


def expected(f: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    given = [t.double().requires_grad_() for t in inputs]
    f(*given).backward(torch.ones(given[0].shape))
    return [t.grad for t in given if t.grad is not None]


def collects(made: Compilation) -> int:
    return sum(v.op == "collect" for k in made.program.kernels for v in k.lets)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b).tanh()


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w).tanh()


def normed_sum(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.rms_norm(x + bias, (x.shape[-1],), w).tanh()


@pytest.mark.parametrize("shape", [(1030, 24), (3, 400, 40), (1024, 1024)])
@pytest.mark.parametrize("f", [layer_norm, rms_norm, normed_sum])
def test_a_norm_and_its_parameters_take_one_pass(f: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    inputs = [torch.randn(shape), *(torch.rand(shape[-1]) + 0.5 for _ in range(f.__code__.co_argcount - 1))]
    made, got = gradients(f, *inputs)
    assert made.program.numbers["kernels"] == 1
    assert collects(made) == len(inputs) - 1
    for a, b in zip(got, expected(f, *inputs), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-4)


def test_any_number_of_rows() -> None:
    inputs = [torch.randn(1100, 24), torch.rand(24)]
    made, got = gradients(rms_norm, *inputs, dynamic=True)
    assert collects(made) == 1 and made.program.kernels[0].sizes
    for a, b in zip(got, expected(rms_norm, *inputs), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-4)


def read_again(x: Tensor) -> Tensor:
    """Every row needs the sums of all rows."""
    return x.softmax(-1) - x.softmax(-1).sum(0)


def across_and_down(x: Tensor) -> Tensor:
    """A square: sums of rows and of columns have one shape, and meet."""
    return x * (x.exp().sum(0) + x.exp().sum(1)).tanh()


@pytest.mark.parametrize("f", [read_again, across_and_down])
def test_what_needs_the_sums_for_rows_stays_apart(f: Callable[..., Tensor]) -> None:
    x = torch.randn(1024, 1024) / 8
    made: list[Compilation] = []
    torch.compiler.reset()
    options = {"emit": "triton", "passes": COLUMNS, "cache": False, "on_compile": made.append}
    got = torch.compile(f, backend="dsc", options=options)(x)
    torch.testing.assert_close(got, f(x), rtol=1e-5, atol=1e-5)
    assert made[0].program.numbers["aten_calls"] == 0


def test_few_or_long_rows_stay_apart() -> None:
    for shape in [(64, 32), (1024, 20000)]:
        x = torch.randn(shape)
        made: list[Compilation] = []
        torch.compiler.reset()
        options = {"emit": "aten", "passes": COLUMNS, "cache": False, "on_compile": made.append}
        torch.compile(lambda t: (t.sum(0), t.sum(1)), backend="dsc", options=options)(x)
        assert not collects(made[0])


def test_not_on_a_cpu_by_default() -> None:
    x = torch.randn(1024, 32)
    made: list[Compilation] = []
    torch.compiler.reset()
    torch.compile(lambda t: (t.sum(0), t.sum(1)), backend="dsc", options={"cache": False, "on_compile": made.append})(x)
    assert made[0].program.numbers["kernels"] == 2


def test_without_triton_the_nodes_stay_with_aten() -> None:
    x = torch.randn(1024, 32)
    made: list[Compilation] = []
    torch.compiler.reset()
    options = {"emit": "cpp", "passes": COLUMNS, "cache": False, "on_compile": made.append}
    got = torch.compile(lambda t: (t.sum(0), t.sum(1)), backend="dsc", options=options)(x)
    torch.testing.assert_close(got, (x.sum(0), x.sum(1)), rtol=1e-5, atol=1e-4)
    assert any("only Triton" in r.why for _, report in made[0].reports for r in report.remarks)
