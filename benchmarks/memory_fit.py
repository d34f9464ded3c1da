"""How many parameters one card trains, modelled: ``python benchmarks/memory.py --fit``.

LLaMA's layers in bf16, eight sequences of 4096 tokens, Adam with fp32 moments and fp32 master weights: 2 bytes of weight, 2 of
gradient and 12 of optimizer state a parameter.  Peaks of two depths give what a layer adds and what is there anyway; the
deepest model that fits is taken from those.  Each row says what lies where, and who moves it:

1. dsc runs what it plans for activations: recomputed, moved to the host.  The rest is a model of what a trainer around it
   would do; dsc has no code for it, and the rows say so.
2. Optimizer state on the host or on a drive: a chunk at a time comes to the card, is updated, and goes back, 12 bytes a
   parameter each way.  After the backward nothing hides that.  Where a layer's update runs as soon as its gradient is
   there, gradients do not pile up, and the copies hide behind the rest of the backward.
3. Weights from the host too: two layers are on the card at a time, and come twice a step, for forward and backward.
4. The link carries both ways at once, a drive shares its rate between reading and writing.  ``HOST`` and ``DRIVE`` bound
   what fits there.  Time is beyond the same depth on the card with torch's default, if that had the memory.
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
from dsc.passes.memory_program import Program
from dsc.target import Target
from dsc.tiers import Tier

BATCH, LENGTH = 8, 4096
DEPTHS = (3, 6)
WIDTHS = ((4096, 32, 14336), (8192, 64, 28672))
"""Width, heads, hidden width of LLaMA-3's 8B and 70B layers."""
WEIGHT, GRADIENT, STATE = 2, 2, 12
"""Bytes a parameter."""
CHUNKS = 512 << 20
"""Bytes on the card for chunks of the state on their way."""
HOST, DRIVE = 256e9, 3.84e12
"""Bytes for each of the eight cards of a DGX A100 with 2 TB of memory, and of one of its drives."""
RESERVE = 0.06


@dataclass(frozen=True)
class Setup:
    what: str
    plan: int
    """0: torch's default, 1: dsc's least peak, 2: its least with values moved to the host."""
    state: Tier | None = None
    """Where the optimizer's state lies; None: on the card."""
    early: bool = False
    """Whether each layer is updated as soon as its gradient is there."""
    weights: bool = False
    """Whether weights come from the host."""


CPU, NVME = tiers.parse("cpu"), tiers.parse("nvme:drive")
SETUPS = (
    Setup("all on the card, torch's default", 0),
    Setup("activations recomputed", 1),
    Setup("activations recomputed and moved", 2),
    Setup("and state on the host, updated after the backward", 2, CPU),
    Setup("and updated layer by layer", 2, CPU, early=True),
    Setup("and weights from the host", 2, CPU, early=True, weights=True),
    Setup("the same with the state on a drive", 2, NVME, early=True, weights=True),
)


@dataclass(frozen=True)
class Point:
    """One plan at one depth."""

    peak: int
    seconds: float
    saved: int
    """Bytes of activations that stay on the card between forward and backward."""
    away: int


@dataclass(frozen=True)
class Fit:
    width: int
    what: str
    layers: int
    parameters: float
    card: float
    host: float
    drive: float
    """Bytes."""
    extra: float
    """Modelled time beyond torch's default, as a share."""
    by: str
    """What of it dsc runs."""


def point(p: Program) -> Point:
    kept = sum(v.nbytes for v in p.profile.values if v.kind == "saved")
    gone = {a.name for a in p.away}
    away = sum(v.nbytes for v in p.profile.values if v.name in gone)
    return Point(p.peak, p.seconds, kept, away)


def points(width: int, heads: int, hidden: int, layers: int, machine: Target) -> tuple[int, list[Point]]:
    """Parameters; by default, at dsc's least peak, and at its least with values moved to the host."""
    config = llama.Config(32000, LENGTH, layers, heads, 8, width, hidden)
    draw = lambda: (torch.zeros(BATCH, LENGTH, dtype=torch.long), torch.zeros(BATCH, LENGTH, dtype=torch.long))  # noqa: E731
    joint = shapes.joint(lambda: llama.Llama(config), draw, torch.bfloat16, cuda=machine.kind == "cuda")
    Canonicalize().run(joint.gm, machine)
    inputs = joint.gm.graph.find_nodes(op="placeholder")[: joint.parameters]
    count = sum(n.meta["val"].numel() for n in inputs if n.meta["val"].is_floating_point())
    search = Search(joint.gm, extract(joint.gm, machine), machine)
    found = [search.default, search.least()]
    search.tier = CPU
    found.append(search.least())
    return count, [point(p) for p in found]


