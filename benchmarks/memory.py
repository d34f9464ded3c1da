"""Peak memory and modelled time of train steps within budgets, beside torch's own: ``python benchmarks/memory.py``.

Nothing is allocated: models of real sizes are traced on shapes, in bfloat16, for a GPU that need not be there.

1. Both sides start from the same joint graph, and both sides' graphs go through the same fusion, liveness
   (``dsc.liveness``) and cost model (``dsc.cost``).  Time is modelled, not measured.
2. torch's points are ``activation_memory_budget`` in steps from 1 to 0, by ``min_cut_rematerialization_partition``.
3. Peaks are dynamic: without parameters and inputs, as shares of the peak of torch's default partition (budget 1).
4. At every one of torch's points, dsc plans for the peak that torch reaches there.
5. The frontier lists dsc's time at fixed shares; ``least`` is the smallest peak that it finds.  Beside it stands what dsc
   reaches when saved values may also move to the host over the target's PCIe link (``dsc.tiers``).
6. Planning time is CPU time of this process, without tracing.
7. ``--fit``: how many parameters of LLaMA's kind a card of the target's size trains, by what is kept where.
8. ``--check``: planned peaks and gradients of all tiny models at five budgets, measured here, see ``memory_check.py``.
9. ``--gpu``: planned and measured peaks, gradients and offload on a real GPU, see ``memory_gpu.py``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import common
import memory_check
import memory_fit
import memory_gpu
import numpy as np
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.fx import GraphModule

from dsc import cost, liveness, target, tiers
from dsc.compiler import copied
from dsc.debug import shapes
from dsc.models import gpt, llama, resnet, vit
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.passes.memory_plan import Search
from dsc.passes.memory_problem import extract
from dsc.passes.memory_program import Program
from dsc.target import Target
from dsc.torch_shim import min_cut_rematerialization_partition

MOVING = (0.7, 0.5, 0.4, 0.3)
SHARES = (0.9, 0.8, 0.7, 0.65, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2)


@dataclass(frozen=True)
class Point:
    share: float
    """Dynamic peak, of that of torch's default partition."""
    extra: float
    """Modelled time beyond torch's default partition, as a share."""
    what: str


@dataclass(frozen=True)
class Result:
    model: str
    layers: int
    operators: int
    peak: int
    """Bytes of torch's default partition, dynamic."""
    milliseconds: float
    torch: list[Point]
    ours: list[Point | None]
    """At each of torch's points."""
    frontier: list[tuple[float, Point | None]]
    least: Point
    default: Point
    moving: list[tuple[float, Point | None]]
    """The frontier where saved values may move to the host."""
    planning: list[float]
    """Seconds of CPU for each plan; the first one includes the choices of all blocks."""


def tokens(vocab: int, batch: int, length: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.zeros(batch, length, dtype=torch.long), torch.zeros(batch, length, dtype=torch.long))


def images(batch: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long))


def models(layers: int) -> dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]]:
    """GPT-2 XL's width with dropout, LLaMA-3-8B's layers, ViT-L/16, ResNet-34."""
    stages = {6: (3, 4, 6, 3), 24: (6, 16, 24, 6), 96: (24, 64, 96, 24)}.get(layers, (3, 4, 6, 3))
    return {
        "gpt": (
            lambda: gpt.GPT(gpt.Config(50304, 1024, layers, 25, 1600, dropout=0.1, tied=False)),
            tokens(50304, 16, 1024),
        ),
        "llama": (
            lambda: llama.Llama(llama.Config(32000, 4096, layers, 32, 8, 4096, 14336)),
            tokens(32000, 4, 4096),
        ),
        "vit": (lambda: vit.ViT(vit.Config(layers=layers, heads=16, width=1024)), images(256)),
        "resnet": (lambda: resnet.ResNet(resnet.Config(blocks=stages)), images(128)),
    }


def evaluate(forward: GraphModule, backward: GraphModule, machine: Target) -> tuple[int, float]:
    """Peak and seconds of a split step."""
    saved = liveness.saved_places(forward, backward)
    for gm in (forward, backward):
        for p in (Canonicalize(), Fuse()):
            p.run(gm, machine)
    peak = liveness.profile_step(forward, backward, saved).peak
    return peak, sum(cost.graph_cost(gm, machine).seconds for gm in (forward, backward))


def torchs(joint: shapes.Joint, budget: float, machine: Target) -> tuple[int, float]:
    with torch._functorch.config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(
            copied(joint.gm),
            (),
            num_fwd_outputs=joint.results,
            static_lifetime_input_indices=list(range(joint.parameters)),
        )
    return evaluate(forward, backward, machine)


