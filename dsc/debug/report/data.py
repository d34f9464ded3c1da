"""What a report shows, as JSON: passes with their differences, drawn graphs, memory, launches, kernels, sources."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from dsc import __version__, liveness, manager
from dsc.codegen.cpp_nest import PRELUDE
from dsc.compilation import Compilation
from dsc.debug import diff, kernels, launches, origin, passtable
from dsc.debug.capture import Region, Session, Stage
from dsc.debug.dump import inputs, layout, picture, svg
from dsc.debug.dump.collapse import collapse
from dsc.debug.dump.picture import Box, Picture
from dsc.debug.launches import Launch
from dsc.debug.passtable import LINKED, Row
from dsc.target import Target

Json = dict[str, Any]
LONGEST_SOURCE = 400_000
"""Characters of a user's file that still goes into the page."""
LARGEST_DRAWN = 6000
"""Boxes of a graph that is still drawn with every layer."""


def of_session(session: Session) -> Json:
    """Everything that the page shows."""
    rows = passtable.rows(session)
    step = passtable.total(session, rows)
    run = launches.of_session(session)
    graphs, pictures = all_graphs(session)
    return {
        **head(session),
        "step": summary(step) if step else None,
        "left": [{"graph": graph, "why": why} for r in session.regions for graph, why in r.left],
        "passes": [_pass(session, row, pictures) for row in rows],
        "graphs": graphs,
        "memory": memory(session),
        "launches": [_launch(x) for x in run],
        "kernels": [_kernel(k) for k in kernels.listed(session)],
        "sources": sources(run),
    }


def of_stage(session: Session, region: int, stage: Stage) -> Json:
    """One graph alone."""
    return {**head(session), "graphs": [drawn(session, region, stage, expanded=True)]}


def head(session: Session) -> Json:
    return {
        "model": session.model.name,
        "versions": f"dsc {__version__}, torch {metadata.version('torch')}",
        "seconds": session.seconds,
        "regions": len(session.regions),
        "target": target(session.target),
    }


def target(t: Target) -> Json:
    return {"name": t.name, "kind": t.kind, "bandwidth": t.bandwidth, "memory": t.memory, "peak": dict(t.peak)}


def summary(step: Row) -> Json:
    return {
        "modelled": step.modelled,
        "kernels": step.kernels,
        "aten": step.aten_calls,
        "bytes": step.bytes,
        "flops": step.flops,
        "peak": step.peak,
        "passes": step.seconds,
    }


# --- passes


def _pass(session: Session, row: Row, pictures: dict[tuple[int, str, str], int]) -> Json:
    stage, before = _stages(session.regions[row.region], row)
    report = stage.report if stage else None
    made = next((p for p in session.regions[row.region].programs if p.kind == row.graph), None)
    return {
        "region": row.region,
        "graph": row.graph,
        "name": row.name,
        "options": manager.spell([stage.applied]) if stage and stage.applied else "",
        "about": (type(stage.applied).__doc__ or "").strip() if stage and stage.applied else "",
        "seconds": row.seconds,
        "nodes": row.nodes,
        "before": row.nodes_before,
        "kernels": row.kernels,
        "aten": row.aten_calls,
        "bytes": row.bytes,
        "flops": row.flops,
        "peak": row.peak,
        "modelled": row.modelled,
        "numbers": [[k, v] for k, v in report.numbers] if report else [],
        "remarks": [[r.node, r.verdict, r.why] for r in row.remarks],
        "diff": [[line.kind, line.text] for line in diff.graphs(before.gm.graph, stage.gm.graph)]
        if stage and before
        else [],
        "program": made.program.source if made and row.name == LINKED else "",
        "picture": pictures.get((row.region, row.graph, row.name), -1),
    }


def _stages(region: Region, row: Row) -> tuple[Stage | None, Stage | None]:
    """The stage of a row, and the one before it."""
    stages = region.of(row.graph)
    for k, s in enumerate(stages):
        if s.name == row.name:
            return s, stages[k - 1] if k else None
    return None, None


# --- graphs


def all_graphs(session: Session) -> tuple[list[Json], dict[tuple[int, str, str], int]]:
    """Every stage that changed something, the last one of a graph with all layers; and which picture shows a stage."""
    out: list[Json] = []
    shown: dict[tuple[int, str, str], int] = {}
    for i, region in enumerate(session.regions):
        for graph in dict.fromkeys(s.graph for s in region.stages):
            stages = region.of(graph)
            last = max(k for k, s in enumerate(stages) if k == 0 or (s.report is not None and s.report.changed))
            for k, stage in enumerate(stages):
                if k == 0 or stage.report is None or stage.report.changed:
                    out.append(drawn(session, i, stage, expanded=k == last))
                shown[i, graph, stage.name] = len(out) - 1
            shown[i, graph, LINKED] = len(out) - 1
    return out, shown