def fits(width: int, heads: int, hidden: int, machine: Target) -> list[Fit]:
    few, many = (points(width, heads, hidden, n, machine) for n in DEPTHS)
    return [fit(width, s, few, many, machine) for s in SETUPS]


def fit(width: int, s: Setup, few: tuple[int, list[Point]], many: tuple[int, list[Point]], machine: Target) -> Fit:
    """The deepest model that fits where the setup puts things, and its time."""
    span = DEPTHS[1] - DEPTHS[0]
    low, high = few[1][s.plan], many[1][s.plan]
    each, layer = (high.peak - low.peak) / span, (many[0] - few[0]) / span
    other = few[0] - DEPTHS[0] * layer
    rest = low.peak - DEPTHS[0] * each
    if s.early:  # no gradients pile up
        each = min(each, layer * WEIGHT + (high.saved - low.saved) / span)
        rest += layer * GRADIENT
    if s.weights:
        each -= layer * WEIGHT
        rest += 2 * layer * WEIGHT
    state = STATE if s.state is None else 0
    rest += CHUNKS if s.state is not None else 0
    count = (machine.memory * (1 - RESERVE) - rest - state * other) / (each + state * layer) if each > 0 else 10_000.0
    on_host, on_drive = host_bytes(s, layer, (high.away - low.away) / span), STATE * layer if s.state == NVME else 0.0
    for room, each_there in ((HOST, on_host), (DRIVE, on_drive)):
        count = min(count, room / each_there - 1) if each_there else count
    layers = max(int(count), 0)
    parameters = other + layers * layer
    return Fit(
        width,
        s.what,
        layers,
        parameters,
        rest + layers * each + state * parameters,
        on_host * layers,
        on_drive * layers,
        seconds(s, few[1], many[1], layers, parameters, machine) / depth_seconds(few[1], many[1], 0, layers) - 1,
        "all" if s.state is None else "activations; the rest is a model",
    )


def host_bytes(s: Setup, layer: float, away: float) -> float:
    """What a layer has in the host's memory."""
    return away + (STATE * layer if s.state == CPU else 0) + (WEIGHT * layer if s.weights else 0)


def depth_seconds(few: list[Point], many: list[Point], plan: int, layers: int) -> float:
    each = (many[plan].seconds - few[plan].seconds) / (DEPTHS[1] - DEPTHS[0])
    return few[plan].seconds + (layers - DEPTHS[0]) * each


def seconds(s: Setup, few: list[Point], many: list[Point], layers: int, parameters: float, machine: Target) -> float:
    """A step's forward and backward, and what copies of state and weights add."""
    compute = depth_seconds(few, many, s.plan, layers)
    if s.state is None:
        return compute
    link = CPU.bandwidth(machine)
    state = STATE * parameters / link if s.state == CPU else 2 * STATE * parameters / NVME.bandwidth(machine)
    if not s.early:
        return compute + state
    weights = WEIGHT * parameters / link if s.weights else 0.0
    forward, backward = compute / 3, compute * 2 / 3
    busy = (
        state + weights if s.state == CPU else max(state, weights)
    )  # the drive's way in is the link's too, and slower
    return max(forward, weights) + max(backward, busy)


def main(machine: Target, json: Any = None) -> None:
    found = [f for w in WIDTHS for f in fits(*w, machine)]
    print(f"{machine.name}, {machine.memory / 2**30:.0f} GiB less 6 %, {BATCH} sequences of {LENGTH} tokens; "
          f"host {HOST / 1e9:.0f} GB, drive {DRIVE / 1e12:.2f} TB at {NVME.bandwidth(machine) / 1e9:.1f} GB/s")  # fmt: skip
    rows = [
        [
            str(f.width), f.what, str(f.layers), f"{f.parameters / 1e9:.1f} B", f"{f.extra:+.0%}",
            *(f"{n / 1e9:.0f} GB" if n else "" for n in (f.card, f.host, f.drive)), f.by,
        ]
        for f in found
    ]  # fmt: skip
    print(common.table(["width", "", "layers", "parameters", "time", "card", "host", "drive", "run by dsc"], rows))
    if json is not None:
        common.write_json(json, [asdict(f) for f in found])
