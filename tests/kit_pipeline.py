"""Plans made by hand: any cut of a model's forward, any order, so that the runtime is tested without the planner."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence

import torch
from torch.distributed.pipelining import schedules
from torch.fx import Node

from dsc.distributed.cluster import Cluster
from dsc.distributed.forward import Forward
from dsc.distributed.plan import Action, Degrees, PipelinePlan, StagePlan

Orders = tuple[tuple[Action, ...], ...]
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def plan(
    forward: Forward,
    ranks: int,
    schedule: str,
    microbatches: int,
    size: int,
    chunks: int = 1,
    seed: int = 0,
    before: Sequence[Node] | None = None,
) -> PipelinePlan:
    """``chunks`` stages a rank, cut at random places, or before these calls; the order is torch's, ``1F1B`` or ``random``."""
    stages = ranks * chunks
    v = schedule in V_SHAPED or schedule == "random"
    homes = [s % ranks if not v or (s // ranks) % 2 == 0 else ranks - 1 - s % ranks for s in range(stages)]
    orders = (
        any_order(homes, ranks, microbatches, seed)
        if schedule == "random"
        else known(schedule, homes, ranks, microbatches)
    )
    cut = cuts(forward, stages, random.Random(seed))
    if before is not None:
        cut = [0, *(runs(forward).index(n) for n in before), cut[-1]]
    found = tuple(_stage(forward, cut, s, homes[s]) for s in range(stages))
    shared = {name: tuple(s.index for s in found if name in s.state) for s in found for name in s.state}
    return PipelinePlan(
        model="by hand", graph=forward.fingerprint, torch=torch.__version__, cluster=Cluster.parse(f"{ranks}xcpu"),
        degrees=Degrees(pipeline=ranks), devices=tuple(range(ranks)), placement="v" if v else "loop", split="by hand",
        schedule=schedule, stages=found, orders=orders, microbatches=microbatches, microbatch_size=size,
        shared={name: at for name, at in shared.items() if len(at) > 1}, seconds=1.0, bubble=0.0, bound=1.0,
        peaks=(0,) * ranks, limit=0, rivals=(), remarks=(),
    )  # fmt: skip


def runs(forward: Forward) -> list[Node]:
    """Calls that depend on the model's inputs: what is cut.  The others are copied to whoever reads them."""
    fixed: set[Node] = set()
    out = []
    for n in forward.gm.graph.nodes:
        if n.op != "call_function":
            continue
        if all(a in fixed or (a.op == "placeholder" and a.name not in forward.inputs) for a in n.all_input_nodes):
            fixed.add(n)
        else:
            out.append(n)
    return out


def cuts(forward: Forward, stages: int, rng: random.Random) -> list[int]:
    """Places between the calls, one stage's after the other's; never between a call and the parts of its result."""
    order = runs(forward)
    whole = [i for i in range(1, len(order)) if not any(_parts(n) and _later(n, order[i:]) for n in order[:i])]
    return [0, *sorted(rng.sample(whole, stages - 1)), len(order)]


def _parts(n: Node) -> bool:
    return isinstance(n.meta.get("val"), (list, tuple))


def _later(n: Node, rest: Sequence[Node]) -> bool:
    return any(u.target is operator.getitem and u in rest for u in n.users)


def _stage(forward: Forward, cut: list[int], index: int, rank: int) -> StagePlan:
    order, last = runs(forward), len(cut) - 2
    home = {n: s for s in range(last + 1) for n in order[cut[s] : cut[s + 1]]}
    nodes = list(forward.gm.graph.nodes)
    mine = order[cut[index] : cut[index + 1]]
    copied: set[Node] = set()
    stack = [a for n in mine for a in n.all_input_nodes]
    while stack:
        a = stack.pop()
        if a.op == "call_function" and a not in home and a not in copied:
            copied.add(a)
            stack += a.all_input_nodes
    read = {a for n in (*mine, *copied) for a in n.all_input_nodes}
    state = dict.fromkeys(forward.state[n.name] for n in nodes if n in read and n.name in forward.state)
    outside = [n for n in nodes if n.op == "placeholder" and n.name in forward.inputs]
    ends = [n for n in outside if last and all(home.get(u) == last for u in n.users)]

    def crossing(at: int) -> tuple[str, ...]:
        given = [n for n in outside if n not in ends and any(home.get(u, -1) >= at for u in n.users)]
        made = [n for n in nodes if home.get(n, at) < at and any(home.get(u, last) >= at for u in n.users)]
        return tuple(n.name for n in (*given, *made))

    from_outside = [n for n in outside if n not in ends] if index == 0 else ends if index == last else []
    return StagePlan(
        index, rank, tuple(n.name for n in mine), tuple(n.name for n in nodes if n in copied), tuple(state),
        inputs=tuple(n.name for n in from_outside), receives=crossing(index) if index else (),
        sends=crossing(index + 1) if index < last else forward.results, forward=1.0, dgrad=1.0, wgrad=1.0, send=0.0,
        parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0, activation_bytes=0, kept_bytes=0, boundary_bytes=0,
        work_bytes=0, recompute=False,
    )  # fmt: skip


def known(schedule: str, homes: Sequence[int], ranks: int, microbatches: int) -> Orders:
    """torch's own order of actions."""
    if schedule == "1F1B":
        return tuple(_one_forward_one_backward(r, ranks, microbatches) for r in range(ranks))
    stages = [_Stage(s, len(homes), ranks) for s, home in enumerate(homes) if home == 0]
    made = schedules.get_schedule_class(schedule)(stages, microbatches, loss_fn=lambda *_: None)
    flat = (
        (a, x) for r in range(ranks) for a in made.pipeline_order[r] if a is not None for x in (a.sub_actions or (a,))
    )
    out: dict[int, list[Action]] = {r: [] for r in range(ranks)}
    for _, x in flat:
        out[homes[x.stage_index]].append((x.stage_index, x.computation_type.value, x.microbatch_index))
    return tuple(tuple(out[r]) for r in range(ranks))


class _Stage(torch.nn.Module):
    """What torch's schedules ask of a stage to make their order."""

    def __init__(self, index: int, count: int, ranks: int) -> None:
        super().__init__()
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, count, ranks, 0
        self.is_first, self.is_last, self.submod = index == 0, index == count - 1, torch.nn.Module()


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    ahead = min(microbatches, ranks - rank)
    out: list[Action] = [(rank, "F", i) for i in range(ahead)]
    for b in range(microbatches):
        out.append((rank, "B", b))
        if ahead + b < microbatches:
            out.append((rank, "F", ahead + b))
    return tuple(out)


def any_order(homes: Sequence[int], ranks: int, microbatches: int, seed: int) -> Orders:
    """A random order that can run: ranks take any action whose operands are there, now and then two halves as one."""
    rng, last = random.Random(seed), len(homes) - 1
    done: dict[tuple[int, str], int] = {}
    out: list[list[Action]] = [[] for _ in range(ranks)]

    def ready(s: int, kind: str) -> bool:
        m = done.get((s, kind), 0)
        if m == microbatches:
            return False
        if kind == "F":
            return s == 0 or done.get((s - 1, "F"), 0) > m
        if kind == "I":
            return done.get((s, "F"), 0) > m and (s == last or done.get((s + 1, "I"), 0) > m)
        return done.get((s, "I"), 0) > m

    while choice := [(s, k) for s in range(last + 1) for k in "FIW" if ready(s, k)]:
        s, kind = rng.choice(choice)
        m = done.get((s, kind), 0)
        done[s, kind] = m + 1
        if kind == "I" and done.get((s, "W"), 0) == m and rng.random() < 0.3:
            done[s, "W"], kind = m + 1, "B"
        out[homes[s]].append((s, kind, m))  # type: ignore[arg-type]
    return tuple(map(tuple, out))
