"""Recording compilations: ``dsc.trace``, ``DSC_TRACE``, and torch's structured logs.  ``dsc.debug.trace`` has the schema."""

from __future__ import annotations

import itertools
import json
import os
import platform
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from dsc import blame, compiler, defaults, errors, manager, passlist, text
from dsc.compilation import Compilation
from dsc.debug import graphs
from dsc.debug.trace import SCHEMA, SUFFIX
from dsc.manager import Pass, Remark, Report
from dsc.options import Options
from dsc.target import Target
from dsc.torch_shim import compile_id, recompile_reason, structured_logging, write_artifact
from dsc.watch import Watcher, watching

UNRECORDED = frozenset({"on_compile", "watchers", "trace", "target"})
"""Options that say nothing about what comes out, or that stand elsewhere."""


@contextmanager
def trace(path: str | Path) -> Iterator[Path]:
    """Record the compilations that start inside the block: into the file ``path``, written anew.

    If ``path`` is a folder, into a file of its own for every process, whose path the block is given.

        with dsc.trace("step.trace"):
            model(x).sum().backward()

    Raises:
        TraceUnwritable: the file cannot be written.
    """
    path = Path(path)
    writer = in_folder(path, os.getpid()) if path.is_dir() else Writer(path)
    try:
        if not path.is_dir():
            path.write_text("")
            writer.write(head())
    except OSError as why:
        raise errors.TraceUnwritable(str(path), why.strerror or str(why)) from why
    with watching(Tracer(writer)):
        yield writer.path


def listeners(options: Options) -> tuple[Watcher, ...]:
    """Who records because of an option or a variable."""
    found: tuple[Watcher, ...] = ()
    if options.trace is not None:
        found = (Tracer(in_folder(Path(options.trace), os.getpid())),)
    return (*found, Artifacts()) if structured_logging() else found


@dataclass
class Writer:
    """Appends events to one file, each by one write, so that processes which share it do not mix their lines."""

    path: Path
    broken: bool = False
    count: Iterator[int] = field(default_factory=itertools.count)

    def write(self, event: Mapping[str, object]) -> None:
        """One line.  If that fails, warns, and is silent from then on: the program goes on without a trace."""
        if self.broken:
            return
        line = (json.dumps(event) + "\n").encode()
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, line)
            finally:
                os.close(file)
        except OSError as why:
            self.broken = True
            sentence = errors.TraceUnwritable(str(self.path), why.strerror or str(why))
            warnings.warn(str(sentence), errors.DscWarning, stacklevel=2)

    def region(self) -> str:
        """A name that no other region in the file has."""
        return f"{os.getpid()}.{next(self.count)}"


