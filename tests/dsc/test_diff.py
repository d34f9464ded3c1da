"""The difference of two graphs, as lines."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dsc.debug import diff
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.target import find
from kit_graphs import trace

WORDS = st.lists(st.sampled_from(["a: f32[2]", "b: f32[2] = relu(a)", "c: f32[2] = neg(a)", "return c"]), max_size=12)
NOTED = WORDS.map(lambda lines: [f"{x}  {{group=k{i}}}" if i % 3 == 0 else x for i, x in enumerate(lines)])


def sides(lines: list[diff.Line]) -> tuple[list[str], list[str]]:
    """What a reader takes for the old and the new text; notes apart."""
    plain = [(x.kind, x.text.split("  {")[0]) for x in lines]
    return [t for k, t in plain if k not in ("new", "hunk")], [t for k, t in plain if k not in ("gone", "hunk")]


@given(WORDS | NOTED, WORDS | NOTED)
def test_both_sides_can_be_read_off(before: list[str], after: list[str]) -> None:
    lines = diff.lines(before, after, context=100)
    old, new = sides(lines)
    if before == after:
        assert lines == []
        return
    assert old == [x.split("  {")[0] for x in before]
    assert new == [x.split("  {")[0] for x in after]


@given(WORDS | NOTED, WORDS | NOTED, st.integers(0, 3))
def test_hunks_name_the_lines_that_they_show(before: list[str], after: list[str], context: int) -> None:
    hunks: list[tuple[str, list[diff.Line]]] = []
    for line in diff.lines(before, after, context):
        if line.kind == "hunk":
            hunks.append((line.text, []))
        else:
            hunks[-1][1].append(line)
    for head, lines in hunks:
        old, new = sides(lines)
        for (part, shown), whole in zip(zip(head.split()[1:3], (old, new)), (before, after)):
            first, count = map(int, part[1:].split(","))
            assert len(shown) == count
            assert [x.split("  {")[0] for x in whole[first - 1 : first - 1 + count]] == shown or count == 0


def test_notes_alone_are_one_line() -> None:
    assert [
        str(x) for x in diff.lines(["x", "y: f32[] = neg(x)", "z"], ["x", "y: f32[] = neg(x)  {group=k0}", "z"])
    ] == [
        "@@ -1,3 +1,3 @@",
        " x",
        "~y: f32[] = neg(x)  {group=k0}",
        " z",
    ]


def test_what_lies_far_from_changes_is_left_out() -> None:
    before = [str(i) for i in range(100)]
    after = [*before[:50], "new", *before[51:]]
    assert [str(x) for x in diff.lines(before, after, context=1)] == ["@@ -50,3 +50,3 @@", " 49", "-50", "+new", " 51"]


def test_graphs_around_a_pass() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.native_dropout(x, 0.25, True)[0].relu() @ x

    gm, other = trace(f, torch.ones(4, 4)), trace(f, torch.ones(4, 4))
    assert diff.graphs(gm.graph, other.graph) == []
    Canonicalize().run(gm, find("cpu"))
    changed = diff.graphs(other.graph, gm.graph)
    assert [x.text for x in changed if x.kind == "gone" and "native_dropout" in x.text]
    assert [x.text for x in changed if x.kind == "new" and "bernoulli" in x.text]
    fused = trace(f, torch.ones(4, 4))
    Canonicalize().run(fused, find("cpu"))
    Fuse().run(fused, find("cpu"))
    assert {x.kind for x in diff.graphs(gm.graph, fused.graph)} == {"hunk", "same", "noted"}
