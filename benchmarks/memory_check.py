"""Plans held against the allocator: ``python benchmarks/memory.py --check``.

Every tiny model of the zoo, its dropout on, at five budgets from the smallest that can be had to the peak without one; its
kernels in C++.  Every storage that a call gives back is counted from when it is made until it dies.

1. The measured peak is within 1 % of the planned one, and never above the budget.
2. Peaks do not fall where budgets grow.
3. Gradients are eager's from the same seed: the largest difference, as a share of the gradient's largest element, or of
   a thousandth of the largest one of all where a gradient is nothing but rounding (a bias of keys in attention).
4. With ``--compress FORMAT`` saved values may be kept in fewer bits: then that difference is what the format costs.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dsc import kernels, link, target
from dsc.compiler import split
from dsc.manager import PassPipeline
from dsc.models import zoo
from dsc.options import Options
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.passes.memory import Memory
from dsc.passes.memory_plan import Search
from dsc.passes.memory_problem import extract
from dsc.runtime import run
from dsc.runtime.pool import Pool

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import kit_memory  # the allocator that counts

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
RATE = 0.1
CPU = target.find("cpu")


@dataclass(frozen=True)
class Row:
    model: str
    share: float
    budget: int
    planned: int
    measured: int
    difference: float
    away: int
    compressed: int


def model_of(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A tiny model with dropout wherever it has any, and its inputs."""
    entry = zoo.load(name)
    model = entry.build()
    for m in model.modules():
        if isinstance(getattr(m, "dropout", None), float):
            m.dropout = RATE  # type: ignore[assignment]
    return model, entry.inputs()


def rows(name: str, offload: str | None, compress: str | None) -> list[Row]:
    step = kit_memory.train_step(*model_of(name))
    Canonicalize().run(step.joint, CPU)
    search = Search(step.joint, extract(step.joint, CPU), CPU)
    least, most = search.least().peak, search.default.peak
    return [checked(name, s, int(least + s * (most - least)), offload, compress) for s in SHARES]


def checked(name: str, share: float, budget: int, offload: str | None, compress: str | None) -> Row:
    said: dict[str, float] = {}

    def within(joint: GraphModule, inputs: Any, **rest: Any) -> tuple[GraphModule, GraphModule]:
        Canonicalize().run(joint, CPU)
        said.update(Memory(budget, offload=offload, compress=compress).run(joint, CPU).numbers)
        return split(joint, inputs, **rest)

    model, inputs = model_of(name)
    step = kit_memory.train_step(model, inputs, within)
    options = Options(memory_budget=budget)
    calls = []
    for gm, kind in ((step.forward, "forward"), (step.backward, "backward")):
        PassPipeline((Canonicalize(), Fuse())).run(gm, CPU)
        program, _, _ = link.link(gm, options, kind)
        calls.append(run.load(program, kernels.launches(program, options), Pool(), kind))
    measured, _, gradients = kit_memory.measured_peak(step, *calls)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model(*inputs).backward()
    eager = {p.data_ptr(): p.grad for p in model.parameters()}
    largest = max(float(g.abs().max()) for g in eager.values() if g is not None)
    worst = 0.0
    for t, g in zip(step.inputs, gradients):
        want = eager.get(t.data_ptr())
        if g is not None and want is not None:
            worst = max(worst, float((g - want).abs().max() / want.abs().max().clamp_min(1e-3 * largest)))
    away, short = int(said["bytes away"]), int(said["bytes compressed"])
    return Row(name, share, budget, int(said["planned peak"]), measured, worst, away, short)


def main(json: Any = None, offload: str | None = None, compress: str | None = None) -> None:
    warnings.simplefilter("ignore")
    found = [r for name in zoo.ZOO if name.endswith("-tiny") for r in rows(name, offload, compress)]
    table = [
        [
            r.model, f"{r.share:.2f}", str(r.budget), str(r.planned), str(r.measured),
            f"{r.measured / r.planned - 1:+.3%}", f"{r.difference:.1e}", str(r.compressed),
            verdict(r, found),
        ]
        for r in found
    ]  # fmt: skip
    print(common.table(["model", "share", "budget", "planned", "measured", "", "gradients", "compressed", ""], table))
    if json is not None:
        common.write_json(json, [asdict(r) for r in found])


def verdict(r: Row, found: list[Row]) -> str:
    smaller = [o for o in found if o.model == r.model and o.budget < r.budget and o.planned > r.planned]
    wrong = [
        "above the budget" if r.measured > r.budget else "",
        "off by more than 1 %" if abs(r.measured / r.planned - 1) > 0.01 else "",
        "a smaller budget had a larger peak" if smaller else "",
        "gradients differ" if r.difference > 1e-4 and not r.compressed else "",
    ]
    return ", ".join(w for w in wrong if w)
