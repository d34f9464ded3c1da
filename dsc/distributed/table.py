"""A pipeline plan as text: a row a stage, the timeline, what was considered beside it, and why."""

from __future__ import annotations

from collections.abc import Iterator

from dsc.distributed.plan import PipelinePlan
from dsc.distributed.topology import words
from dsc.errors import size
from dsc.passes.solve.pipeline_simulate import Pipeline, Timeline, simulate

Row = tuple[str, ...]
GLYPHS = {"F": "▆", "I": "▃", "W": "▁", "B": "▄"}


def heading(plan: PipelinePlan) -> str:
    """What it is, and its numbers, in two lines."""
    tensor = plan.degrees.tensor * plan.degrees.data
    return (
        f"{plan.model} on {plan.cluster}: {words(plan.degrees)}, {plan.microbatches} micro-batches of "
        f"{plan.microbatch_size}, {plan.schedule} schedule on {plan.split} split\n"
        f"{plan.seconds * 1e3:.4g} ms a step (modelled), {plan.bubble:.1%} of the ranks' time is no work, lower bound "
        f"{plan.bound * 1e3:.4g} ms; at most {size(max(plan.peaks))} of {size(plan.limit)} a card"
        + (f"; {tensor * plan.ranks} cards" if tensor > 1 else "")
    )


def rows(plan: PipelinePlan) -> list[Row]:
    """Rank, stage, first and last call, milliseconds of F, I, W and sending, bytes that arrive, parameters, activations."""
    found: list[Row] = []
    for rank in range(plan.ranks):
        for s in plan.stages_of(rank):
            again = " again" if s.recompute else ""
            found.append(
                (
                    str(rank),
                    str(s.index),
                    f"{s.nodes[0]} .. {s.nodes[-1]}" if s.nodes else "nothing",
                    f"{s.forward * 1e3:.4g}",
                    f"{s.dgrad * 1e3:.4g}{again}",
                    f"{s.wgrad * 1e3:.4g}",
                    f"{s.send * 1e3:.3g}",
                    size(s.boundary_bytes),
                    size(s.static_bytes),
                    size(s.activation_bytes),
                )
            )
    return found


COLUMNS = ("rank", "stage", "calls", "F ms", "I ms", "W ms", "send ms", "arrives", "static", "a batch")
RANK_COLUMNS = ("rank", "card", "work ms", "no work", "peak", "of limit")
RIVAL_COLUMNS = ("split", "schedule", "ms", "no work", "peak", "")


def rank_rows(plan: PipelinePlan) -> list[Row]:
    """Rank, card, milliseconds of work, share without, peak, share of the limit."""
    p = pipeline_of(plan)
    found: list[Row] = [
        (
            str(r),
            str(plan.devices[r]),
            f"{p.busy(r) * 1e3:.4g}",
            f"{1 - p.busy(r) / plan.seconds:.1%}" if plan.seconds else "-",
            size(plan.peaks[r]),
            f"{plan.peaks[r] / plan.limit:.0%}",
        )
        for r in range(plan.ranks)
    ]
    return found


def rival_rows(plan: PipelinePlan, count: int = 8) -> list[Row]:
    """The fastest others, each schedule once for each split; the plan itself first."""
    found: list[Row] = [
        ("this plan", plan.schedule, f"{plan.seconds * 1e3:.4g}", f"{plan.bubble:.1%}", size(max(plan.peaks)), "")
    ]
    seen = set()
    for r in plan.rivals:
        if (r.split, r.schedule) in seen or len(found) > count:
            continue
        seen.add((r.split, r.schedule))
        note = "" if r.fits else "does not fit"
        found.append((r.split, r.schedule, f"{r.seconds * 1e3:.4g}", f"{r.bubble:.1%}", size(r.peak), note))
    return found


def timeline(plan: PipelinePlan, width: int = 100) -> list[str]:
    """A line a rank: forwards high, dgrads in the middle, wgrads low, nothing where it waits."""
    line = simulated(plan)
    found = []
    for rank, (order, spans) in enumerate(zip(plan.orders, line.spans)):
        cells = [" "] * width
        for (_, kind, _), (start, end) in zip(order, spans):
            first = int(start / line.seconds * width)
            for x in range(first, max(first + 1, round(end / line.seconds * width))):
                if x < width:
                    cells[x] = GLYPHS[kind]
        found.append(f"{rank:>3} {''.join(cells)}")
    return found


def pipeline_of(plan: PipelinePlan) -> Pipeline:
    """The plan's numbers as the simulator takes them."""
    s = plan.stages
    return Pipeline(
        plan.ranks,
        plan.microbatches,
        tuple(t.rank for t in s),
        tuple(t.forward for t in s),
        tuple(t.dgrad for t in s),
        tuple(t.wgrad for t in s),
        tuple(t.send for t in s[:-1]),
        tuple(float(t.activation_bytes) for t in s),
        tuple(float(t.kept_bytes) for t in s),
        work=tuple(float(t.work_bytes) for t in s),
    )


def simulated(plan: PipelinePlan) -> Timeline:
    """When each action runs."""
    return simulate(pipeline_of(plan), plan.orders)


def remarks(plan: PipelinePlan) -> Iterator[str]:
    for r in plan.remarks:
        yield f"{r.node}: {r.why}" if r.verdict == "did" else f"not {r.node}: {r.why}"


def text(plan: PipelinePlan) -> str:
    """All of it as plain text."""
    parts = [heading(plan), _table(COLUMNS, rows(plan)), _table(RANK_COLUMNS, rank_rows(plan))]
    parts += ["\n".join(timeline(plan)), _table(RIVAL_COLUMNS, rival_rows(plan)), "\n".join(remarks(plan))]
    return "\n\n".join(parts) + "\n"


def _table(names: Row, cells: list[Row]) -> str:
    widths = [max(len(row[i]) for row in [names, *cells]) for i in range(len(names))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in [names, *cells]]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths).rstrip(), *lines[1:]])
