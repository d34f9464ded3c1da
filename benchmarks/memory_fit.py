"""How many parameters one card trains, modelled: ``python benchmarks/memory.py --fit``.

LLaMA's layers in bf16, eight sequences of 4096 tokens, Adam with fp32 moments and fp32 master weights: 2 bytes of weight, 2 of
gradient and 12 of optimizer state a parameter.  Peaks of two depths give what a layer adds and what is there anyway; the
deepest model that fits is taken from those.  Each row says what moves where:

1. Everything on the card, as torch's default keeps it, without and with dsc's smallest peak.
2. The same with saved values moved to the host by dsc.
3. With the optimizer's state on the host as well.  dsc does not move that: an optimizer with offload has to, and then it
   takes no bytes here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import common
import torch

from dsc import tiers
from dsc.debug import shapes
from dsc.models import llama
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.memory_plan import Search
from dsc.passes.memory_problem import extract
from dsc.target import Target

BATCH, LENGTH = 8, 4096
DEPTHS = (3, 6)
WIDTHS = ((4096, 32, 14336), (8192, 64, 28672))
"""Width, heads, hidden width of LLaMA-3's 8B and 70B layers."""
STATE = 12
"""Bytes of optimizer state a parameter."""


@dataclass(frozen=True)
class Fit:
    width: int
    what: str
    layers: int
    parameters: float
    tier: str
    extra: float
    """Modelled time beyond torch's default, as a share."""


def peaks(width: int, heads: int, hidden: int, layers: int, machine: Target) -> tuple[int, list[tuple[int, float]]]:
    """Parameters; peak and seconds by default, at dsc's least, and at its least with values moved to the host."""
    config = llama.Config(32000, LENGTH, layers, heads, 8, width, hidden)
    draw = lambda: (torch.zeros(BATCH, LENGTH, dtype=torch.long), torch.zeros(BATCH, LENGTH, dtype=torch.long))  # noqa: E731
    joint = shapes.joint(lambda: llama.Llama(config), draw, torch.bfloat16, cuda=machine.kind == "cuda")
    Canonicalize().run(joint.gm, machine)
    inputs = joint.gm.graph.find_nodes(op="placeholder")[: joint.parameters]
    count = sum(n.meta["val"].numel() for n in inputs if n.meta["val"].is_floating_point())
    search = Search(joint.gm, extract(joint.gm, machine), machine)
    found = [search.default, search.least()]
    search.tier = tiers.parse("cpu")
    found.append(search.least())
    return count, [(p.peak, p.seconds) for p in found]


def fits(width: int, heads: int, hidden: int, machine: Target) -> list[Fit]:
    few, many = (peaks(width, heads, hidden, n, machine) for n in DEPTHS)
    span = DEPTHS[1] - DEPTHS[0]
    rows = []
    for what, which, state, tier in (
        ("all on the card, torch's default", 0, STATE, "GPU"),
        ("activations recomputed", 1, STATE, "GPU"),
        ("activations recomputed and moved", 2, STATE, "GPU; activations on the host"),
        ("optimizer state on the host, torch's default", 0, 0, "GPU; optimizer on the host, not by dsc"),
        ("and activations recomputed", 1, 0, "GPU; optimizer on the host, not by dsc"),
        ("and activations moved", 2, 0, "GPU; activations on the host by dsc, optimizer not by dsc"),
    ):
        each = (many[1][which][0] - few[1][which][0]) / span
        weights = (many[0] - few[0]) / span
        rest, other = few[1][which][0] - DEPTHS[0] * each, few[0] - DEPTHS[0] * weights
        layers = int((machine.memory * 0.94 - rest - state * other) / (each + state * weights))
        extra = many[1][which][1] / many[1][0][1] - 1
        rows.append(Fit(width, what, layers, other + layers * weights, tier, extra))
    return rows


def main(machine: Target, json: Any = None) -> None:
    found = [f for w in WIDTHS for f in fits(*w, machine)]
    print(f"{machine.name}, {machine.memory / 2**30:.0f} GiB less 6 %, {BATCH} sequences of {LENGTH} tokens")
    rows = [
        [str(f.width), f.what, str(f.layers), f"{f.parameters / 1e9:.1f} B", f"{f.extra:+.0%}", f.tier] for f in found
    ]
    print(common.table(["width", "", "layers", "parameters", "time", "where"], rows))
    if json is not None:
        common.write_json(json, [asdict(f) for f in found])
