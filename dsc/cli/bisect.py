"""``dsc bisect``: which pass, which rewrite and which node changes the numbers of a model."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsc.cli.app import FAILED, AsJson, Inference, Inputs, ModelName, TargetName, app, console, print_json, progress

if TYPE_CHECKING:
    from rich.console import Console

    from dsc.debug.bisect import Checked, Finding, Verdict

LINES = 30
"""Of a diff that is printed."""


class Against(StrEnum):
    eager = "eager"
    float64 = "float64"


Passes = Annotated[
    str | None, typer.Option("--passes", "-p", metavar="PIPELINE", help="Such as 'canonicalize,fuse{max_nodes=4}'.")
]
Tolerance = Annotated[
    float | None,
    typer.Option("--tolerance", min=0.0, help="Relative; default: by dtype (float32 1e-5), beside eager's own noise."),
]
AgainstWhat = Annotated[Against, typer.Option("--against", help="What the numbers should be.")]


@app.command()
def bisect(
    model: ModelName,
    inputs: Inputs = None,
    target: TargetName = None,
    passes: Passes = None,
    tolerance: Tolerance = None,
    against: AgainstWhat = Against.eager,
    inference: Inference = False,
    as_json: AsJson = False,
) -> None:
    """Find the first pass after which MODEL computes other numbers, then the rewrite, then the node.

    The graphs run here, on the CPU, with real inputs: after tracing, after every pass, and as programs with kernels.
    Exit code 0: no pass changes the numbers.  1: one does.  2: the model or an option cannot be used.
    """
    verdict = search(model, inputs, target, passes, tolerance, against, inference, None if as_json else progress())
    if as_json:
        print_json(as_data(verdict))
    else:
        show(verdict, console())
    if verdict.finding is not None:
        raise typer.Exit(FAILED)


def search(
    model: str,
    inputs: list[str] | None,
    target: str | None,
    passes: str | None,
    tolerance: float | None,
    against: Against,
    inference: bool,
    out: Console | None,
) -> Verdict:
    """The verdict on a model that is named on the command line; ``out`` hears of every stage."""
    from dsc.cli import source
    from dsc.debug.bisect import bisect as find
    from dsc.options import Options

    return find(
        source.find(model, inputs or ()),
        target or "cpu",
        Options(passes=passes),
        training=not inference,
        unit=tolerance,
        against=against.value,
        heard=(lambda step: out.print(stage(step), highlight=False, markup=False)) if out is not None else None,
    )


def stage(step: Checked) -> str:
    """``recompute     joint     same by construction``."""
    said = "DIFFERS" if step.difference is not None else step.how.replace("ran", "ok")
    return f"{step.pass_name:14} {step.graph:10} {said:22} {step.seconds:6.2f} s"


def show(verdict: Verdict, out: Console) -> None:
    """The verdict in words."""
    from dsc.debug import units

    name, found = verdict.session.model.name, verdict.finding
    if found is None:
        count = sum(c.how == "ran" for c in verdict.checked)
        what = "float64" if verdict.rule.against == "float64" else "eager"
        out.print(
            f"No pass changes the numbers of {name}: {count} graphs and programs give what {what} gives "
            f"({units.seconds(verdict.seconds)}).",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return
    for line in lines(found):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if found.diff:
        out.print()
        for line in found.diff.splitlines()[:LINES]:
            style = {"+": "green", "-": "red", ">": "red"}.get(line[:1], "")
            out.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def lines(found: Finding) -> list[str]:
    """What was found, from coarse to fine."""
    out = [f"{headline(found)}", f"  result   {found.result}: {found.difference.text}{times(found.difference.times)}"]
    if found.node:
        nodes = ", ".join(x.split(":")[0] for x in (found.changed or (found.node,)))
        out.append(
            f"  rewrite  {nodes}"
            + (f" for {', '.join(x.split(':')[0] for x in found.removed)}" if found.removed else "")
        )
        out += [f"           {r}" for r in found.remarks]
        d = found.node_difference
        out.append(f"  node     {found.node}" + (f": {d.text}{times(d.times)}" if d is not None else ""))
        if found.confirmed:
            out.append("           with what stood there before the pass, all results are right")
        if found.suspects:
            out.append(f"           or one that it reads and that is new: {', '.join(found.suspects)}")
    if found.module:
        out.append(f"  module   {found.module}")
    if found.line:
        out.append(f"  line     {found.line}")
    return out


def headline(found: Finding) -> str:
    match found.pass_name:
        case "trace":
            return "The traced graph differs from eager: PyTorch's own tracing is to blame, or a model that is not deterministic."
        case "split":
            return f"The {found.graph} graph differs from the joint one: its split is to blame."
        case "link":
            return f"The kernels of the {found.graph} graph change the numbers."
        case _:
            return f"Pass {found.pass_name!r} changes the numbers of the {found.graph} graph."


def times(ratio: float) -> str:
    return f" ({ratio:.3g} times what is allowed)" if ratio else ""


def as_data(verdict: Verdict) -> dict[str, Any]:
    """For programs."""
    return {
        "model": verdict.session.model.name,
        "target": verdict.session.target.name,
        "against": verdict.rule.against,
        "seconds": verdict.seconds,
        "stages": [
            {
                "region": c.region,
                "graph": c.graph,
                "pass": c.pass_name,
                "how": c.how,
                "seconds": c.seconds,
                "difference": asdict(c.difference) if c.difference is not None else None,
            }
            for c in verdict.checked
        ],
        "finding": asdict(verdict.finding) if verdict.finding is not None else None,
    }
