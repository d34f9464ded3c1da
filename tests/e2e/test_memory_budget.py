"""Train steps within a memory budget: eager's gradients at every budget, and a peak that is what was planned."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import kit_memory
import pytest
import torch
import torch.nn.functional as F
from kit_graphs import CPU
from torch import Tensor, nn

from dsc.passes.canonicalize import Canonicalize
from dsc.passes.memory_plan import Search
from dsc.passes.memory_problem import extract
from dsc.watch import Watcher


class Block(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.rate = nn.LayerNorm(width), rate
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), self.rate, self.training)
        return x + F.dropout(self.down(hidden), self.rate, self.training)


class Stack(nn.Module):
    """Residual blocks with dropout, whose forward gives a loss."""

    def __init__(self, layers: int = 6, width: int = 32, rate: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, rate) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return F.cross_entropy(self.head(x), target)

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)  # type: ignore[no-any-return]


def stack() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Stack(), (torch.randn(256, 32), torch.randint(8, (256,)))


@dataclass
class Found(Watcher):
    """What the memory pass said."""

    numbers: dict[str, float] = field(default_factory=dict)

    def after(self, stage: str, p: Any, gm: Any, report: Any, seconds: float) -> None:
        if p.name == "memory":
            self.numbers = dict(report.numbers)


def gradients(model: nn.Module, inputs: Sequence[Tensor], call: Callable[..., Tensor]) -> list[Tensor]:
    """The loss, all gradients, and a random number drawn afterwards."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = call(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), torch.rand(3)]


def compiled(model: nn.Module, **options: Any) -> tuple[Callable[..., Tensor], Found]:
    found = Found()
    torch._dynamo.reset()
    return torch.compile(model, backend="dsc", options={**options, "watchers": [found]}), found


def search(make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], fused: bool = False) -> Search:
    """The planner on the joint graph of a model."""
    step = kit_memory.train_step(*make())
    Canonicalize().run(step.joint, CPU)
    return Search(step.joint, extract(step.joint, CPU, fused), CPU, fused)


@functools.cache
def peaks() -> tuple[int, int]:
    """Of the stack on ATen: the default plan's peak, and the smallest that the planner finds."""
    planner = search(stack)
    return planner.default.peak, planner.least().peak


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3, 0.0])
def test_gradients_with_dropout_are_eagers_at_every_budget(share: float) -> None:
    most, least = peaks()
    budget = int(least + share * (most - least))
    model, inputs = stack()
    want = gradients(model, inputs, model)
    call, found = compiled(model, memory_budget=budget, emit="aten")
    got = gradients(model, inputs, call)
    assert found.numbers["planned peak"] <= budget
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
