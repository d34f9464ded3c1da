"""The search for the pass, the rewrite and the node from which the numbers of a model are wrong.

1. The model is captured once, with what its graphs are called with; every graph after every pass is kept.
2. The traced graph runs beside its twin in float64: what is wanted, and the noise that eager has at each result.
3. Stage by stage, in the order of the pipeline, the graph runs from the same inputs and random numbers.  A stage that
   computes the same by construction need not run.  The backward runs from what the traced forward saves.
4. At the first stage whose results differ: ``locate`` for a pass, ``wrong_kernels`` for a program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from dsc.debug import capture as capturing
from dsc.debug.bisect import lowered
from dsc.debug.bisect.align import changed_around, plain, same_results
from dsc.debug.bisect.explain import diff_around, origin_of
from dsc.debug.bisect.found import Case, Checked, Finding, Verdict
from dsc.debug.bisect.locate import Change, locate
from dsc.debug.bisect.run import NodeRaised, Results, Twin, run, run_twins, seeded
from dsc.debug.bisect.tolerance import Difference, Rule, coarsest, compare, worst
from dsc.debug.capture import TRACED, Region, Session, Stage
from dsc.debug.source import Model
from dsc.manager import Pass
from dsc.options import Options
from dsc.target import Target

SPLIT, LINK = "split", "link"
"""The steps between passes: the joint graph to a forward and a backward, and a graph to its program."""
RULE = Rule()


def bisect(
    model: Model,
    target: Target | str = "cpu",
    options: Options | None = None,
    *,
    training: bool = True,
    unit: float | None = None,
    against: Literal["eager", "float64"] = "eager",
    heard: Callable[[Checked], None] | None = None,
) -> Verdict:
    """Find the first step of the compilation of ``model`` that makes its numbers wrong.

    ``unit`` is the relative tolerance in place of those of ``tolerance.UNIT``.  ``heard`` is told of every stage.
    Graphs for a GPU that is not there run on the CPU, with the decisions for that GPU.

    Raises:
        ModelFailed: the model itself raises on these inputs.
        DscError: bad options; a pass that fails.
    """
    options = replace(options or Options(), on_compile=None, watchers=())
    session = capturing.capture(model, target, options, training=training, keep_values=True, on_host=True)
    verdict = examine(session, Rule(unit, against), training, heard)
    return replace(verdict, seconds=session.seconds + verdict.seconds)


def examine(
    session: Session, rule: Rule = RULE, training: bool = True, heard: Callable[[Checked], None] | None = None
) -> Verdict:
    """The search in a capture that kept its values."""
    start = time.perf_counter()
    checked: list[Checked] = []
    found: tuple[Finding, Case | None] | None = None
    for step, outcome in _steps(session, rule, training):
        checked.append(step)
        if heard is not None:
            heard(step)
        if outcome is not None:
            found = outcome
            break
    finding, case = found or (None, None)
    return Verdict(session, tuple(checked), finding, time.perf_counter() - start, rule, case)


Step = tuple[Checked, tuple[Finding, Case | None] | None]


def _steps(session: Session, rule: Rule, training: bool) -> Iterator[Step]:
    yield from _traced(session, rule, training)
    for i, region in enumerate(session.regions):
        yield from RegionSearch(session, region, i, rule).steps()


def _traced(session: Session, rule: Rule, training: bool) -> Iterator[Step]:
    """The model in eager against its traced graphs: here tracing is to blame, and no pass."""
    start = time.perf_counter()
    want = capturing.run(session.model, session.model.module, training)
    got = session.outcome
    names = [f"gradient of {name}" for name, _ in session.model.module.named_parameters()]
    rows: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = []
    rows += [(f"result {i}", g, w) for i, (g, w) in enumerate(zip(got.results, want.results))]
    rows += [(n, g, w) for n, g, w in zip(names, got.gradients, want.gradients)]
    differences = {name: compare(g, Twin(w, w), rule) for name, g, w in rows if g is not None or w is not None}
    bad = {name: d for name, d in differences.items() if d is not None}
    step = Checked(0, "model", TRACED, "ran", time.perf_counter() - start, worst(bad.values()))
    if not bad:
        yield step, None
        return
    name = max(bad, key=lambda n: bad[n].times)
    yield step, (Finding(0, "model", TRACED, name, bad[name]), None)


@dataclass
class RegionSearch:
    """The stages of one Dynamo graph."""

    session: Session
    region: Region
    index: int
    rule: Rule
    saved: dict[str, object] = field(default_factory=dict)
    """What the traced forward gives, by the names of the nodes."""

    def steps(self) -> Iterator[Step]:
        if joint := self.region.of("joint"):
            yield from self._training(joint)
        elif inference := self.region.of("inference"):
            inputs = self._inputs(inference[0].gm)
            yield from self._chain(inference, inputs, self._twins(inference[0].gm, inputs), "inference")

    def _training(self, joint: Sequence[Stage]) -> Iterator[Step]:
        inputs = self._inputs(joint[0].gm)
        wanted = self._twins(joint[0].gm, inputs)
        yield from self._chain(joint, inputs, wanted, "joint")
        forward, backward = self.region.of("forward"), self.region.of("backward")
        if not forward or not backward:
            return
        count = len(wanted.outputs) - len(_results(backward[0].gm))
        last = joint[-1].gm
        first = _results(last)
        split = [(a, b) for a, b in zip(_results(forward[0].gm)[:count], first) if _both(a, b)]
        want = Results(wanted.outputs[:count])
        yield from self._split(forward[0], last, inputs, inputs, split, want)
        twins = self._twins(forward[0].gm, inputs)
        for node, value in zip(_results(forward[0].gm), twins.outputs):
            if isinstance(node, Node):
                self.saved[node.name] = value.value
        yield from self._chain(forward, inputs, twins, "forward", start=1)
        given = {**inputs, **self.saved}
        split = [(a, b) for a, b in zip(_results(backward[0].gm), first[count:]) if _both(a, b)]
        want = Results(wanted.outputs[count:])
        yield from self._split(backward[0], last, inputs, given, split, want)
        yield from self._chain(backward, given, want, "backward", start=1)

    # --- one stage after the other -----------------------------------------------------------------------------------

    def _chain(
        self, stages: Sequence[Stage], inputs: Mapping[str, object], wanted: Results, kind: str, start: int = 1
    ) -> Iterator[Step]:
        """Every pass of one graph, and its program at the end."""
        for before, after in zip(stages[start - 1 :], stages[start:]):
            begun = time.perf_counter()
            if same_results(before.gm, after.gm):
                yield self._checked(after.graph, after.name, begun, None, "same by construction"), None
                continue
            wrong = self._differences(lambda gm=after.gm: _ran(gm, inputs), wanted)  # type: ignore[misc]
            found = None
            if wrong:
                pairs = [(a, b) for a, b in zip(_results(after.gm), _results(before.gm)) if _both(a, b)]
                change = self._change(before.gm, after.gm, inputs, inputs, pairs, wrong, wanted, after.applied)
                found = self._explain(change, after, kind, wrong)
            yield self._checked(after.graph, after.name, begun, worst(wrong.values())), found
        if kind != "joint":
            yield self._linked(stages[-1], inputs, wanted, kind)

    def _split(
        self,
        stage: Stage,
        joint: GraphModule,
        inputs: Mapping[str, object],
        given: Mapping[str, object],
        pairs: list[tuple[Node, Node]],
        wanted: Results,
    ) -> Iterator[Step]:
        begun = time.perf_counter()
        wrong = self._differences(lambda: _ran(stage.gm, given), wanted)
        found = None
        if wrong:
            change = self._change(joint, stage.gm, inputs, given, pairs, wrong, wanted, None)
            found = self._explain(change, replace(stage, name=SPLIT), stage.graph, wrong)
        yield self._checked(stage.graph, SPLIT, begun, worst(wrong.values())), found

    def _linked(self, stage: Stage, inputs: Mapping[str, object], wanted: Results, kind: str) -> Step:
        begun, options = time.perf_counter(), self.session.options
        if not lowered.runnable(options):
            return self._checked(kind, LINK, begun, None, "not built"), None
        wrong = self._differences(lambda: lowered.run_program(stage.gm, inputs, kind, options), wanted, strides=True)
        found = None
        if wrong:
            found = self._explain_kernels(stage, inputs, kind, wrong)
        return self._checked(kind, LINK, begun, worst(wrong.values())), found

    def _checked(self, graph: str, name: str, begun: float, d: Difference | None, how: Any = "ran") -> Checked:
        return Checked(self.index, graph, name, how, time.perf_counter() - begun, d)

    # --- values ------------------------------------------------------------------------------------------------------

    def _inputs(self, gm: GraphModule) -> dict[str, object]:
        """What the graph was called with; for a backward that was never called, random tangents."""
        calls = self.region.calls
        known = {**calls.get("backward", {}), **calls.get("forward", {}), **calls.get("inference", {})}
        generator = torch.Generator().manual_seed(0)
        for n in gm.graph.find_nodes(op="placeholder"):
            if n.name not in known:
                known[n.name] = _drawn(n, generator)
        return known

    def _twins(self, gm: GraphModule, inputs: Mapping[str, object]) -> Results:
        self.rule = replace(self.rule, coarsest=coarsest(gm))
        with seeded():
            return run_twins(gm, inputs)

    def _differences(
        self, results: Callable[[], Results], wanted: Results, strides: bool = False
    ) -> dict[int, Difference]:
        """Place of a result -> how it differs; -1 for a node that raised."""
        try:
            got = results()
        except NodeRaised as why:
            return {-1: Difference("raises", str(why))}
        rows = zip(got.every(), wanted.every())
        found = {i: compare(g, w, self.rule, strides) for i, (g, w) in enumerate(rows)}
        return {i: d for i, d in found.items() if d is not None}

    # --- explaining --------------------------------------------------------------------------------------------------

    def _change(
        self,
        before: GraphModule,
        after: GraphModule,
        inputs: Mapping[str, object],
        given: Mapping[str, object],
        pairs: list[tuple[Node, Node]],
        wrong: Mapping[int, Difference],
        wanted: Results,
        applied: Pass | None,
    ) -> Change:
        results = _results(after)
        places = [i for i in wrong if 0 <= i < len(results)] or range(min(len(results), len(wanted.outputs)))
        bad = {r: wanted.outputs[i] for i in places if isinstance(r := results[i], Node)}
        names = applied is None or not applied.retraces
        return Change(before, after, inputs, given, pairs, bad, names)

    def _explain(
        self, change: Change, stage: Stage, kind: str, wrong: Mapping[int, Difference]
    ) -> tuple[Finding, Case | None]:
        place = max(wrong, key=lambda i: wrong[i].times)
        finding = Finding(self.index, kind, stage.name, self._result(kind, place), wrong[place])
        suspect, alignment = locate(change, self.rule)
        if suspect is None:
            return finding, self._case(stage, change, ())
        removed, changed = changed_around(alignment, suspect.node)
        about = {n.name for n in (*removed, *changed, suspect.node)}
        remarks = stage.report.remarks if stage.report is not None else ()
        line, module = origin_of(suspect.node, suspect.counterpart)
        finding = replace(
            finding,
            node=suspect.node.name,
            node_difference=suspect.difference,
            confirmed=suspect.confirmed,
            suspects=tuple(n.name for n in suspect.unknown),
            line=line,
            module=module,
            removed=tuple(map(plain, removed)),
            changed=tuple(map(plain, changed)),
            remarks=tuple(f"{r.node}: {r.why}" for r in remarks if r.verdict == "did" and r.node in about),
            diff=diff_around(alignment, about),
        )
        known = {n.name for n in change.before.graph.nodes}
        around = {n.name for n in removed} | {n.name for n in changed if n.name in known}
        around |= {suspect.counterpart.name} if suspect.counterpart is not None else set()
        return finding, self._case(stage, change, tuple(sorted(around)))

    def _case(self, stage: Stage, change: Change, around: tuple[str, ...]) -> Case | None:
        if stage.applied is None:
            return None
        return Case(stage.graph, stage, change.before, change.inputs, stage.applied, around)

    def _explain_kernels(
        self, stage: Stage, inputs: Mapping[str, object], kind: str, wrong: Mapping[int, Difference]
    ) -> tuple[Finding, Case | None]:
        place = max(wrong, key=lambda i: wrong[i].times)
        finding = Finding(self.index, kind, LINK, self._result(kind, place), wrong[place])
        kernels = lowered.wrong_kernels(stage.gm, inputs, self.session.options, self.rule)
        around: tuple[str, ...] = ()
        if kernels:
            k = kernels[0]
            around = tuple(n.name for n in k.nodes)
            line, module = origin_of(k.node, None)
            finding = replace(
                finding,
                node=k.node.name,
                node_difference=k.difference,
                line=line,
                module=module,
                changed=tuple(map(plain, k.nodes)),
                remarks=(f"{k.group}: kernel {k.kernel}",),
                diff="".join(f"{'>' if n is k.node else ' '} {plain(n)}\n" for n in k.nodes),
            )
        return finding, Case(kind, stage, stage.gm, inputs, None, around)

    def _result(self, kind: str, place: int) -> str:
        gradients = self.inputs_of_model()
        before = len(_results(self.region.of(kind)[0].gm)) - len(gradients) if kind == "joint" else 0
        if place < 0:
            return "a node that raises"
        if kind in ("joint", "backward") and 0 <= place - before < len(gradients):
            return f"the gradient of {gradients[place - before]}"
        return f"result {place} of the {kind} graph"

    def inputs_of_model(self) -> list[str]:
        """Names of parameters, and of arguments as Dynamo calls them, in the order of the backward's results."""
        known = {id(p): name for name, p in self.session.model.module.named_parameters()}
        places = self.region.dynamo.graph.find_nodes(op="placeholder")
        return [known.get(id(x), n.name) for n, x in zip(places, self.region.inputs)]


def _ran(gm: GraphModule, inputs: Mapping[str, object]) -> Results:
    with seeded():
        return run(gm, inputs)


def _results(gm: GraphModule) -> list[Any]:
    results = gm.graph.output_node().args[0]
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _both(a: object, b: object) -> bool:
    return isinstance(a, Node) and isinstance(b, Node)


def _drawn(node: Node, generator: torch.Generator) -> object:
    fake = node.meta.get("val")
    if not isinstance(fake, torch.Tensor):
        return fake
    made = torch.randn([int(s) for s in fake.shape], generator=generator)
    return made.to(fake.dtype)
