"""What a pipeline survives: a rank that is killed, another split in mid-run, a rank that becomes slow.

Run by torchrun as a script it is the training that is disturbed; ``main`` starts that and reads what it says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import table
from pipeline_grid import FREE
from torch import Tensor

from dsc.distributed import forward, pipeline, rebalance
from dsc.distributed.cluster import Cluster
from dsc.distributed.monitor import Report, StageTimes
from dsc.distributed.plan import PipelinePlan
from dsc.distributed.planner import plan_pipeline
from dsc.models import zoo

STEPS, KILLED, MICROBATCHES = 8, 4, 4


def planned(name: str, ranks: int, schedule: str, microbatches: int = MICROBATCHES, batch: int = 8) -> PipelinePlan:
    entry = zoo.load(name)
    return plan_pipeline(
        entry.build(), entry.inputs(batch), stages=ranks, cluster=Cluster("cpu", 1, ranks, FREE, FREE),
        microbatches=microbatches, schedule=schedule, recompute=False, effort="quick",
    )  # fmt: skip


def train(pipe: pipeline.Pipeline, optimizer: torch.optim.Optimizer, inputs: tuple[Tensor, ...], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        pipe.step(*(x.roll(pipe.taken, 0) for x in inputs))
        optimizer.step()


def started(plan: PipelinePlan) -> tuple[pipeline.Pipeline, torch.optim.Optimizer, tuple[Tensor, ...]]:
    entry = zoo.load("gpt-tiny")
    inputs = entry.inputs(8)
    pipe = pipeline.pipeline(entry.build(), inputs, plan=plan, compiled=False)
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2), inputs


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in b)


def script(folder: Path) -> None:
    """Under torchrun: dies in step ``KILLED`` of the first attempt, goes on in the second, then is split anew."""
    torch.set_num_threads(1)
    plan = PipelinePlan.load(folder / "plan.json")
    pipe, optimizer, inputs = started(plan)
    begun = time.time()
    start = pipe.resume(folder / "steps", optimizer)
    resumed = time.time() - begun
    while pipe.taken < STEPS:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and pipe.taken == KILLED and dist.get_rank() == 1:
            (folder / "killed").write_text(str(time.time()))
            next(iter(pipe.stages.values())).functions.forward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        train(pipe, optimizer, inputs, 1)
        if pipe.taken == start + 1 and start and dist.get_rank() == 0:
            (folder / "going").write_text(str(time.time()))
        saving = pipe.save(folder / "steps", optimizer, background=True)
        saving.wait()
    whole, optimizer, _ = started(plan)
    train(whole, optimizer, inputs, STEPS)
    unbroken = worst(pipe.full_state_dict(), whole.full_state_dict())
    moved, optimizer, _ = started(plan)
    train(moved, optimizer, inputs, STEPS // 2)
    begun = time.time()
    moved.resplit(PipelinePlan.load(folder / "other.json"), folder / "moved", optimizer)
    seconds = time.time() - begun
    train(moved, optimizer, inputs, STEPS - STEPS // 2)
    state = worst(moved.full_state_dict(), whole.full_state_dict())
    begun = time.time()
    moved.save(folder / "timed", optimizer)
    blocking = time.time() - begun
    begun = time.time()
    saving = moved.save(folder / "timed2", optimizer, background=True)
    background = time.time() - begun
    saving.wait()
    if dist.get_rank() == 0:
        found = {
            "restarted from step": start, "resume s": resumed, "killed, against an unbroken run": unbroken,
            "split anew, against an unbroken run": state, "split anew s": seconds,
            "save s": blocking, "async save blocks s": background,
        }  # fmt: skip
        (folder / "result.json").write_text(json.dumps(found))


def slow_rank(ranks: int, microbatches: int, factor: float) -> tuple[float, float]:
    """Simulated, over the step before: after a rank became slow, and after the cuts moved."""
    plan = planned("gpt", ranks, "zbv", microbatches, batch=microbatches)
    entry = zoo.load("gpt")
    traced = forward.trace(entry.build(), forward.microbatch(entry.inputs(microbatches), microbatches))
    slow = tuple(factor if r == ranks // 2 else 1.0 for r in range(ranks))
    times = {s.index: StageTimes(*(x * slow[s.rank] for x in (s.forward, s.dgrad, s.wgrad))) for s in plan.stages}
    busy = tuple(sum(times[s.index].total for s in plan.stages_of(r)) * microbatches for r in range(ranks))
    zero = (0,) * ranks
    report = Report(times, (1.0,) * ranks, busy, zero, (0.0,) * ranks, busy)
    hurt = rebalance.measured_seconds(plan, report)
    healed = rebalance.replan(plan, traced, report, slow).seconds
    return hurt / plan.seconds, healed / plan.seconds


def main() -> dict[str, object]:
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planned("gpt-tiny", 2, "zbv").save(folder / "plan.json")
        planned("gpt-tiny", 2, "1f1b").save(folder / "other.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.2"]
        command += ["-m", "dsc.distributed.run", __file__, str(folder)]
        paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=600
        )
        if not (folder / "result.json").exists():
            raise RuntimeError(done.stderr)
        found = json.loads((folder / "result.json").read_text())
        times = [float((folder / n).read_text()) for n in ("killed", "going")]
        found["from the kill to the next step s"] = times[1] - times[0]
    print(
        table(
            ("two ranks, gpt-tiny, AdamW", ""),
            [
                (k, f"{v:.2f}" if k.endswith(" s") else f"{v:.1e}" if isinstance(v, float) else v)
                for k, v in found.items()
            ],
        )
    )
    lines = []
    for ranks, microbatches in ((4, 16), (8, 16)):
        hurt, healed = slow_rank(ranks, microbatches, 1.3)
        lines.append((f"{ranks} ranks, one 1.3 x slower", hurt, healed))
        found[f"slow rank of {ranks}"] = (hurt, healed)
    head = ("simulated, over the step before", "slow", "cuts moved")
    print()
    print(table(head, lines), "\n", flush=True)
    return found


if __name__ == "__main__":
    script(Path(sys.argv[1]))