@cache
def in_folder(folder: Path, process: int) -> Writer:
    """The one file of this process in the folder, which is made if need be."""
    writer = Writer(folder / f"{socket.gethostname()}-{process}-{time.time_ns()}{SUFFIX}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        writer.broken = True
        sentence = errors.TraceUnwritable(str(folder), why.strerror or str(why))
        warnings.warn(str(sentence), errors.DscWarning, stacklevel=2)
    writer.write(head())
    return writer


def head() -> dict[str, object]:
    """The first line of a file."""
    return {
        "event": "trace",
        "schema": SCHEMA,
        "dsc": version("dsc-compiler"),
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "pid": os.getpid(),
        "command": sys.argv,
        "time": time.time(),
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Tracer(Watcher):
    """Writes down all compilations that it hears of."""

    writer: Writer

    def captured(self, gm: GraphModule, inputs: Sequence[object]) -> Watcher:
        function = blame.first_line_of(gm)
        region = RegionTracer(self.writer, self.writer.region())
        region.tell(
            "captured",
            time=time.time(),
            compile=compile_id(),
            function=function,
            inputs=[text.type_text(x) for x in inputs],
            code=gm.code.strip(),
        )
        if (guard := recompile_reason()) is not None:
            region.tell("recompile", compile=compile_id(), function=function, guard=guard)
        return region


@dataclass(frozen=True)
class RegionTracer(Watcher):
    """Writes down what becomes of one Dynamo graph."""

    writer: Writer
    region: str
    last: dict[str, str] = field(default_factory=dict)
    """The text of each graph as it was written last."""

    def tell(self, event: str, **what: object) -> None:
        self.writer.write({"event": event, "region": self.region} | what)

    def graph(self, stage: str, gm: GraphModule) -> dict[str, object]:
        """The graph as it is now; null where it is as before."""
        now = text.show(gm.graph)
        same = self.last.get(stage) == now
        self.last[stage] = now
        packed = None if same else graphs.pack(gm)
        return {"graph": stage, "nodes": len(gm.graph.nodes), "text": None if same else now, "packed": packed}

    def begins(self, options: Options, target: Target) -> None:
        joint, graph = passlist.chosen(options.passes, defaults.joint(target, options))
        self.tell(
            "options",
            target=target.name,
            options=recorded(options),
            joint=manager.spell(joint),
            graph=manager.spell(graph),
        )

    def traced(self, stage: str, gm: GraphModule) -> None:
        self.last.pop(stage, None)
        self.tell("traced", **self.graph(stage, gm))

    def after(self, stage: str, p: Pass, gm: GraphModule, report: Report, seconds: float) -> None:
        self.tell(
            "pass",
            name=p.name,
            seconds=seconds,
            changed=report.changed,
            remarks=rows(report.remarks),
            numbers=dict(report.numbers),
            **self.graph(stage, gm) | {"pass": manager.spell([p])},
        )

    def failed(self, stage: str, p: Pass, gm: GraphModule, error: Exception) -> None:
        node = blame.node_of(error, gm)
        self.tell(
            "failed",
            graph=stage,
            name=p.name,
            error=compiler.first_line(error),
            node=node.name if node is not None else "",
            line=blame.line_of(node) if node is not None else "",
        )

    def compiled(self, compilation: Compilation) -> None:
        program = compilation.program
        self.tell(
            "compiled",
            graph=compilation.kind,
            seconds=compilation.seconds,
            numbers=dict(program.numbers),
            remarks=rows(dict(compilation.reports)["link"].remarks),
            kernels=[k.name for k in program.kernels],
            source=program.source,
            code=program.code,
        )

    def left(self, stage: str, why: str) -> None:
        self.tell("left", graph=stage, why=why)


@dataclass(frozen=True)
class Artifacts(Watcher):
    """Puts every graph into torch's structured logs, where ``tlparse`` shows it beside what Dynamo did."""

    def captured(self, gm: GraphModule, inputs: Sequence[object]) -> Watcher:
        if (guard := recompile_reason()) is not None:
            write_artifact("dsc_recompile", lambda: guard)
        return self

    def traced(self, stage: str, gm: GraphModule) -> None:
        write_artifact(f"dsc_{stage}_0_trace", lambda: text.show(gm.graph))

    def after(self, stage: str, p: Pass, gm: GraphModule, report: Report, seconds: float) -> None:
        remarks = "".join(f"{r.verdict:8}{r.node}: {r.why}\n" for r in report.remarks)
        write_artifact(
            f"dsc_{stage}_{p.name}", lambda: f"{p.name}: {seconds:.3f} s\n\n{text.show(gm.graph)}\n{remarks}"
        )

    def failed(self, stage: str, p: Pass, gm: GraphModule, error: Exception) -> None:
        write_artifact(f"dsc_{stage}_{p.name}_failed", lambda: f"{type(error).__name__}: {error}")

    def compiled(self, compilation: Compilation) -> None:
        write_artifact(f"dsc_{compilation.kind}_program", lambda: compilation.program.source)
        write_artifact(f"dsc_{compilation.kind}_kernels", lambda: compilation.program.code)

    def left(self, stage: str, why: str) -> None:
        write_artifact(f"dsc_{stage}_left", lambda: why)


def recorded(options: Options) -> dict[str, Any]:
    """The options that differ from their defaults, as JSON has them."""
    default = Options()
    changed = {f.name: getattr(options, f.name) for f in fields(Options) if f.name not in UNRECORDED}
    changed = {k: v for k, v in changed.items() if v != getattr(default, k)}
    if isinstance(passes := changed.get("passes"), tuple):
        changed["passes"] = ",".join(p if isinstance(p, str) else manager.spell([p]) for p in passes)
    return {k: v if isinstance(v, (str, int, float, bool)) else str(v) for k, v in changed.items()}


def rows(remarks: Sequence[Remark]) -> list[list[str]]:
    return [[r.node, r.verdict, r.why] for r in remarks]