def drawn(session: Session, region: int, stage: Stage, expanded: bool) -> Json:
    """A stage with repeated layers drawn once, and, where they are many or it is wanted, with all."""
    whole = picture.of(session, session.regions[region], stage)
    short = collapse(whole)
    repeats = len(short.boxes) < len(whole.boxes)
    shown = whole if expanded and len(whole.boxes) <= LARGEST_DRAWN else short
    return {
        "region": region,
        "graph": stage.graph,
        "stage": stage.name,
        "boxes": {b.id: _box(b) for b in shown.boxes},
        "short": _svg(short),
        "all": _svg(whole) if repeats and shown is whole else None,
    }


def _svg(p: Picture) -> Json:
    placed = layout.lay_out(p)
    return {"svg": svg.body(placed), "width": placed.width, "height": placed.height, "boxes": len(placed.boxes)}


def _box(b: Box) -> Json:
    found: Json = {"op": b.op, "text": b.text, "decision": b.decision, "bytes": b.bytes, "made": b.made}
    optional = {
        "title": b.title if b.title != b.op else "",
        "module": ".".join(b.module),
        "kernel": b.kernel,
        "keep": b.keep,
        "line": [b.line.file, b.line.line, b.line.code, b.line.place] if b.line else None,
        "flops": b.flops,
        "seconds": b.seconds,
        "count": b.count if b.count > 1 else 0,
    }
    return found | {k: v for k, v in optional.items() if v}


# --- memory


def memory(session: Session) -> list[Json]:
    """Of each region the whole step, where it has a forward and a backward; else each graph."""
    out = []
    for i, region in enumerate(session.regions):
        programs = {p.kind: p for p in region.programs}
        names = _meanings(session, region)
        if {"forward", "backward"} <= programs.keys():
            ahead, behind = programs["forward"], programs["backward"]
            out.append(_profile(i, "forward and backward", step_profile(region, ahead, behind), _count(ahead), names))
            continue
        out += [
            _profile(i, kind, liveness.profile(p.gm, pooled=True, refused=launches.refused(p)), 0, names)
            for kind, p in programs.items()
        ]
    return out


def step_profile(region: Region, ahead: Compilation, behind: Compilation) -> liveness.Profile:
    saved = liveness.saved_places(region.of("forward")[0].gm, region.of("backward")[0].gm)
    refused = launches.refused(ahead), launches.refused(behind)
    return liveness.profile_step(ahead.gm, behind.gm, saved, pooled=True, refused=refused)


def _count(program: Compilation) -> int:
    """Steps of a program."""
    return len(liveness.profile(program.gm, refused=launches.refused(program)).timeline)


def _meanings(session: Session, region: Region) -> dict[str, str]:
    """Input of the region's graphs -> the parameter or argument that it is."""
    known = inputs.names(region.dynamo, region.inputs, session.model.module)
    places = [n for s in region.stages for n in s.gm.graph.find_nodes(op="placeholder")]
    return {n.name: meaning for n in places if (meaning := inputs.meaning(n, known))}


def _profile(region: int, title: str, p: liveness.Profile, split: int, names: Mapping[str, str]) -> Json:
    """Values are [name, bytes, first step, last step, kind, meaning]."""
    return {
        "region": region,
        "title": title,
        "names": [name for name, _ in p.timeline],
        "bytes": [n for _, n in p.timeline],
        "peak": p.peak,
        "at": p.at,
        "split": split,
        "values": [[v.name, v.nbytes, v.first, v.last, v.kind, names.get(v.name, "")] for v in p.values if v.nbytes],
    }


# --- launches, kernels, sources


def _launch(x: Launch) -> Json:
    return {
        "region": x.region,
        "graph": x.graph,
        "name": x.name,
        "group": x.group or "",
        "nodes": [n.name for n in x.nodes],
        "ops": x.ops,
        "flops": x.flops,
        "bytes": x.bytes,
        "seconds": x.seconds,
        "bound": x.bound,
    }


def _kernel(k: kernels.Listed) -> Json:
    return {
        "region": k.region,
        "graph": k.graph,
        "name": k.name,
        "launches": k.launches,
        "bytes": k.bytes,
        "traffic": dict(k.traffic),
        "nodes": [list(n) for n in k.nodes],
        "source": k.source.removeprefix(PRELUDE).strip("\n"),
        "language": "python" if k.schedule else "cpp",
    }


def sources(run: Iterable[Launch]) -> list[Json]:
    """The user's files that launches come from, with the modelled seconds of each line: a launch shares its time out
    evenly among its nodes.
    """
    spent: dict[str, dict[int, list[float]]] = {}
    places: dict[str, str] = {}
    for i, x in enumerate(run):
        frames = [f for n in x.nodes if (f := origin.of(n).frame) is not None]
        for f in frames:
            places[f.file] = f.place.rpartition(":")[0]
            line = spent.setdefault(f.file, {}).setdefault(f.line, [0.0])
            line[0] += x.seconds / len(frames)
            if line[-1] != i or len(line) == 1:
                line.append(i)
    out = []
    for file, lines in spent.items():
        text = "".join(linecache.getlines(file))
        if 0 < len(text) <= LONGEST_SOURCE:
            found = [[number, s[0], [int(k) for k in s[1:]]] for number, s in sorted(lines.items())]
            out.append({"file": file, "place": places[file], "text": text, "lines": found})
    return sorted(out, key=lambda f: -sum(line[1] for line in f["lines"]))
