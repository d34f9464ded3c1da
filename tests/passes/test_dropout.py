"""Dropout that kernels draw: the same mask wherever it is drawn, in a product's epilogue too, and eager's without the option."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsc import errors, ops, target
from dsc.notes import notes
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.dropout import Dropout
from dsc.passes.fuse import Fuse
from kit_graphs import story, trace

A100, H100 = target.find("a100"), target.find("h100")
Golden = Callable[..., None]
aten = torch.ops.aten


def bf16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def block(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r + aten.native_dropout(torch.addmm(b, x, w.t()), 0.1, True)[0]


INPUTS = bf16(4096, 256), bf16(1024, 256), bf16(1024), bf16(4096, 1024)


def test_a_product_takes_it(golden: Golden) -> None:
    golden(story(trace(block, *INPUTS), Dropout(), Fuse(), where=A100))


def test_what_canonicalize_made_of_it_on_a_cpu_is_taken_too() -> None:
    gm = trace(block, *INPUTS)
    assert Canonicalize().run(gm, A100).changed
    assert Dropout().run(gm, A100).changed
    names = [ops.name_of(n) for n in gm.graph.nodes if n.op == "call_function"]
    assert "dsc.keep.default" in names and not {"bernoulli.p", "empty_like.default"} & set(names)


def test_masks_that_are_stored_leave_the_rest_to_the_product() -> None:
    """A mask that others read is a kernel of its own, or of the pointwise group: a product stores what it makes."""

    def f(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        y, mask = aten.native_dropout(torch.addmm(b, x, w.t()), 0.1, True)
        return r + y, mask

    gm = trace(f, *INPUTS)
    Dropout().run(gm, A100)
    Fuse().run(gm, A100)
    (product,) = (n for n in gm.graph.nodes if ops.name_of(n) == "addmm.default")
    (mask,) = (n for n in gm.graph.nodes if ops.name_of(n) == "dsc.keep.default")
    assert notes(product).group is None or notes(product).group != notes(mask).group


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda x: aten.native_dropout(x, 1.0, True)[0], "drops nothing, or all"),
        (lambda x: aten.native_dropout(x, 0.5, False)[0], "drops nothing, or all"),
        (lambda x: aten.native_dropout(x.t(), 0.5, True)[0], "not contiguous"),
        (lambda x: aten.bernoulli.p(x, 0.5), "no dropout"),
    ],
)
def test_it_must_not_fire(f: Callable[..., object], why: str) -> None:
    report = Dropout().run(trace(f, torch.empty(4, 6)), A100)
    assert not report.changed and [r.verdict for r in report.remarks] == ["skipped"] and why in report.remarks[0].why


def test_eager_keeps_its_numbers_and_says_why() -> None:
    gm = trace(block, *INPUTS)
    report = Fuse().run(gm, A100)
    (remark,) = (r for r in report.remarks if "native_dropout" in r.why)
    assert remark.node == "addmm" and "threads" in remark.why and '"dropout": "kernel"' in remark.why
    gm = trace(lambda x, w: torch.relu(x @ w), bf16(512, 512), bf16(512, 512))
    assert not any("dropout" in r.why for r in Fuse().run(gm, A100).remarks)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.b(F.dropout(F.gelu(self.a(x)), 0.3)), 0.2)


def step(model: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("emit", ["cpp", "aten"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_train_step(emit: str, dynamic: bool) -> None:
    """Its masks follow the seed; forward and backward agree on them; a share of the elements is dropped."""
    torch.manual_seed(0)
    plain = Model()
    options = {"dropout": "kernel", "emit": emit, "cache": False}
    compiled = torch.compile(plain, backend="dsc", options=options, dynamic=dynamic)
    x = torch.randn(96, 64)
    y, grad = step(compiled, x, 1)
    again, grad_again = step(compiled, x, 1)
    assert torch.equal(y, again) and torch.equal(grad, grad_again)
    other, _ = step(compiled, x, 2)
    dropped = y == x
    assert 0.17 < dropped.float().mean() < 0.23 and not torch.equal(dropped, other == x)
    direction = torch.randn(96, 64)
    h = 1e-3
    ends = [step(compiled, x + s * h * direction, 1)[0].double().square().sum() for s in (1, -1)]
    slope = (ends[0] - ends[1]) / (2 * h)
    torch.testing.assert_close((grad.double() * direction.double()).sum(), slope, rtol=2e-3, atol=1e-2)


def test_all_ways_draw_the_same_masks() -> None:
    """C++, Triton's interpreter, and plain PyTorch."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(96, 64)
    found = []
    for emit in ("cpp", "triton", "aten"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="dsc", options={"dropout": "kernel", "emit": emit, "cache": False})
        found.append(step(compiled, x, 3))
    for y, grad in found[1:]:
        assert torch.equal(y == x, found[0][0] == x)
        torch.testing.assert_close(y, found[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, found[0][1], rtol=1e-4, atol=1e-4)


def test_under_a_budget_and_without_gradients() -> None:
    """A saved mask is none: the seed is; and a model that is called without gradients drops too."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(96, 64)
    options = {"dropout": "kernel", "cache": False}
    want = step(torch.compile(model, backend="dsc", options=options), x, 3)
    torch._dynamo.reset()
    found = step(torch.compile(model, backend="dsc", options={**options, "memory_budget": "1MiB"}), x, 3)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.manual_seed(3)
        y = torch.compile(model, backend="dsc", options=options)(x)
    torch.testing.assert_close(y, want[0], rtol=1e-5, atol=1e-5)


def test_nothing_changes_without_the_option() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(96, 64)
    compiled = torch.compile(model, backend="dsc", options={"cache": False})
    y, grad = step(compiled, x, 5)
    want, exact = step(model, x, 5)
    assert torch.equal(y == x, want == x)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, exact, rtol=1e-4, atol=1e-4)


def test_the_numbers_are_philox() -> None:
    """Random123, kat_vectors: philox4x32 10 of zeros."""
    first = (0x6627E8D5 >> 8) * 2.0**-24
    keep = torch.ops.dsc.keep
    assert keep(torch.tensor(0), [1], first + 2.0**-20).item() and not keep(torch.tensor(0), [1], first).item()
    many = keep(torch.tensor(2**62 - 7), [1 << 18], 0.25)
    assert abs(many.float().mean().item() - 0.25) < 0.004
    assert torch.equal(many.view(2, -1), keep(torch.tensor(2**62 - 7), [2, 1 << 17], 0.25))


def test_what_the_option_may_be() -> None:
    from dsc import options

    with pytest.raises(errors.BadOption, match=r"dropout.*'kernel'"):
        options.parse({"dropout": "gpu"}, None, {})
