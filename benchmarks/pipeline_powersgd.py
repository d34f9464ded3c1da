"""Two replicas of two ranks under ZBV: PowerSGD with error feedback against plain all-reduce, on a toy language.

The next token is a fixed function of the last one, but for one in ten, which is random.  Each replica has its own batches.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pipeline_ranks
import torch
import torch.distributed as dist
from common import table
from pipeline_grid import FREE
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dsc.distributed import pipeline
from dsc.distributed.cluster import Cluster
from dsc.distributed.plan import PipelinePlan
from dsc.distributed.planner import plan_pipeline
from dsc.distributed.reduce import Compressed, Replicas
from dsc.models import llama

CONFIG = llama.Config(vocab=256, max_length=32, layers=4, heads=4, kv_heads=2, width=128, hidden=320)
BATCH, MICROBATCHES, LAST = 8, 4, 10


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rule = torch.randint(CONFIG.vocab, (CONFIG.vocab,), generator=torch.Generator().manual_seed(5))
    tokens = torch.randint(CONFIG.vocab, (BATCH, CONFIG.max_length), generator=generator)
    odd = torch.rand(tokens.shape, generator=generator) < 0.1
    return tokens, torch.where(odd, tokens.roll(1, 1), rule[tokens])


def train(plan: PipelinePlan, rank: int | None, seed: int, steps: int) -> tuple[float, float, bool]:
    """On every rank: mean loss of the last steps over both replicas, compression, and whether replicas are bit-equal."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(seed)
    model = llama.Llama(CONFIG)
    replicas = Replicas() if rank is None else Compressed(rank=rank)
    inputs = batch(torch.Generator().manual_seed(0))
    pipe = pipeline.pipeline(model, inputs, plan=plan, compiled=False, mesh=mesh, replicas=replicas)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(100 * seed + mesh.get_local_rank("dp"))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipe.step(*batch(generator)))
        optimizer.step()
    loss = torch.stack(losses[-LAST:]).mean()
    dist.all_reduce(loss, group=mesh["dp"].get_group())
    mine = torch.cat([p.detach().flatten() for p in pipe.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=mesh["dp"].get_group())
    ratio = replicas.ratio if isinstance(replicas, Compressed) else 1.0
    return float(loss) / 2, ratio, torch.equal(both[0], both[1])


def main(steps: int = 120, seeds: Sequence[int] = (0, 1, 2), ranks: Sequence[int] = (4,)) -> dict[str, object]:
    plan = plan_pipeline(
        llama.Llama(CONFIG), batch(torch.Generator().manual_seed(0)), stages=2, cluster=Cluster("cpu", 1, 2, FREE, FREE),
        microbatches=MICROBATCHES, schedule="zbv", recompute=False, effort="quick",
    )  # fmt: skip
    lines, out = [], {}
    plain: list[float] = []
    for rank in (None, *ranks):
        losses, ratios, equal = [], [], True
        for seed in seeds:
            found = pipeline_ranks.run(4, train, plan, rank, seed, steps)
            losses.append(found[0][0])
            ratios.append(min(f[1] for f in found))
            equal &= all(f[2] for f in found)
        plain = plain or losses
        off = statistics.mean(a / b for a, b in zip(losses, plain)) - 1
        name = "all-reduce" if rank is None else f"PowerSGD, rank {rank}"
        lines.append((name, f"{min(ratios):.1f} : 1", "yes" if equal else "NO", statistics.mean(losses), f"{off:+.1%}"))
        out[name] = {"ratio": min(ratios), "equal": equal, "losses": losses}
    head = (f"ZBV, {steps} steps, {len(seeds)} seeds", "compression", "replicas equal", "final loss", "off")
    print(table(head, lines), "\n", flush=True)
    return out
