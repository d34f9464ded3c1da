"""Runs checks on several processes: ``python worker.py N FOLDER CHECK...`` imports once, forks N ranks, prints one line a check.

The ranks are children of one process that has torch imported already; torchrun itself is tried by a test of its own.
"""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing as mp
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import kit_pipeline as hand
from dsc.distributed import forward
from dsc.distributed import pipeline as pl
from dsc.distributed.plan import PipelinePlan, why_not
from dsc.distributed.reduce import Compressed
from dsc.errors import BadBatch, BadOption, PlanMismatch, RankLost, Untraceable, WorldMismatch
from dsc.models import zoo

MICROBATCHES, SIZE = 4, 2
Grid = tuple[str, str, int, bool, int]
"""Model, schedule, stages a rank, compiled, seed of the cut."""


def made(
    name: str, schedule: str, chunks: int, seed: int = 0, ranks: int | None = None
) -> tuple[nn.Module, tuple[Tensor, ...], PipelinePlan]:
    entry = zoo.load(name)
    model, inputs = entry.build(), entry.inputs(MICROBATCHES * SIZE)
    traced = trace(name)
    plan = hand.plan(traced, ranks or dist.get_world_size(), schedule, MICROBATCHES, SIZE, chunks, seed)
    assert why_not(plan) is None, why_not(plan)
    return model, inputs, plan


@cache
def trace(name: str) -> forward.Forward:
    entry = zoo.load(name)
    return forward.trace(entry.build(), entry.inputs(SIZE))


