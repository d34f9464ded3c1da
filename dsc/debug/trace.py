"""Traces: what compilations did, as lines of JSON that ``dsc.trace`` and ``DSC_TRACE`` write and the commands read.

Every line is one event, an object with ``event`` and, but for the first line, ``region``: the Dynamo graph that it is
about.  Fields that a reader does not know are to be ignored; ``schema`` grows when one that it knows changes.

    trace      first line of a file: schema (1), dsc, torch, triton, python, system, pid, command, time (s since 1970)
    captured   a graph from Dynamo: time, compile ("0/1"), function ("forward (model.py:12)"), inputs (types), code
    recompile  it was compiled before, for other inputs: compile, function, guard (what failed)
    options    target, options (those that differ from the default), joint and graph (pipelines as text)
    traced     an ATen graph before any pass: graph (joint, forward, backward, inference), nodes, text, packed
    pass       graph, pass (as text, with options), name, seconds, changed, remarks ([node, verdict, why]), numbers,
               nodes, text and packed (null: as before the pass)
    failed     a pass raised: graph, name, error, node, line
    compiled   a program: graph, seconds, numbers, remarks (of linking), kernels (names), source (Python), code (of kernels)
    left       a graph stays with PyTorch: graph (dynamo: with eager), why

``text`` is canonical text (``dsc.text``), ``packed`` the graph itself (``dsc.debug.graphs.pack``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from dsc import compiler, errors, link, passlist
from dsc import target as targets
from dsc.compilation import Compilation
from dsc.debug import capture, graphs
from dsc.debug.source import Model
from dsc.manager import Pass, Remark, Report
from dsc.options import Options
from dsc.program import Program

SCHEMA = 1
SUFFIX = ".trace"


@dataclass(frozen=True)
class TracedStage:
    """One graph before any pass (``name`` is ``trace``) or after one."""

    graph: str
    name: str
    spelled: str
    """The pass with its options, as in a pipeline."""
    nodes: int
    text: str
    packed: str
    seconds: float = 0.0
    report: Report | None = None


@dataclass(frozen=True)
class TracedProgram:
    graph: str
    seconds: float
    numbers: Mapping[str, float]
    remarks: tuple[Remark, ...]
    kernels: tuple[str, ...]
    source: str
    code: str


@dataclass
class TracedRegion:
    """What became of one Dynamo graph."""

    name: str
    compile: str = ""
    function: str = ""
    inputs: tuple[str, ...] = ()
    code: str = ""
    guard: str = ""
    """Of a compilation that was not the first: what the inputs did not fit."""
    target: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    stages: list[TracedStage] = field(default_factory=list)
    programs: list[TracedProgram] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def of(self, graph: str) -> list[TracedStage]:
        """The stages of one graph, in order."""
        return [s for s in self.stages if s.graph == graph]

    @property
    def graphs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.graph for s in self.stages))

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.stages if s.graph == "joint") + sum(p.seconds for p in self.programs)


@dataclass(frozen=True)
class Trace:
    path: str
    head: Mapping[str, Any]
    """The first line."""
    regions: tuple[TracedRegion, ...]
    remarks: tuple[str, ...] = ()
    """What of the file could not be read."""


# --- reading


def read(path: str | Path) -> Trace:
    """A trace, or all traces of a folder as one.

    A last line that was cut off is left out, with a remark.

    Raises:
        BadTrace: there is no such file, or it is no trace, or one of a later schema.
    """
    path = Path(path)
    files = sorted(path.glob("*" + SUFFIX)) if path.is_dir() else [path]
    if not files:
        raise errors.BadTrace(str(path), f"the folder holds no {SUFFIX} file")
    read = [read_file(f) for f in files]
    regions = tuple(r for t in read for r in t.regions)
    return Trace(str(path), read[0].head, regions, tuple(r for t in read for r in t.remarks))


def read_file(path: Path) -> Trace:
    remarks: list[str] = []
    events = parsed(path, remarks)
    number, head = next(events, (1, {}))
    if head.get("event") != "trace" or not isinstance(head.get("schema"), int):
        raise errors.BadTrace(str(path), "its first line is not the head of one")
    if head["schema"] > SCHEMA:
        raise errors.BadTrace(str(path), f"it has schema {head['schema']}, and this version of dsc reads {SCHEMA}")
    regions: dict[str, TracedRegion] = {}
    for number, event in events:
        try:
            name = event.get("region")
            if name is not None:
                take(regions.setdefault(name, TracedRegion(name)), event)
        except (KeyError, TypeError, ValueError, AttributeError) as why:
            what = f"no {why}" if isinstance(why, KeyError) else str(why)
            raise errors.BadTrace(str(path), f"line {number} has {what}") from why
    return Trace(str(path), head, tuple(regions.values()), tuple(remarks))


def parsed(path: Path, remarks: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events with the numbers of their lines."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as why:
        raise errors.BadTrace(str(path), f"{(why.strerror or str(why)).lower()}") from why
    except UnicodeDecodeError as why:
        raise errors.BadTrace(str(path), "it is not text") from why
    last = len([*filter(None, lines)])
    for number, line in enumerate(filter(None, lines), 1):
        try:
            event = json.loads(line)
        except ValueError:
            if number == last > 1:
                remarks.append(f"{path}: line {number}, the last one, was cut off; the rest was read.")
                return
            raise errors.BadTrace(str(path), f"line {number} is not JSON") from None
        if not isinstance(event, dict):
            raise errors.BadTrace(str(path), f"line {number} is not an event")
        yield number, event


def take(region: TracedRegion, event: Mapping[str, Any]) -> None:
    """Add one event to what is known of its region."""
    match event["event"]:
        case "captured":
            region.compile, region.function = event["compile"], event["function"]
            region.inputs, region.code = tuple(event["inputs"]), event["code"]
        case "recompile":
            region.guard = event["guard"]
        case "options":
            region.target, region.options = event["target"], event["options"]
        case "traced":
            stage = TracedStage(event["graph"], capture.TRACED, "", event["nodes"], event["text"], event["packed"])
            region.stages.append(stage)
        case "pass":
            region.stages.append(passed(region, event))
        case "failed":
            region.failures.append(event["error"])
        case "compiled":
            numbers, linked = event["numbers"], remarks_of(event["remarks"])
            kernels, source, code = tuple(event["kernels"]), event["source"], event["code"]
            region.programs.append(
                TracedProgram(event["graph"], event["seconds"], numbers, linked, kernels, source, code)
            )
        case "left":
            region.left.append((event["graph"], event["why"]))


def passed(region: TracedRegion, event: Mapping[str, Any]) -> TracedStage:
    text, packed = event["text"], event["packed"]
    if text is None:
        before = region.of(event["graph"])[-1]
        text, packed = before.text, before.packed
    report = Report(event["changed"], remarks_of(event["remarks"]), tuple(event["numbers"].items()))
    return TracedStage(
        event["graph"], event["name"], event["pass"], event["nodes"], text, packed, event["seconds"], report
    )


def remarks_of(rows: list[list[str]]) -> tuple[Remark, ...]:
    return tuple(Remark(node, "did" if verdict == "did" else "skipped", why) for node, verdict, why in rows)


# --- as a session


def load(path: str | Path) -> capture.Session:
    """A trace as the session that the commands look into: graphs with their fake values, programs with their kernels.

    Of a trace with several targets, the regions for the first one.  The model itself is not in a trace.

    Raises:
        BadTrace, BadGraphFile: it cannot be read, or holds no compilation.
    """
    return session_of(read(path))


def session_of(trace: Trace) -> capture.Session:
    """``load`` of a trace that was read."""
    planned = [r for r in trace.regions if r.target]
    if not planned:
        raise errors.BadTrace(trace.path, "it holds no compilation")
    target, options = targets.find(planned[0].target), options_of(planned[0])
    unpack = cache(graphs.unpack)  # graphs that a pass left as they were are one
    regions = tuple(region_of(r, unpack) for r in planned if r.target == target.name)
    seconds = sum(r.seconds for r in planned)
    return capture.Session(
        Model(trace.path, nn.Identity(), ()), target, options, regions, seconds, capture.Outcome((), ())
    )


def options_of(region: TracedRegion) -> Options:
    known = {f.name for f in fields(Options)}
    return Options(**{k: v for k, v in region.options.items() if k in known} | {"target": region.target})


def region_of(traced: TracedRegion, unpack: Any) -> capture.Region:
    dynamo = GraphModule(nn.Module(), Graph())
    region = capture.Region(dynamo, traced.inputs, left=list(traced.left))
    for s in traced.stages:
        applied, report = (None, None) if s.name == capture.TRACED else (pass_of(s), s.report)
        region.stages.append(capture.Stage(s.graph, s.name, unpack(s.packed), applied, report, s.seconds))
    for p in traced.programs:
        region.programs.append(program_of(p, region.of(p.graph), options_of(traced)))
    return region


def pass_of(stage: TracedStage) -> Pass | None:
    """The pass with its options, if this installation has it."""
    try:
        return passlist.parse(stage.spelled)[0]
    except errors.DscError:
        return None


def program_of(p: TracedProgram, stages: list[capture.Stage], options: Options) -> Compilation:
    """The program as it was recorded; its kernels are made anew from the graph, where this version can."""
    gm = stages[-1].gm if stages else GraphModule(nn.Module(), Graph())
    reports = tuple((s.name, s.report) for s in stages if s.report is not None)
    reports = (*reports, ("link", Report(True, p.remarks)))
    try:
        program, bound, _ = link.link(compiler.copied(gm), options, p.graph)
    except Exception:  # of another version of dsc or torch: what was recorded can still be read
        program, bound = Program(p.source, {}, (), (), (), (), "aten", torch.device("cpu")), {}
    program = replace(program, source=p.source, code=p.code, numbers=p.numbers)
    return Compilation(p.graph, program, reports, gm, p.seconds, bound)
