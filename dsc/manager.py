"""What a pass is, and how a list of them runs."""

from __future__ import annotations

import json
import re
import time
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, Protocol

from torch.fx import GraphModule

from dsc import blame
from dsc import verify as legal
from dsc.errors import BadOption, BadPassOrder, PassFailed, UnknownOption, UnknownPass
from dsc.target import Target


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing that a pass did or chose not to do, and why, with numbers."""

    node: str
    verdict: Literal["did", "skipped"]
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """What one run of a pass did.  ``numbers`` are named results, such as bytes at the peak before and after."""

    changed: bool
    remarks: tuple[Remark, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Pass(ABC):
    """A named rewrite of one graph, in place.  The fields are its options, the docstring is its specification."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    """Fields of Notes that it reads."""
    gives: ClassVar[frozenset[str]] = frozenset()
    """Fields of Notes that it writes."""
    retraces: ClassVar[bool] = False
    """Whether it builds the graph anew, which loses notes."""
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "graph"
    """The joint graph of forward and backward before it is split, or each graph that becomes a program, or both."""

    on_inference: ClassVar[bool] = False
    """Whether a pass on joint graphs runs on inference graphs too, before all others."""

    @abstractmethod
    def run(self, gm: GraphModule, target: Target) -> Report:
        """Rewrite ``gm.graph``.  No need to recompile: the pipeline does if the report says that something changed."""


class Observer(Protocol):
    """Something that watches passes: a timer, a recorder."""

    def before(self, p: Pass, gm: GraphModule) -> None: ...
    def after(self, p: Pass, gm: GraphModule, report: Report, seconds: float) -> None: ...
    def failed(self, p: Pass, gm: GraphModule, error: Exception) -> None: ...


@dataclass(frozen=True)
class PassPipeline:
    """Passes in an order that makes sense.

    1. A pass that needs a note stands after each pass that gives it.  If none gives it, the note is undecided: legal.
    2. A pass that retraces stands before every pass that gives a note, since retracing loses them.
    """

    passes: tuple[Pass, ...]
    observers: tuple[Observer, ...] = ()
    verify: bool = True

    def __post_init__(self) -> None:
        for i, p in enumerate(self.passes):
            for giver in self.passes[i + 1 :]:
                if late := sorted(p.needs & giver.gives - p.gives):
                    raise BadPassOrder(
                        p.name,
                        f"needs {late[0]!r} but stands before {giver.name!r}, which gives it",
                        f"move it after {giver.name!r}",
                    )
            for giver in self.passes[:i] if p.retraces else ():
                if giver.gives:
                    raise BadPassOrder(
                        p.name,
                        f"retraces the graph, which loses the notes of {giver.name!r}",
                        f"move it before {giver.name!r}",
                    )

    def run(self, gm: GraphModule, target: Target) -> tuple[tuple[str, Report], ...]:
        """Run every pass on ``gm``, in place, and give their reports by name."""
        reports: list[tuple[str, Report]] = []
        facts = legal.promises(gm) if self.verify and self.passes else None
        for p in self.passes:
            for o in self.observers:
                o.before(p, gm)
            start = time.perf_counter()
            try:
                report, facts = self._run_one(p, gm, target, facts)
            except Exception as error:
                for o in self.observers:
                    o.failed(p, gm, error)
                node = blame.node_of(error, gm)
                named, line = (node.name, blame.line_of(node)) if node is not None else ("", "")
                raise PassFailed(p.name, error, tuple(name for name, _ in reports), named, line) from error
            seconds = time.perf_counter() - start
            for o in self.observers:
                o.after(p, gm, report, seconds)
            reports.append((p.name, report))
        return tuple(reports)

    def _run_one(
        self, p: Pass, gm: GraphModule, target: Target, facts: legal.Promises | None
    ) -> tuple[Report, legal.Promises | None]:
        """The report, and what holds after the pass; ``facts``: what held before it, if the pipeline checks."""
        report = p.run(gm, target)
        if facts is not None:
            where = f"after pass {p.name!r}"
            legal.verify(gm, where)
            before, facts = facts, legal.promises(gm)
            legal.kept(before, facts, where)
        if report.changed:
            gm.recompile()
        return report, facts


# Pipelines as text.

SYNTAX = "a list such as 'canonicalize,fuse{max_nodes=4}'"
ITEM = re.compile(r"""\s*(?P<name>[\w-]+)\s*(?:\{(?P<options>(?:"(?:\\.|[^"\\])*"|[^{}"])*)\})?\s*(?P<end>,|$)""")
OPTION = re.compile(r"""\s*(?P<key>\w+)\s*=\s*(?P<value>"(?:\\.|[^"\\])*"|[^,"{}=]*?)\s*(?P<end>,|$)""")
BARE = re.compile(r"[\w.:/+-]+")
KINDS: Mapping[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def parse(text: str, known: Mapping[str, type[Pass]]) -> tuple[Pass, ...]:
    """``canonicalize,fuse{max_nodes=4}`` -> passes.  The options of a pass are its dataclass fields; order is kept."""
    return tuple(_build(name, options, known) for name, options in _split(text, ITEM, "name", "options", text))


def names(text: str) -> tuple[str, ...]:
    """The names in a pipeline, known or not."""
    return tuple(name for name, _ in _split(text, ITEM, "name", "options", text))


def spell(passes: Sequence[Pass]) -> str:
    """Passes -> text that ``parse`` reads back.  Options that have their default value are left out."""
    return ",".join(map(_spell_one, passes))


def _split(text: str, form: re.Pattern[str], first: str, second: str, whole: str) -> Iterator[tuple[str, str]]:
    at, more = 0, bool(text.strip())
    while more:
        found = form.match(text, at)
        if found is None:
            raise BadOption("passes", whole, SYNTAX)
        yield found[first], found[second] or ""
        at, more = found.end(), found["end"] == ","


def _build(name: str, options: str, known: Mapping[str, type[Pass]]) -> Pass:
    if name not in known:
        raise UnknownPass(name, tuple(known))
    kinds = typing.get_type_hints(known[name])
    names = tuple(f.name for f in fields(known[name]) if f.init)
    values: dict[str, object] = {}
    for key, value in _split(options, OPTION, "key", "value", f"{name}{{{options}}}"):
        if key not in names:
            raise UnknownOption(key, names, f"pass {name!r}")
        values[key] = _value(f"{name}.{key}", kinds[key], value)
    return known[name](**values)


def _value(name: str, kind: Any, text: str) -> object:
    """``text`` as a value of the type ``kind``: one of KINDS, a Literal of strings, or either of them or None."""
    parts = typing.get_args(kind)
    if type(None) in parts:
        rest = [t for t in parts if t is not type(None)]
        return None if text == "none" else _value(name, rest[0] if len(rest) == 1 else object, text)
    if typing.get_origin(kind) is Literal:
        if text in parts:
            return text
        raise BadOption(name, text, f"one of {', '.join(map(repr, parts))}")
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind is str:
            return json.loads(text) if text.startswith('"') else text
        if kind in (int, float):
            return kind(text)
    except (ValueError, KeyError):
        raise BadOption(name, text, KINDS[kind]) from None
    raise BadOption(name, text, "it from Python instead: a value of this type cannot be written as text")


def _spell_one(p: Pass) -> str:
    given = []
    for f in fields(p):
        value = getattr(p, f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if f.init and value != default:
            given.append(f"{f.name}={_spell_value(value)}")
    return f"{p.name}{{{','.join(given)}}}" if given else p.name


def _spell_value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return "none"
        case str():
            return value if BARE.fullmatch(value) and value != "none" else json.dumps(value)
        case _:
            return repr(value)