def reference(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss and gradients of one process, micro-batch by micro-batch."""
    model = copy.deepcopy(model)
    losses = []
    for i in range(MICROBATCHES):
        loss = model(*(x[i * SIZE : (i + 1) * SIZE] for x in inputs)) / MICROBATCHES
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def worst(pipe: pl.Pipeline, want: Mapping[str, Tensor]) -> float:
    """Largest difference of a gradient of this rank, relative to the gradient's largest number."""
    out = 0.0
    for name, p in pipe.named_parameters():
        got = torch.zeros_like(p) if p.grad is None else p.grad
        out = max(out, float((got - want[name]).abs().max() / want[name].abs().max().clamp_min(1e-12)))
    return out


def same(name: str, schedule: str, chunks: int, compiled: bool, seed: int) -> str:
    """Loss and every gradient as in one process, twice: the second step adds to the first."""
    model, inputs, plan = made(name, schedule, chunks, seed)
    loss, want = reference(model, inputs)
    state = copy.deepcopy(model.state_dict())
    pipe = pl.pipeline(model, inputs, plan=plan, compiled=compiled)
    got = pipe.step(*inputs)
    error = worst(pipe, want)
    assert abs(float(got - loss)) <= 1e-6 * float(loss), (got, loss)
    assert error <= 2e-6, error
    pipe.step(*inputs)
    assert worst(pipe, {n: 2 * g for n, g in want.items()}) <= 2e-6
    full = pipe.full_state_dict()
    assert full.keys() == state.keys() and all(torch.equal(full[n], state[n]) for n in state)
    return f"{error:.1e}"


def train(pipe: pl.Pipeline, optimizer: torch.optim.Optimizer, inputs: tuple[Tensor, ...], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        shift = pipe.taken % SIZE
        pipe.step(*(x.roll(shift, 0) for x in inputs))
        optimizer.step()


def resplit(folder: Path) -> str:
    """Another cut in mid-run, the optimizer's state with it: bit for bit the run that kept its cut."""
    model, inputs, plan = made("gpt-tiny", "ZBVZeroBubble", 2, seed=1)
    pipe = pl.pipeline(model, inputs, plan=plan, compiled=False)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    train(pipe, optimizer, inputs, 2)
    pipe.save(folder / "resplit", optimizer)
    train(pipe, optimizer, inputs, 2)
    want = pipe.full_state_dict()
    assert pipe.load(folder / "resplit", optimizer) == 2
    before = {n for n, _ in pipe.named_parameters()}
    pipe.resplit(made("gpt-tiny", "1F1B", 1, seed=7)[2], folder / "resplit", optimizer)
    moved = len(before ^ {n for n, _ in pipe.named_parameters()})
    train(pipe, optimizer, inputs, 2)
    got = pipe.full_state_dict()
    assert moved and pipe.taken == 4
    assert all(torch.equal(got[n], want[n]) for n in want), max(float((got[n] - want[n]).abs().max()) for n in want)
    return f"{moved} parameters moved"


@cache
def common() -> tuple[pl.Pipeline, tuple[Tensor, ...]]:
    """One pipeline for several checks."""
    model, inputs, plan = made("gpt-tiny", "ZBVZeroBubble", 2)
    return pl.pipeline(model, inputs, plan=plan, compiled=False), inputs


def saves(folder: Path) -> str:
    """Saved in the background, read into a model on the meta device with another cut."""
    model, inputs, plan = made("llama-tiny", "1F1B", 1, seed=2)
    pipe = pl.pipeline(model, inputs, plan=plan, compiled=False)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    train(pipe, optimizer, inputs, 1)
    saving = pipe.save(folder / "saves", optimizer, background=True)
    want = pipe.full_state_dict()
    saving.wait()
    with torch.device("meta"):
        empty = zoo.load("llama-tiny").make()
    plan = made("llama-tiny", "ZBVZeroBubble", 2, seed=5)[2]
    again = pl.pipeline(empty, inputs, plan=plan, compiled=False)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1.0)
    assert again.resume(folder / "nothing", optimizer) == 0
    assert again.resume(folder / "saves", optimizer) == 1
    assert optimizer.param_groups[0]["lr"] == 1e-2
    got = again.full_state_dict()
    assert all(torch.equal(got[n], want[n]) for n in want)
    return f"{len(got)} names"


def watches(folder: Path) -> str:
    """Times of every stage on every rank, the same report everywhere; a slow rank shows as drift."""
    pipe, inputs = common()
    plan = pipe.plan
    assert torch.allclose(pipe.evaluate(*inputs), pipe.step(*inputs)) and pipe.taken == 1
    pipe.monitor.clear()
    for stage in pipe.stages.values():
        stage.functions.forward = slowed(stage.functions.forward, 0.02 if pipe.place.rank else 0.005)
    for _ in range(3):
        pipe.step(*inputs)
    report = pipe.report()
    assert set(report.stages) == {s.index for s in plan.stages}
    assert all(t.forward > 0 and t.dgrad > 0 and t.wgrad > 0 for t in report.stages.values())
    assert 0 < report.bubble < 1 and report.imbalance > 1.2 and report.drift > 0.2, str(report)
    assert all(n > 0 for n in report.sent) and all(0 < u < 1 for u in report.links)
    return str(report).splitlines()[0]


def rebalances(folder: Path) -> str:
    """A rank that becomes slow hands work on, and training goes on where it was."""
    model, inputs, plan = made("gpt-tiny", "1F1B", 1, seed=1)
    pipe = pl.pipeline(model, inputs, plan=plan, compiled=False)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    (stage,) = pipe.stages.values()
    call = stage.functions.forward
    stage.functions.forward = slowed(call, 0.03)
    train(pipe, optimizer, inputs, 2)
    assert pipe.rebalance(folder / "even", optimizer, threshold=100.0) is None
    stage.functions.forward = slowed(call, 0.03 if pipe.place.rank else 0.15)
    pipe.monitor.clear()
    train(pipe, optimizer, inputs, 2)
    before = pipe.full_state_dict()
    new = pipe.rebalance(folder / "slow", optimizer)
    assert new is not None and len(new.stages[0].nodes) < len(plan.stages[0].nodes)
    after = pipe.full_state_dict()
    assert all(torch.equal(after[n], before[n]) for n in before)
    train(pipe, optimizer, inputs, 1)
    assert pipe.taken == 5
    return f"{len(plan.stages[0].nodes)} -> {len(new.stages[0].nodes)} nodes on the slow rank"


def slowed(call: Callable[..., object], seconds: float) -> Callable[..., object]:
    def run(*args: object) -> object:
        time.sleep(seconds)
        return call(*args)

    return run


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def refuses(folder: Path) -> str:
    """Each mistake raises its own error on the rank that sees it, before anything hangs."""
    pipe, inputs = common()
    model, plan, ranks = zoo.load("gpt-tiny").build(), pipe.plan, dist.get_world_size()
    raises(BadBatch, "7 samples", lambda: pipe.step(*(x[:7] for x in inputs)))
    raises(BadBatch, "takes 2 inputs", lambda: pipe.step(inputs[0]))
    wide = made("gpt-tiny", "1F1B", 1, ranks=ranks + 1)[2]
    raises(WorldMismatch, f"needs {ranks + 1} processes", lambda: pl.pipeline(model, inputs, plan=wide))
    other = replace(plan, bubble=float(dist.get_rank()))
    raises(PlanMismatch, "different plans", lambda: pl.pipeline(model, inputs, plan=other))
    llama = replace(plan, graph="another")
    raises(PlanMismatch, "made for the graph another", lambda: pl.pipeline(model, inputs, plan=llama))
    raises(BadOption, "did you mean|one of 'ddp'", lambda: pl.pipeline(model, inputs, plan=plan, replicas="dpp"))
    raises(Untraceable, "control flow", lambda: pl.pipeline(Branches(), (torch.ones(8, 2),), plan=plan))
    return "7 errors"


def raises(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        call()


def powersgd(folder: Path) -> str:
    """Two replicas of two ranks: low-rank gradients, error feedback, zero bubble; replicas stay equal bit by bit."""
    model, inputs, plan = made("gpt-tiny", "ZBVZeroBubble", 2, ranks=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replicas = Compressed(rank=1)
    pipe = pl.pipeline(model, inputs, plan=plan, compiled=False, mesh=mesh, replicas=replicas)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    half = mesh.get_local_rank("dp")
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(float(pipe.step(*(x.roll(half, 0) for x in inputs))))
        optimizer.step()
    mine = torch.cat([p.detach().flatten() for p in pipe.parameters()])
    other = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(other, mine, group=mesh["dp"].get_group())
    assert torch.equal(other[0], other[1])
    assert losses[-1] < losses[0] and replicas.ratio > 4, (losses, replicas.ratio)
    return f"{replicas.ratio:.1f} : 1"


def replicated(folder: Path) -> str:
    """Two replicas with a batch each: the mean of their gradients, plain and sharded, under a zero-bubble schedule."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    half = mesh.get_local_rank("dp")
    out = []
    for kind in ("ddp", "fsdp"):
        model, inputs, plan = made("llama-tiny", "ZBVZeroBubble", 2, ranks=2)
        both = [reference(model, tuple(x.flip(1) for x in inputs) if i else inputs)[1] for i in range(2)]
        want = {n: (both[0][n] + both[1][n]) / 2 for n in both[0]}
        pipe = pl.pipeline(model, inputs, plan=plan, compiled=False, mesh=mesh, replicas=kind)
        pipe.step(*(x.flip(1) if half else x for x in inputs))
        for name, p in pipe.named_parameters():
            got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            error = float((got - want[name]).abs().max() / want[name].abs().max())
            assert error < 3e-6, (kind, name, error)
            out.append(error)
    return f"{max(out):.1e}"


def sharded(folder: Path) -> str:
    """Tensor parallelism inside of the stages: heads and hidden units over two ranks, two ranks of pipeline, zero bubble."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model, inputs, plan = made("llama-tiny", "InterleavedZeroBubble", 1, ranks=2)
    loss, want = reference(model, inputs)
    rows = ("*.q.weight", "*.k.weight", "*.v.weight", "*.gate.weight", "*.up.weight")
    shards = {**dict.fromkeys(rows, 0), "*.out.weight": 1, "*.down.weight": 1}
    pipe = pl.pipeline(copy.deepcopy(model), inputs, plan=plan, mesh=mesh, shards=shards)
    got = pipe.step(*inputs)
    assert abs(float(got - loss)) <= 1e-6 * float(loss)
    out = []
    for name, p in pipe.named_parameters():
        out.append(float((p.grad.full_tensor() - want[name]).abs().max() / want[name].abs().max()))
    assert max(out) < 2e-6 and any(p.to_local().numel() < p.numel() for p in pipe.parameters())
    return f"{max(out):.1e}"


def dies(folder: Path) -> str:
    """A rank ends without a word in the third step: the other says so and stops."""
    pipe, inputs = common()
    taken = pipe.taken
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    raises(RankLost, f"lost another rank while it ran step {taken}", lambda: pipe.step(*inputs))
    return "said so"


CHECKS: dict[str, Callable[[Path], str]] = {
    f.__name__: f for f in (resplit, saves, watches, rebalances, refuses, powersgd, replicated, sharded, dies)
}


def check(name: str, folder: Path) -> str:
    if name in CHECKS:
        return CHECKS[name](folder)
    model, schedule, chunks, how, seed = name.split(",")
    return same(model, schedule, int(chunks), how == "compiled", int(seed))


def rank_main(rank: int, world: int, folder: Path, names: list[str], seconds: float) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
    for name in names:
        start = time.process_time()
        try:
            found, good = check(name, folder), True
        except BaseException:
            found, good = traceback.format_exc(), False
        line = {"check": name, "rank": rank, "good": good, "found": found, "cpu": time.process_time() - start}
        os.write(1, (json.dumps(line) + "\n").encode())  # one call: lines of ranks never mix
        if not good:
            os._exit(1)
    os._exit(0)


def main() -> None:
    world, folder, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    ranks = [
        mp.get_context("fork").Process(target=rank_main, args=(r, world, folder, names, 60.0)) for r in range(world)
    ]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join()
    sys.exit(max(p.exitcode or 0 for p in ranks))


if __name__ == "__main__":
    main()
