"""From what ``bisect`` found to a script of a few lines that fails in the same way.

1. The nodes around the change, cut out of the graph before it: what they read becomes an input.  The neighbourhood
   grows until the step that is to blame, run on the cut alone, makes the same kind of difference.
2. Nodes are taken away, many at a time at first (delta debugging: Zeller and Hildebrandt, "Simplifying and isolating
   failure-inducing input", 2002), each becoming an input, or nothing if nobody reads it; and results.
3. Inputs become seeded random numbers where the failure does not need their values, then sizes shrink.

Every candidate is judged by running its own source through ``repro.check``, as the script will.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsc import errors, passlist
from dsc.debug import repro, sketch
from dsc.debug.bisect.found import Case, Finding, Verdict
from dsc.debug.bisect.run import run, seeded
from dsc.debug.bisect.tolerance import Difference, Rule
from dsc.debug.repro import Setting
from dsc.debug.sketch import Sketch
from dsc.manager import Pass

SECONDS = 120.0
"""After which the smallest script so far is given."""
MOST_NODES = 400
"""Of a neighbourhood that is worth shrinking node by node."""
LITERAL = 64
"""Elements of an input that is written out where random numbers do not do."""


@dataclass(frozen=True)
class Reduced:
    script: str
    lines: int
    """Of the graph: its inputs aside, its result included."""
    difference: Difference
    saved: Mapping[str, torch.Tensor]
    """Inputs too large to write out, by the names under which the script loads them."""


@dataclass
class Judge:
    """Whether a candidate fails in the same way, as long as there is time."""

    setting: Setting
    kind: str
    end: float
    tried: int = 0

    def __call__(self, candidate: Sketch) -> Difference | None:
        if time.perf_counter() > self.end:
            return None
        self.tried += 1
        try:
            graph, inputs = candidate.function(), candidate.tensors()
            with torch.no_grad():
                graph(*inputs)
            found = repro.difference(repro.traced(graph, inputs, self.setting.on), inputs, self.setting)
        except Exception:  # not a program, or one that the pass cannot take: another failure than the one looked for
            return None
        return found if found is not None and _alike(found.kind, self.kind) else None


def reduce(verdict: Verdict, seconds: float = SECONDS) -> Reduced:
    """The script for what ``verdict`` found.

    Raises:
        NotReduced: nothing was found, or it does not fail once it is cut out of its graph.
    """
    if verdict.finding is None:
        raise errors.NotReduced(verdict.session.model.name, "no pass changes its results")
    if verdict.case is None:
        step = verdict.finding.pass_name
        raise errors.NotReduced(verdict.session.model.name, f"the fault lies in the step {step!r}, which is PyTorch's")
    finding, case = verdict.finding, verdict.case
    judge = Judge(_setting(verdict, case), finding.difference.kind, time.perf_counter() + seconds)
    start = _smallest_failing(case, judge)
    if start is None:
        raise errors.NotReduced(verdict.session.model.name, "the failure needs the whole graph around it")
    small = _with_small_sizes(_with_random_inputs(_with_fewer_nodes(start, judge), judge), judge)
    small = sketch.renamed(_with_fewer_nodes(small, judge))
    judge.end = time.perf_counter() + seconds
    found = judge(small)
    assert found is not None, "renaming changes nothing"
    script, saved = write(small, judge.setting, finding, verdict.session.model.name, found)
    return Reduced(script, len(small.lines) + 1, found, saved)


def _setting(verdict: Verdict, case: Case) -> Setting:
    options = verdict.session.options
    passes = (case.applied,) if case.applied is not None else _graph_passes(verdict)
    on: Any = case.graph
    return Setting(passes, on, case.applied is None, verdict.session.target.name, options, Rule(verdict.rule.unit))


def _graph_passes(verdict: Verdict) -> tuple[Pass, ...]:
    return passlist.chosen(verdict.session.options.passes)[1]


def _alike(a: str, b: str) -> bool:
    """Wrong numbers may be infinite in one graph and finite in the other."""
    number = {"values", "nonfinite"}
    return a == b or {a, b} <= number


# --- cutting out -------------------------------------------------------------------------------------------------------


def _smallest_failing(case: Case, judge: Judge) -> Sketch | None:
    """The smallest neighbourhood of the change that fails by itself."""
    graph = case.before.graph
    known = {n.name: n for n in graph.nodes}
    inside = {known[name] for name in case.around if name in known and known[name].op == "call_function"}
    inside = inside or {n for n in graph.nodes if n.op == "call_function"}
    size = -1
    while size < len(inside) <= MOST_NODES:
        size = len(inside)
        inside = {n for n in sketch.closed(inside) if sketch.is_writable(n)}
        candidate = _cut(case, inside)
        if candidate is not None and judge(candidate) is not None:
            return candidate
        reached = {m for n in inside for m in (*n.all_input_nodes, *n.users)}
        inside = inside | {n for n in reached if n.op == "call_function"}
    return None


def _cut(case: Case, inside: set[Node]) -> Sketch | None:
    """The nodes as a graph of their own, with the values that they read in the whole one."""
    order = [n for n in case.before.graph.nodes if n in inside]
    read = {a for n in order for a in n.all_input_nodes if a not in inside}
    values = _values(case.before, case.inputs, read)
    return sketch.of(order, values, case.graph == "joint") if len(values) == len(read) else None


def _values(gm: GraphModule, inputs: Mapping[str, object], wanted: set[Node]) -> dict[Node, Any]:
    found: dict[Node, Any] = {}

    def see(node: Node, value: Any) -> Any:
        if node in wanted:
            found[node] = value
        return value

    with seeded():
        run(gm, inputs, see)
    return found


# --- shrinking ---------------------------------------------------------------------------------------------------------


def _with_fewer_nodes(start: Sketch, judge: Judge) -> Sketch:
    """No one line and no one result can go."""
    best = start
    changed = True
    while changed:
        changed = False
        for result in best.results if len(best.results) > 1 else ():
            single = sketch.only(best, (result,))
            if judge(single) is not None:
                best, changed = single, True
                break
        size = max(len(best.lines) // 2, 1)
        while size:
            at = 0
            while at < len(best.lines) and len(best.lines) > 1:
                gone = range(at, min(at + size, len(best.lines)))
                tries = (sketch.without(best, gone, orphans) for orphans in (False, True))
                found = next((c for c in tries if c is not None and judge(c) is not None), None)
                if found is not None:
                    best, changed = found, True
                else:
                    at += size
            size //= 2
    return best


def _with_random_inputs(start: Sketch, judge: Judge) -> Sketch:
    """All at once, else one by one; then plain numbers around 0 in place of the spread of the real ones."""
    every = sketch.drawn(start, range(len(start.inputs)))
    best = every if judge(every) is not None else start
    for i in range(len(start.inputs)):
        if best.inputs[i].value is not None:
            candidate = sketch.drawn(best, [i])
            best = candidate if judge(candidate) is not None else best
    for i in range(len(start.inputs)):
        candidate = sketch.standard(best, i)
        if candidate != best and judge(candidate) is not None:
            best = candidate
    return best


def _with_small_sizes(start: Sketch, judge: Judge) -> Sketch:
    """Each size to 2, 3, 4 or its half, wherever it and its multiples stand."""
    best = start
    again = True
    while again:
        again = False
        for size in sorted(sketch.sizes(best), reverse=True):
            smaller = [n for n in sorted({2, 3, 4, size // 2}) if n < size]
            tries = (sketch.resized(best, size, n, indices) for n in smaller for indices in (True, False))
            found = next((c for c in tries if size > 3 and c is not None and judge(c) is not None), None)
            if found is not None:
                best, again = found, True
                break
    return best


# --- writing -----------------------------------------------------------------------------------------------------------

SCRIPT = '''"""{title}

