from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dsc.errors import BadOption, BadPassOrder, InvalidGraph, PassFailed, UnknownOption, UnknownPass
from dsc.manager import Observer, Pass, PassPipeline, Remark, Report, parse, spell
from dsc.target import Target, find

aten = torch.ops.aten
CPU = find("cpu")


@dataclass(frozen=True)
class Quiet(Pass):
    """Changes nothing."""

    name: ClassVar[str] = "quiet"

    def run(self, gm: GraphModule, target: Target) -> Report:
        return Report(False, numbers=(("nodes", len(gm.graph.nodes)),))


@dataclass(frozen=True)
class Swap(Pass):
    """relu -> another op."""

    name: ClassVar[str] = "swap"
    to: str = "neg"

    def run(self, gm: GraphModule, target: Target) -> Report:
        node = next(n for n in gm.graph.nodes if n.name == "relu")
        node.target = getattr(aten, self.to).default
        return Report(True, (Remark("relu", "did", f"became {self.to}"),))


@dataclass(frozen=True)
class Group(Quiet):
    name: ClassVar[str] = "group"
    needs: ClassVar[frozenset[str]] = frozenset({"precision"})
    gives: ClassVar[frozenset[str]] = frozenset({"group"})


@dataclass(frozen=True)
class Precise(Quiet):
    name: ClassVar[str] = "precise"
    gives: ClassVar[frozenset[str]] = frozenset({"precision"})


@dataclass(frozen=True)
class Retrace(Quiet):
    name: ClassVar[str] = "retrace"
    retraces: ClassVar[bool] = True


@dataclass(frozen=True)
class Broken(Pass):
    """Raises, or leaves an illegal graph."""

    name: ClassVar[str] = "broken"
    how: Literal["raise", "no_val", "drop_output", "cast"] = "raise"

    def run(self, gm: GraphModule, target: Target) -> Report:
        relu = next(n for n in gm.graph.nodes if n.name == "relu")
        match self.how:
            case "raise":
                raise ValueError("no luck")
            case "no_val":
                del relu.meta["val"]
            case "drop_output":
                gm.graph.output_node().args = ((relu,),)
            case "cast":
                relu.meta["val"] = relu.meta["val"].double()
        return Report(True)


@dataclass
class Watcher:
    seen: list[str] = field(default_factory=list)

    def before(self, p: Pass, gm: GraphModule) -> None:
        self.seen.append(f"before {p.name}")

    def after(self, p: Pass, gm: GraphModule, report: Report, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append(f"after {p.name} {report.changed}")

    def failed(self, p: Pass, gm: GraphModule, error: Exception) -> None:
        self.seen.append(f"failed {p.name} {type(error).__name__}")


def graph() -> GraphModule:
    return make_fx(lambda x: (x.relu(), x + 1), tracing_mode="fake")(torch.randn(4))


def test_runs_in_order_watched_and_recompiled() -> None:
    gm, watcher = graph(), Watcher()
    observers: tuple[Observer, ...] = (watcher,)
    reports = PassPipeline((Quiet(), Swap("abs")), observers).run(gm, CPU)
    assert reports == (
        ("quiet", Report(False, numbers=(("nodes", 4),))),
        ("swap", Report(True, (Remark("relu", "did", "became abs"),))),
    )
    assert watcher.seen == ["before quiet", "after quiet False", "before swap", "after swap True"]
    assert torch.equal(gm(torch.tensor([-1.0]))[0], torch.tensor([1.0]))


def test_failure_names_the_pass_and_those_before() -> None:
    watcher = Watcher()
    with pytest.raises(PassFailed, match=r"^Pass 'broken' failed after quiet, swap: ValueError: no luck") as caught:
        PassPipeline((Quiet(), Swap(), Broken()), (watcher,)).run(graph(), CPU)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.cause is caught.value.__cause__
    assert watcher.seen[-1] == "failed broken ValueError"


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("no_val", r"at node 'relu': it has no meta\['val'\]"),
        ("drop_output", "at node 'output': it had 2 outputs and has 1"),
        ("cast", r"output 0 was f32\[4\] and is f64\[4\]"),
    ],
)
def test_illegal_graphs_are_found(how: Literal["no_val", "drop_output", "cast"], problem: str) -> None:
    with pytest.raises(
        PassFailed, match=f"Pass 'broken' failed: The graph is not legal after pass 'broken' .*{problem}"
    ) as caught:
        PassPipeline((Broken(how),)).run(graph(), CPU)
    assert isinstance(caught.value.cause, InvalidGraph)


