"""A split and its orders as a plan: the names of what each stage runs, reads and hands on, and why it is so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch.fx import Node

from dsc.cost import arguments
from dsc.distributed.cluster import Cluster
from dsc.distributed.line import Laid, readers, values
from dsc.distributed.plan import Degrees, PipelinePlan, Placement, Rival, StagePlan
from dsc.distributed.stage_cost import packet
from dsc.errors import size
from dsc.manager import Remark
from dsc.passes.solve.pipeline_simulate import Pipeline, bound
from dsc.passes.solve.pipeline_tune import Candidate

RIVALS = 60
"""How many other plans are listed."""


def describe(
    laid: Laid,
    chosen: Candidate,
    rivals: Sequence[Candidate],
    again: Sequence[bool],
    *,
    model: str,
    cluster: Cluster,
    degrees: Degrees,
    devices: Sequence[int],
    samples: int,
    limit: int,
    remarks: Iterable[Remark] = (),
) -> PipelinePlan:
    """The plan of a candidate; ``again``: which stages compute their forward again."""
    p, line = chosen.pipeline, chosen.timeline
    stages = stage_plans(laid, chosen.cuts, p, again)
    shared = shared_parameters(laid, stages)
    placement: Placement = "v" if len(p.home) > p.ranks and p.home[p.ranks] == p.ranks - 1 and p.ranks > 1 else "loop"
    others = tuple(
        Rival(c.split, c.schedule, c.seconds, c.timeline.bubble, int(max(c.timeline.peaks)), c.fits) for c in rivals
    )
    return PipelinePlan(
        model=model,
        graph=laid.forward.fingerprint,
        torch=torch.__version__,
        cluster=cluster,
        degrees=degrees,
        devices=tuple(devices),
        placement=placement,
        split=chosen.split,
        schedule=chosen.schedule,
        stages=stages,
        orders=chosen.orders,  # type: ignore[arg-type]  # kinds are texts there
        microbatches=p.microbatches,
        microbatch_size=samples,
        shared=shared,
        seconds=line.seconds,
        bubble=line.bubble,
        bound=bound(p),
        peaks=tuple(int(x) for x in line.peaks),
        limit=limit,
        rivals=others[:RIVALS],
        remarks=(*explain(laid, chosen, others, stages, shared), *remarks),
    )


def stage_plans(laid: Laid, cuts: Sequence[int], p: Pipeline, again: Sequence[bool]) -> tuple[StagePlan, ...]:
    """The stages with the names of their nodes, parameters, inputs, and of what crosses between them."""
    forward, count = laid.forward, len(cuts) - 1
    where = {n: s for s, (low, high) in enumerate(pairwise(cuts)) for n in laid.nodes[low:high]}
    first: dict[Node, int] = {}
    last: dict[Node, int] = {}
    for v in values(forward, laid.nodes):
        uses = [where[u] for u in readers(v, laid.copied) if u in where]
        if v.name in forward.results:
            uses.append(count - 1)
        first[v] = where.get(v, min(uses, default=0))
        last[v] = max(uses, default=first[v])
    given = [n for n in forward.gm.graph.nodes if n.op == "placeholder" and n.name in forward.inputs]
    late = {n for n in given if first[n] == count - 1}  # only the last stage reads them: the targets
    for n in given:
        first[n] = count - 1 if n in late else 0

    def crosses(s: int) -> tuple[str, ...]:
        """What goes from stage ``s`` to the next."""
        return tuple(v.name for v in values(forward, laid.nodes) if first[v] <= s < last[v])

    found = []
    for s, (low, high) in enumerate(pairwise(cuts)):
        nodes = laid.nodes[low:high]
        copied = _copied(laid, nodes)
        read = {a for n in (*nodes, *copied) for a in n.all_input_nodes}
        names = [forward.state[a.name] for a in forward.gm.graph.nodes if a in read and a.name in forward.state]
        weights, gradients, state = laid.line.static(low, high)
        found.append(
            StagePlan(
                index=s,
                rank=p.home[s],
                nodes=tuple(n.name for n in nodes),
                copied=tuple(n.name for n in copied),
                state=tuple(dict.fromkeys(names)),
                inputs=tuple(n.name for n in given if first[n] == s and (s == 0 or n in late)),
                receives=crosses(s - 1) if s else (),
                sends=crosses(s) if s < count - 1 else forward.results,
                forward=p.forward[s],
                dgrad=p.dgrad[s],
                wgrad=p.wgrad[s],
                send=p.lags[s] if s < count - 1 else 0.0,
                parameter_bytes=int(weights),
                gradient_bytes=int(gradients),
                optimizer_bytes=int(state),
                activation_bytes=int(p.held[s]),
                kept_bytes=int(p.kept[s]),
                boundary_bytes=int(laid.line.crossing[low]) if s else 0,
                work_bytes=int(p.work[s]),
                recompute=bool(again[s]),
            )
        )
    return tuple(found)


def _copied(laid: Laid, nodes: Iterable[Node]) -> list[Node]:
    """Copied calls that some nodes read, in the order of the program."""
    found: set[Node] = set()
    stack = [a for n in nodes for a in n.all_input_nodes]
    while stack:
        n = stack.pop()
        if n in laid.copied and n not in found:
            found.add(n)
            stack += n.all_input_nodes
    return [n for n in laid.forward.gm.graph.nodes if n in found]


def shared_parameters(laid: Laid, stages: Sequence[StagePlan]) -> dict[str, tuple[int, ...]]:
    """Parameters with gradients that several stages read."""
    trained = {laid.forward.state[p] for p in laid.forward.parameters}
    readers: dict[str, list[int]] = {}
    for s in stages:
        for name in s.state:
            if name in trained:
                readers.setdefault(name, []).append(s.index)
    return {name: tuple(at) for name, at in readers.items() if len(at) > 1}


def explain(
    laid: Laid,
    chosen: Candidate,
    rivals: Sequence[Rival],
    stages: Sequence[StagePlan],
    shared: dict[str, tuple[int, ...]],
) -> list[Remark]:
    """Why the plan is as it is, with numbers."""
    p, line = chosen.pipeline, laid.line
    found = []
    mean = sum(p.busy(r) for r in range(p.ranks)) / p.ranks
    slowest = max(range(p.ranks), key=p.busy)
    found.append(
        Remark(
            chosen.schedule,
            "did",
            f"{chosen.timeline.seconds * 1e3:.4g} ms a step, {chosen.timeline.bubble:.1%} of the ranks' time is no work; "
            f"the slowest rank ({slowest}) has {p.busy(slowest) / mean:.3f}x the mean, and no order of these stages "
            f"takes less than {bound(p) * 1e3:.4g} ms",
        )
    )
    for rival in [next((r for r in rivals if not r.fits), None), next((r for r in rivals if r.fits), None)]:
        if rival is not None and (rival.seconds < chosen.seconds or rival.fits):
            why = (
                f"{rival.seconds / chosen.seconds - 1:+.1%} time" if rival.fits else f"needs {size(rival.peak)} a rank"
            )
            found.append(Remark(f"{rival.schedule} on {rival.split}", "skipped", f"{why}; {rival.bubble:.1%} no work"))
    for s in stages[1:]:
        lag = p.lags[s.index - 1]
        found.append(
            Remark(
                s.nodes[0],
                "did",
                f"stage {s.index} starts here: {_count(len(s.receives), 'value')}, {size(s.boundary_bytes)}, "
                + (f"{lag * 1e6:.4g} us on their way" if lag else "on the same card"),
            )
        )
        passed = [v for v in s.receives if v in s.sends]
        if passed:
            found.append(Remark(passed[0], "did", f"passed on by stage {s.index}, one of {len(passed)}"))
    for name, at in shared.items():
        ranks = {stages[s].rank for s in at}
        cost = "on one rank" if len(ranks) == 1 else "its gradients are added up over ranks once a step"
        found.append(Remark(name, "did", f"stages {', '.join(map(str, at))} read it: {cost}"))
    for s in stages:
        if s.recompute:
            found.append(
                Remark(s.nodes[0], "did", f"stage {s.index} computes its forward again: {size(s.work_bytes)} less")
            )
    found += [
        Remark(
            n.name,
            "did",
            f"its statistics are those of {p.microbatches} micro-batches, one after the other, not of the batch",
        )
        for n in laid.nodes
        if packet(n) == "batch_norm" and arguments(n).get("training") is True
    ][:1]
    heavy = int(max(range(len(laid.nodes)), key=lambda i: line.total[i + 1] - line.total[i]))
    share = float(line.total[heavy + 1] - line.total[heavy]) / float(line.total[-1])
    if share > 1 / p.ranks:
        found.append(
            Remark(
                laid.nodes[heavy].name,
                "skipped",
                f"this one call is {share:.0%} of all work, more than a rank's share of {1 / p.ranks:.0%}: no cut can "
                f"balance it; divide it (tensor parallelism, a chunked loss) or take fewer ranks",
            )
        )
    return found


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
