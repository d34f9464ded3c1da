"""Every tiny model of the zoo trains a step as eager does: static and symbolic sizes, dropout, bfloat16."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dsc.errors import DscWarning
from dsc.models.zoo import ZOO, Entry

TINY = [e for e in ZOO.values() if e.name.endswith("-tiny")]
names = pytest.mark.parametrize("entry", TINY, ids=[e.name for e in TINY])


@pytest.fixture(autouse=True)
def _own_graphs() -> Iterator[None]:
    """A fall back to eager or to ATen is a failure here."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DscWarning)
        yield


def step(
    model: nn.Module, call: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, dict[str, Tensor | None], Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = call(*inputs)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, torch.get_rng_state()


def check(model: nn.Module, inputs: tuple[Tensor, ...], compiled: nn.Module, twin: nn.Module, rtol: float) -> None:
    """``model`` runs in eager, ``compiled`` is made of its ``twin``; a gradient's error counts against its largest."""
    loss, gradients, state = step(model, model, inputs)
    twin_loss, twin_gradients, twin_state = step(twin, compiled, inputs)
    torch.testing.assert_close(twin_loss, loss, rtol=rtol, atol=rtol)
    assert torch.equal(state, twin_state)
    for name, expected in gradients.items():
        got = twin_gradients[name]
        assert (got is None) == (expected is None), name
        if expected is not None:
            scale = float(expected.abs().max())
            torch.testing.assert_close(
                got, expected, rtol=rtol, atol=rtol * scale + 1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )
    for (name, before), after in zip(model.named_buffers(), twin.buffers()):
        torch.testing.assert_close(after, before, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def set_dropout(model: nn.Module, p: float) -> nn.Module:
    """Every rate of dropout in the model, whether a module or a number that the forward passes on."""
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = p
        for name, value in vars(m).items():
            if "dropout" in name and isinstance(value, float):
                setattr(m, name, p)
    return model


@names
def test_symbolic_sizes(entry: Entry) -> None:
    model = entry.build()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="dsc", dynamic=True)
    for batch in (2, 5, 1, 13):
        check(model, entry.inputs(batch, seed=batch), compiled, twin, 1e-4)


@names
def test_static_sizes_with_and_without_dropout(entry: Entry) -> None:
    model = set_dropout(entry.build(), 0.3)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="dsc")
    inputs = entry.inputs()
    check(model, inputs, compiled, twin, 1e-4)
    check(model.eval(), inputs, compiled.eval(), twin, 1e-4)


@names
def test_autocast(entry: Entry) -> None:
    model = entry.build()
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        check(model, entry.inputs(), torch.compile(twin, backend="dsc"), twin, 2e-2)