def run(name: str, layers: int, points: int, machine: Target) -> Result:
    build, draw = models(layers)[name]
    joint = shapes.joint(build, draw, torch.bfloat16, cuda=machine.kind == "cuda")
    Canonicalize().run(joint.gm, machine)
    start = time.process_time()
    search = Search(joint.gm, extract(joint.gm, machine), machine)
    setup = time.process_time() - start
    fixed = search.found.problem.fixed
    theirs = {}
    for budget in np.linspace(1, 0, points) if points > 1 else [1.0]:
        theirs[f"budget {budget:.2f}"] = torchs(joint, float(budget), machine)
    base_peak, base_seconds = next(iter(theirs.values()))
    whole = base_peak - fixed

    def point(peak: int, seconds: float, what: str) -> Point:
        return Point(round((peak - fixed) / whole, 4), round(seconds / base_seconds - 1, 5), what)

    def ours(program: Program | None) -> Point | None:
        return None if program is None else point(program.peak, program.seconds, program.origin)

    planning = []

    def within(peak: float) -> Point | None:
        start = time.process_time()
        found = ours(search.within(int(peak)))
        planning.append(round(time.process_time() - start + (setup if not planning else 0), 2))
        return found

    frontier = [(s, within(fixed + s * whole)) for s in SHARES]
    matched: list[Point | None] = []
    for peak, _ in theirs.values():
        matched.append(within(peak))
    least = ours(search.least())
    search.tier = tiers.parse("cpu")
    moving = [(s, ours(search.within(int(fixed + s * whole)))) for s in MOVING]
    default = ours(search.default)
    assert least is not None and default is not None
    return Result(
        name,
        layers,
        len(search.found.problem.ops),
        whole,
        round(base_seconds * 1e3, 2),
        [point(*pair, what) for what, pair in theirs.items()],
        matched,
        frontier,
        least,
        default,
        moving,
        planning,
    )


def show(r: Result) -> None:
    print(f"\n{r.model}, {r.layers} layers, {r.operators} operators: torch's default has a dynamic peak of "
          f"{r.peak / 1e9:.2f} GB and takes {r.milliseconds} ms (modelled)")  # fmt: skip
    print(f"dsc without a budget: {_text(r.default)};  least peak: {_text(r.least)}")
    rows = [[f"{s:.2f}", _text(p), _text(_best(r.torch, s))] for s, p in r.frontier]
    print(common.table(["share", "dsc", "torch, best of its points"], rows))
    rows = [[f"{s:.2f}", _text(p)] for s, p in r.moving]
    print(common.table(["share", "dsc, with offload to the host"], rows))
    if len(r.torch) > 1:
        rows = [[t.what, _text(t), _text(o), _verdict(t, o)] for t, o in zip(r.torch, r.ours)]
        print(common.table(["torch's point", "torch", "dsc within that peak", ""], rows))
    print(f"planning: {r.planning[0]:.2f} s of CPU for the first plan, then {np.mean(r.planning[1:]):.2f} s each")


def _best(points: list[Point], share: float) -> Point | None:
    return min((p for p in points if p.share <= share), key=lambda p: p.extra, default=None)


def _text(p: Point | None) -> str:
    return "cannot" if p is None else f"{p.share:.3f} {p.extra:+.2%} {p.what}"


def _verdict(theirs: Point, ours: Point | None) -> str:
    return "" if ours is not None and ours.extra <= theirs.extra + 1e-4 else "slower"


def main() -> None:
    p = common.parser(__doc__, "gpt,llama,vit,resnet")
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--points", type=int, default=21, help="of torch's budget; 1 for none but its default")
    p.add_argument("--target", default="a100")
    p.add_argument("--fit", action="store_true", help="parameters that one card trains, and nothing else")
    p.add_argument("--check", action="store_true", help="planned peaks against measured ones, and nothing else")
    p.add_argument("--compress", help="with --check: saved values may be kept in bf16, fp8 or e5m2")
    p.add_argument("--gpu", action="store_true", help="measure on the GPU of this machine, and nothing else")
    arguments = p.parse_args()
    if arguments.gpu:
        memory_gpu.main(arguments.json)
        return
    if arguments.check:
        memory_check.main(arguments.json, compress=arguments.compress)
        return
    if arguments.fit:
        memory_fit.main(target.find(arguments.target), arguments.json)
        return
    results: list[dict[str, Any]] = []
    for name in arguments.models.split(","):
        result = run(name, arguments.layers, arguments.points, target.find(arguments.target))
        show(result)
        results.append(asdict(result))
    if arguments.json is not None:
        common.write_json(arguments.json, json.loads(json.dumps(results)))


if __name__ == "__main__":
    main()
