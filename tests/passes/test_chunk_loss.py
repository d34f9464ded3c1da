"""Linear layers and their cross entropy in chunks: the same answers, and never all logits at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsc import liveness
from dsc.compilation import Compilation
from dsc.debug.capture import capture
from dsc.debug.source import Model

SMALL = "chunk-loss{least=1000,chunk=8000},default"
ROWS, WIDTH, VOCAB = 54, 24, 130


class Head(nn.Module):
    """A loss of a linear layer, in the ways in which models write it."""

    def __init__(self, loss: Callable[..., Tensor], bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) / 5)
        self.bias = nn.Parameter(torch.randn(VOCAB)) if bias else None
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return self.loss(F.linear(x.tanh(), self.weight, self.bias), target)


def mean(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y, t)


def summed(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(widened(y), t, reduction="sum") / 7


def language(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(widened(y).view(-1, y.shape[-1]), t.view(-1), ignore_index=5)


def widened(y: Tensor) -> Tensor:
    return y if y.dtype == torch.float64 else y.float()


def step(model: nn.Module, call: Callable[..., Any], x: Tensor, target: Tensor) -> list[Tensor]:
    """Loss and gradients."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    loss = call(x, target)
    (loss * 3).backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def compiled(model: nn.Module, made: list[Compilation], passes: str = SMALL) -> Any:
    torch.compiler.reset()
    options = {"passes": passes, "cache": False, "on_compile": made.append}
    return torch.compile(model, backend="dsc", options=options)


def data(*shape: int) -> tuple[Tensor, Tensor]:
    target = torch.randint(0, VOCAB, shape)
    target.view(-1)[:3] = -100
    return torch.randn(*shape, WIDTH), target


def whole(made: list[Compilation], rows: int) -> list[str]:
    """Values that are as large as all logits."""
    return [
        n.name
        for m in made
        for n in m.gm.graph.nodes
        if isinstance(v := n.meta.get("val"), Tensor) and v.numel() >= rows * VOCAB
    ]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("loss", "shape"), [(mean, (ROWS,)), (summed, (ROWS,)), (language, (6, 9))])
def test_the_same_loss_and_gradients(loss: Callable[..., Tensor], shape: tuple[int, ...], bias: bool) -> None:
    model, (x, target) = Head(loss, bias), data(*shape)
    if loss is language:
        target[target == -100] = 5
    made: list[Compilation] = []
    got = step(model, compiled(model, made), x, target)
    assert whole(made, ROWS) == []
    want = step(model.double(), model, x.double(), target)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


class Projection(nn.Module):
    """The weight the other way around."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, VOCAB) / 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x.tanh() @ self.weight, target)


def test_a_weight_that_is_not_transposed() -> None:
    model, (x, target) = Projection(), data(ROWS)
    made: list[Compilation] = []
    got = step(model, compiled(model, made), x, target)
    assert whole(made, ROWS) == []
    for a, b in zip(got, step(model.double(), model, x.double(), target), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


def test_any_number_of_rows() -> None:
    model = Head(mean, bias=True)
    made: list[Compilation] = []
    call = compiled(model, made)
    for rows in (ROWS, 61, 200):
        x, target = data(rows)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(target, 0)
        leaf = x.requires_grad_()
        model.zero_grad()
        loss = call(leaf, target)
        loss.backward()
        grads = [model.weight.grad, model.bias.grad, leaf.grad]
        eager = model(leaf, target)
        want = torch.autograd.grad(eager, [model.weight, model.bias, leaf])  # type: ignore[list-item]
        torch.testing.assert_close(loss, eager, rtol=1e-5, atol=1e-5)
        for a, b in zip(grads, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(made) == 2 and made[0].program.symbols


def read_twice(y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(y, t), y.argmax(-1)


def smoothed(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y, t, label_smoothing=0.1)


def weighted(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y, t, weight=torch.ones(VOCAB))


def scaled(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y * 0.5, t)


@pytest.mark.parametrize("loss", [read_twice, smoothed, weighted, scaled])
def test_logits_that_stay_whole(loss: Callable[..., Any]) -> None:
    model, (x, target) = Head(loss), data(ROWS)
    made: list[Compilation] = []
    torch.compiler.reset()
    out = compiled(model, made)(x, target)
    torch.testing.assert_close(out, model(x, target), rtol=1e-5, atol=1e-5)
    assert whole(made, ROWS) != []


def test_small_logits_and_16_bits_on_a_cpu_stay_whole() -> None:
    x, target = data(ROWS)
    for passes, dtype, why in (("default", torch.float32, "less than"), (SMALL, torch.bfloat16, "16 bits")):
        model = Head(mean).to(dtype)
        session = capture(Model("head", model, (x.to(dtype), target)), "cpu", options(passes))
        remarks = [r for s in session.regions[0].stages if s.report for r in s.report.remarks]
        assert any("logits stay whole" in r.why and why in r.why for r in remarks)


def test_a_gpu_adds_up_in_fp32() -> None:
    x, target = data(2048)
    session = capture(Model("head", Head(mean).bfloat16(), (x.bfloat16(), target)), "h100", options(SMALL))
    forward, backward = session.regions[0].programs
    products = [n for n in forward.gm.graph.nodes if "mm.dtype" in str(n.target)]
    assert len(products) == 4 and all(n.meta["val"].dtype == torch.float32 for n in products)
    assert [v.dtype for v in gradients(backward)] == [torch.bfloat16]


def gradients(made: Compilation) -> list[Tensor]:
    return [n.meta["val"] for n in made.gm.graph.output_node().all_input_nodes]


def options(passes: str) -> Any:
    from dsc.options import Options

    return Options(passes=passes)


def test_one_kernel_for_all_chunks_and_an_eighth_of_the_memory() -> None:
    peaks = []
    for passes in ("canonicalize,recompute,fuse", SMALL.replace("8000", "1000000")):
        model, target = nn.Linear(8, 4001, bias=False), torch.randint(0, 4001, (4096,))
        both = nn.Sequential(model)
        both.forward = lambda x, t, model=model: F.cross_entropy(model(x), t)  # type: ignore[method-assign,misc]
        session = capture(Model("head", both, (torch.randn(4096, 8), target)), "cpu", options(passes))
        made = session.regions[0].programs
        peaks.append(max(liveness.profile(m.gm, pooled=True).peak for m in made))
    assert made[0].program.numbers["kernels"] >= 16 and made[0].program.numbers["distinct_kernels"] <= 3
    assert peaks[1] < peaks[0] / 8
    assert made[0].program.source.count("aten.addmm_.default(") == made[0].program.source.count("mm.out(") - 1
