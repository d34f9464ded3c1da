"""Keep the peak of a train step within a budget: what to save for the backward, and what to compute again there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from torch.fx import GraphModule

from dsc import narrow, tiers
from dsc import plan as plans
from dsc.errors import BadPlan, InfeasibleBudget, size
from dsc.manager import Pass, Remark, Report
from dsc.notes import Keep
from dsc.passes import memory_compress
from dsc.passes.memory_apply import rebuilt
from dsc.passes.memory_offload import Away, leave_notes
from dsc.passes.memory_plan import Search
from dsc.passes.memory_problem import Extracted, extract
from dsc.passes.memory_program import Program
from dsc.plan import Decision, MemoryPlan
from dsc.target import Target
from dsc.tiers import Tier


@dataclass(frozen=True)
class Memory(Pass):
    """On a joint graph, in place of ``recompute``: the fastest plan found whose peak is at most ``budget`` bytes.

    1. The peak is that of the whole step on the program as it will run: inputs, parameters, gradients, saved values,
       temporaries, and ``held`` bytes of something else, such as the optimizer's state.
    2. If the plan of ``recompute`` fits, it is kept.  Else the portfolio is full checkpointing, minimum cuts of the whole
       forward, and a dynamic program over a chain of blocks that may run parts of the forward several times.
    3. What runs again does so just before its reader.  A cheap value is computed for each reader anew.
    4. Never run again: collectives, calls with effects, operators of other libraries, sums whose order CUDA leaves open,
       and what reads an input that the graph writes.  Random calls run again from the state that their generator had.
    5. Checkpoint tags bind: what a region makes inside is not saved, what a policy must save is.
    6. With ``offload``, saved values may leave the device's memory after the forward's last use of them, on a stream of
       their own, and come back just before the backward reads them: large ones without holes, the first made first.
    7. With ``compress``, saved values of wider floats may be kept in fewer bits for the backward, the cheapest a byte first,
       and no more of them than the budget asks for.  That changes gradients.  What a policy must save is left as it is.
    8. ``file``: a plan for this very graph that lies there is applied unchanged; else the new one is put there.

    Raises:
        InfeasibleBudget: no plan was found that fits, with the smallest peak that was.
    """

    name: ClassVar[str] = "memory"
    gives: ClassVar[frozenset[str]] = frozenset({"keep"})
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"

    budget: int = 0
    held: int = 0
    file: str | None = None
    fused: bool = True
    """Whether kernels will be fused; else every call runs on ATen."""
    offload: str | None = None
    """Where saved values may be moved for a while: ``cpu``, or ``nvme:FOLDER``."""
    compress: str | None = None
    """In which format saved values may be kept: ``bf16``, ``fp8`` (e4m3) or ``e5m2``."""

    def run(self, gm: GraphModule, target: Target) -> Report:
        key = plans.fingerprint(gm)
        found = extract(gm, target, self.fused)
        known = plans.read(Path(self.file)).get(key) if self.file else None
        tier = tiers.parse(self.offload) if self.offload else None
        format = narrow.parse(self.compress) if self.compress else None
        plan = known or find(gm, found, target, self.budget, self.held, self.fused, tier, format)
        apply(gm, found, plan)
        if self.file and known is None:
            plans.add(Path(self.file), key, plan)
        why = f"nothing kept as {format}: no large saved value is wider, or a plan without is faster"
        unused = (Remark("", "skipped", why),) if format and not plan.compressed else ()
        return Report(True, remarks(plan) + unused, numbers(plan))


def find(
    gm: GraphModule,
    found: Extracted,
    target: Target,
    budget: int,
    held: int = 0,
    fused: bool = True,
    tier: Tier | None = None,
    format: str | None = None,
) -> MemoryPlan:
    """The fastest plan within the budget."""
    search = Search(gm, found, target, fused, tier, format)
    program = search.within(budget - held) or search.least()  # which looks further down, and may find what fits
    if program.peak + held > budget:
        raise infeasible(search, program, budget, held)
    return described(search, program, budget, held)


def described(search: Search, program: Program, budget: int, held: int) -> MemoryPlan:
    """A program as a plan."""
    found = search.found
    return MemoryPlan(
        search.target.name,
        budget,
        held,
        program.peak + held,
        program.seconds,
        search.default.peak + held,
        search.default.seconds,
        program.origin,
        tuple(found.values[v].name for v in program.schedule.saved),
        tuple(found.nodes[o].name for o in program.schedule.script),
        tuple(decisions(found, program, search.format)),
        str(search.tier) if program.away else "",
        tuple((a.name, a.lands, a.fetched) for a in program.away),
        (search.format or "") if program.short else "",
        program.short,
    )


def decisions(found: Extracted, program: Program, format: str | None = None) -> list[Decision]:
    """What becomes of the values that the backward reads, the largest first."""
    problem, saved = found.problem, set(program.schedule.saved)
    away = {a.name for a in program.away}
    out = []
    for v in sorted({v for op in problem.ops if not op.forward for v, _ in op.reads} | saved):
        maker = problem.values[v].maker
        if maker >= 0 and problem.ops[maker].forward:
            name = found.values[v].name
            keep: Keep = "recompute" if v not in saved else "offload" if name in away else "save"
            if name not in program.short or format is None:
                out.append(Decision(name, problem.values[v].nbytes, keep))
                continue
            keep = "offload" if name in away else "compress"
            stored = memory_compress.short_bytes(found.values[v], format)
            out.append(Decision(name, problem.values[v].nbytes, keep, format, stored))
    return sorted(out, key=lambda d: -d.nbytes)


def apply(gm: GraphModule, found: Extracted, plan: MemoryPlan) -> None:
    """Rewrite the joint graph as planned.

    Raises:
        BadPlan: it names what is not in the graph.
    """
    values = {n.name: n for n in found.values}
    calls = {n.name: n for n in found.nodes}
    if lost := [n for n in plan.saved if n not in values] + [n for n in plan.script if n not in calls]:
        raise BadPlan("this graph", f"it has no node {lost[0]!r}")
    new = rebuilt(gm, found, [values[n] for n in plan.saved], [calls[n] for n in plan.script])
    gm.graph = new.graph
    ahead = {n.name: n for n in gm.graph.nodes}
    for name in plan.compressed:
        memory_compress.leave_notes(ahead[name], narrow.parse(plan.format, "memory_plan"))
    for name, lands, fetched in plan.away:
        leave_notes(ahead[name], Away(name, lands, fetched), tiers.parse(plan.tier, "memory_plan"))


def infeasible(search: Search, least: Program, budget: int, held: int) -> InfeasibleBudget:
    """The error that names the smallest peak, its price, and what dominates it."""
    kinds = sorted(least.profile.by_kind(least.profile.at).items(), key=lambda kv: -kv[1])
    top = ", ".join(f"{kind} {size(n)}" for kind, n in kinds[:3])
    if held:
        top += f", held elsewhere {size(held)}"
    largest = least.profile.largest(1)[0]
    extra = least.seconds / search.default.seconds - 1
    reason = (
        f"the smallest peak found takes {extra:.0%} more time and is made of {top}, "
        f"with {largest.name!r} of {size(largest.nbytes)} as its largest tensor"
    )
    return InfeasibleBudget(budget, least.peak + held, reason)


def remarks(plan: MemoryPlan, count: int = 10) -> tuple[Remark, ...]:
    """The plan in words, and the largest values with what becomes of them."""
    head = (
        f"peak {size(plan.peak)} of {size(plan.budget)}, {plan.extra:+.1%} time by the {plan.origin} plan "
        f"(without a budget: {size(plan.default_peak)})"
    )
    verdicts = {
        "save": "saved",
        "recompute": "computed again",
        "offload": "moved away and back",
        "compress": "compressed",
    }
    shown = [d for i, d in enumerate(plan.decisions) if i < count or d.format]
    lines = [Remark(d.name, "did", f"{size(d.nbytes)} {verdicts[d.keep]}{shortened(d)}") for d in shown]
    return (Remark("", "did", head), *lines)


def shortened(d: Decision) -> str:
    return f" as {d.format}, {size(d.stored)}" if d.format else ""


def numbers(plan: MemoryPlan) -> tuple[tuple[str, float], ...]:
    return (
        ("planned peak", float(plan.peak)),
        ("default peak", float(plan.default_peak)),
        ("planned seconds", plan.seconds),
        ("default seconds", plan.default_seconds),
        ("bytes away", float(sum(moved(d) for d in plan.decisions if d.keep == "offload"))),
        ("bytes compressed", float(sum(d.nbytes for d in plan.decisions if d.format))),
    )


def moved(d: Decision) -> int:
    """Bytes of a value as it is kept between forward and backward."""
    return d.stored if d.format else d.nbytes
