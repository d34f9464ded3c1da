"""Budgets on a real GPU: ``python benchmarks/memory.py --gpu`` (about a minute).

1. The planned peak beside the allocator's, ``torch.cuda.max_memory_allocated``.  What the allocator holds before the step
   besides parameters and inputs (libraries' workspaces) is taken off, and printed.
2. Gradients with dropout on beside eager's, from the same seed: the largest relative error of a gradient's norm of
   differences.  Random numbers drawn after the step must be the same.
3. A step's time, the median of five; with offload also the bytes that were moved, and the share of their time on the
   link that the step did not wait for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import common
import torch
from torch import Tensor, nn

from dsc import target, tiers
from dsc.models import gpt, llama
from dsc.watch import Watcher

SHARES = (0.8, 0.6, 0.45)
"""Budgets, as shares of the peak without one."""
DROPOUT = 0.1


@dataclass(frozen=True)
class Row:
    model: str
    what: str
    budget: int
    planned: int
    measured: int
    besides: int
    """Bytes that the allocator held for others."""
    error: float
    stream: bool
    """Whether the numbers drawn afterwards are eager's."""
    milliseconds: float
    away: int


class Said(Watcher):
    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def after(self, stage: str, p: Any, gm: Any, report: Any, seconds: float) -> None:
        if p.name == "memory":
            self.numbers = dict(report.numbers)


class Loss(nn.Module):
    """A language model whose logits go through dropout, so that every model here draws."""

    def __init__(self, inner: nn.Module, rate: float) -> None:
        super().__init__()
        self.inner, self.rate = inner, rate

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.inner(tokens, labels)
        return nn.functional.dropout(loss.expand(8), self.rate).mean()


def models() -> dict[str, Callable[[], nn.Module]]:
    return {
        "gpt": lambda: gpt.GPT(gpt.Config(8192, 512, 6, 8, 512, dropout=DROPOUT, tied=False)),
        "llama": lambda: Loss(llama.Llama(llama.Config(8192, 512, 6, 8, 4, 512, 1408)), DROPOUT),
    }


def step(call: Callable[..., Tensor], model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    call(*inputs).backward()


def gradients(call: Callable[..., Tensor], model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
    step(call, model, inputs)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], torch.rand(4, device="cuda")


def measure(call: Callable[..., Tensor], model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[int, int, float]:
    """Peak of a step and what others held, in bytes; milliseconds."""
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *inputs))
    times = []
    for _ in range(2):
        step(call, model, inputs)
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        besides = torch.cuda.memory_allocated() - own
        start = time.perf_counter()
        step(call, model, inputs)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - besides
    model.zero_grad(set_to_none=True)
    return peak, besides, statistics.median(times) * 1e3


def rows(name: str) -> list[Row]:
    torch.manual_seed(0)
    model = models()[name]().cuda()
    inputs = tuple(torch.randint(8192, (16, 512), device="cuda") for _ in range(2))
    want, drawn = gradients(model, model, inputs)
    found: list[Row] = []

    def add(what: str, budget: int, **options: Any) -> Row:
        torch._dynamo.reset()
        said = Said()
        call = torch.compile(model, backend="dsc", options={"memory_budget": budget, "watchers": [said], **options})
        got, after = gradients(call, model, inputs)
        error = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(got, want, strict=True))
        del got
        peak, besides, milliseconds = measure(call, model, inputs)
        n = said.numbers
        row = Row(
            name, what, budget, int(n["planned peak"]), peak, besides, error, torch.equal(after, drawn), milliseconds,
            int(n["bytes away"]),
        )  # fmt: skip
        found.append(row)
        return row

    whole = add("no limit", 1 << 40).planned
    for share in SHARES:
        add(f"{share:.0%}", int(whole * share))
    add(f"{SHARES[1]:.0%}, cpu", int(whole * SHARES[1]), offload="cpu")
    return found


def main(json: Any = None) -> None:
    machine = target.for_device(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    found = [row for name in models() for row in rows(name)]
    lines = []
    for r in found:
        base = next(b for b in found if b.model == r.model)
        link = r.away / tiers.parse("cpu").bandwidth(machine) * 2e3
        hidden = (
            f"{r.away / 2**20:.0f} MiB, {1 - max(r.milliseconds - base.milliseconds, 0) / link:.0%}" if link else ""
        )
        lines.append([
            r.model, r.what, f"{r.planned / 2**20:.1f}", f"{r.measured / 2**20:.1f}",
            f"{r.measured / r.planned - 1:+.2%}", f"{r.besides / 2**20:.1f}", f"{r.error:.1e}", str(r.stream),
            f"{r.milliseconds:.2f}", hidden,
        ])  # fmt: skip
    head = ["model", "budget", "planned MiB", "measured", "", "besides", "gradients", "stream", "ms", "moved, unseen"]
    print(common.table(head, lines))
    if json is not None:
        common.write_json(json, [asdict(r) for r in found])
