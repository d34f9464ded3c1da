"""A graph is kept as it was, whatever passes do to it afterwards."""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dsc import snapshot, text


def traced() -> GraphModule:
    table = torch.arange(4.0)
    return make_fx(
        lambda x: torch.cat([x.relu() + table, x[1:]], dim=0).sum(), tracing_mode="fake", _allow_non_fake_inputs=True
    )(torch.ones(4))


def spoil(gm: GraphModule) -> None:
    """Everything that a pass may do: other arguments, targets, names, notes; nodes and attributes gone."""
    relu = next(n for n in gm.graph.nodes if "relu" in n.name)
    cat = next(n for n in gm.graph.nodes if "cat" in n.name)
    relu.target = torch.ops.aten.exp.default
    relu.meta["dsc"] = "spoiled"
    cat.args = (list(reversed(cat.args[0])), *cat.args[1:])
    total = cat.next
    total.replace_all_uses_with(cat)
    gm.graph.erase_node(total)
    for n in gm.graph.find_nodes(op="get_attr"):
        delattr(gm, n.target)


def test_restored_is_what_was_taken() -> None:
    gm = traced()
    before, values = text.show(gm.graph), [n.meta.get("val") for n in gm.graph.nodes]
    kept = snapshot.take(gm)
    spoil(gm)
    again = kept.restored()
    assert text.show(again.graph) == before
    assert [n.meta.get("val") for n in again.graph.nodes] == values
    again.graph.lint()
    x = torch.randn(4)
    again.recompile()
    assert torch.equal(again(x), traced()(x))


def test_nodes_of_two_copies_share_no_meta() -> None:
    kept = snapshot.take(traced())
    first, second = kept.restored(), kept.restored()
    for a, b in zip(first.graph.nodes, second.graph.nodes):
        a.meta["dsc"] = "mine"
        assert "dsc" not in b.meta