Needs torch and dsc{more}.  Exit code 1: the difference is there.
"""

{imports}

aten = torch.ops.aten


{graph}

inputs = [
{inputs}]
found = check(graph, inputs, {call})
print(f"{{found.kind}}: {{found.text}}" if found else "no difference")
raise SystemExit(found is not None)
'''


def write(
    small: Sketch, setting: Setting, finding: Finding, model: str, found: Difference
) -> tuple[str, dict[str, torch.Tensor]]:
    """The script, and the tensors that lie beside it."""
    saved = {x.name: x.value for x in small.inputs if x.value is not None and x.value.numel() > LITERAL}
    modules = {m for p in setting.passes for m in _modules(p)}
    imports = [f"from {m} import {', '.join(sorted(names))}" for m, names in sorted(_grouped(modules).items())]
    drawn = ", drawn" if any(x.value is None for x in small.inputs) else ""
    lines = ["import torch", f"from dsc.debug.repro import check{drawn}", *imports]
    where = "its kernels" if setting.kernels else f"pass {finding.pass_name!r}"
    place = f" at {finding.node}" if finding.node else ""
    title = f"{where} on the {finding.graph} graph of {model}{place}: {found.kind}, {found.text}."
    call = [*map(repr, setting.passes), f"on={setting.on!r}"]
    call += ["kernels=True"] if setting.kernels else []
    call += [f"target={setting.target!r}"] if setting.target != "cpu" else []
    call += [f"unit={setting.rule.unit!r}"] if setting.rule.unit is not None else []
    own = sorted(m.split(".")[0] for m, _ in modules if not m.startswith("dsc."))
    text = SCRIPT.format(
        title=title[0].upper() + title[1:],
        more="".join(f", and {m}" for m in own),
        imports="\n".join(lines),
        graph=small.source("graph"),
        inputs="".join(f"    {_input(x, saved)},\n" for x in small.inputs),
        call=", ".join(call),
    )
    return text, saved


def _input(x: sketch.Input, saved: Mapping[str, torch.Tensor]) -> str:
    if x.name in saved:
        return f"torch.load(__file__ + '.{x.name}.pt')"
    return x.spelled()


def _modules(p: object) -> set[tuple[str, str]]:
    """The classes of a pass and of the passes in its fields."""
    if type(p).__module__ == "__main__":
        raise errors.NotReduced(type(p).__qualname__, "a script cannot import a pass that lives in __main__")
    found = {(type(p).__module__, type(p).__qualname__)}
    for f in fields(p) if is_dataclass(p) else ():
        if isinstance(value := getattr(p, f.name), Pass):
            found |= _modules(value)
    return found


def _grouped(pairs: set[tuple[str, str]]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for module, name in pairs:
        out.setdefault(module, []).append(name)
    return out


def save(reduced: Reduced, path: Path) -> None:
    """The script, and its tensors beside it."""
    path.write_text(reduced.script)
    for name, t in reduced.saved.items():
        torch.save(t, f"{path}.{name}.pt")