def test_verification_can_be_off() -> None:
    assert PassPipeline((Broken("drop_output"),), verify=False).run(graph(), CPU) == (("broken", Report(True)),)


def test_needs_are_given_before() -> None:
    PassPipeline((Precise(), Group()))
    PassPipeline((Quiet(), Group()))  # nobody gives precision: undecided is legal
    with pytest.raises(
        BadPassOrder,
        match=r"^Pass 'group' needs 'precision' but stands before 'precise', which gives it; move it after",
    ):
        PassPipeline((Group(), Precise()))


def test_retracing_comes_before_notes() -> None:
    PassPipeline((Retrace(), Precise(), Group()))
    with pytest.raises(
        BadPassOrder, match=r"^Pass 'retrace' retraces the graph, which loses the notes of 'precise'; move it before"
    ):
        PassPipeline((Precise(), Retrace()))


@dataclass(frozen=True)
class Many(Quiet):
    name: ClassVar[str] = "many"
    n: int = 32
    rate: float = 0.5
    on: bool = True
    word: str = "a"
    limit: int | None = 3
    kind: Literal["x", "y"] = "x"
    other: tuple[int, ...] = ()


KNOWN = {c.name: c for c in (Quiet, Swap, Many)}


@pytest.mark.parametrize(
    "passes",
    [
        (),
        (Quiet(),),
        (Quiet(), Swap("abs"), Quiet()),
        (Many(n=4, rate=1e-3, on=False, word="b", limit=None, kind="y"),),
        (Many(word='a, "{b}=c\\'), Many(word=""), Many(word="none"), Many(rate=float("inf"), n=-1)),
    ],
)
def test_spelling_is_read_back(passes: tuple[Pass, ...]) -> None:
    assert parse(spell(passes), KNOWN) == passes


def test_text_of_a_pipeline() -> None:
    assert spell((Quiet(), Many(n=4, on=False), Swap("a b"))) == 'quiet,many{n=4,on=false},swap{to="a b"}'
    assert parse(" quiet , many{ n = 4, on=True } ,many{}", KNOWN) == (Quiet(), Many(n=4), Many())


@pytest.mark.parametrize(
    "text", ["quiet,", ",quiet", "quiet{", "quiet}", "many{n}", "many{n=4,}", "many{n=4", "quiet swap", "many{n=1{}}"]
)
def test_bad_syntax(text: str) -> None:
    with pytest.raises(
        BadOption, match=r"^Option 'passes' cannot be .*; give a list such as 'canonicalize,fuse\{max_nodes=4\}'"
    ):
        parse(text, KNOWN)


def test_unknown_names() -> None:
    with pytest.raises(UnknownPass, match="'quite' is not a pass; did you mean 'quiet'"):
        parse("quite", KNOWN)
    with pytest.raises(UnknownOption, match="'rat' is not an option of pass 'many'; did you mean 'rate'"):
        parse("many{rat=1}", KNOWN)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("n=4.5", "a whole number"),
        ("rate=fast", "a number"),
        ("on=1", "true or false"),
        ("limit=x", "a whole number"),
        ("kind=z", "one of 'x', 'y'"),
        ("other=1", "it from Python instead"),
    ],
)
def test_bad_values(option: str, expected: str) -> None:
    name, value = option.split("=")
    with pytest.raises(BadOption, match=f"^Option 'many.{name}' cannot be '{value}'; give {expected}"):
        parse(f"many{{{option}}}", KNOWN)
