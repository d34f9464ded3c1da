"""Saved values that are away between forward and backward: the calls that move them, put into both graphs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsc import cost, liveness, ops, tiers
from dsc.notes import set_keep
from dsc.passes.solve import offload
from dsc.passes.solve.offload import Event, Item, Placed
from dsc.steps import Step, last_uses, steps, storage_of
from dsc.target import Target
from dsc.tiers import Tier

PLACE = "dsc_place"
"""Key of ``node.meta``: the place in the plan's script of the call that a node of the backward belongs to."""
AWAY = "dsc_away"
"""Key of ``node.meta``: what was planned for a saved value, until the graphs are split."""
SMALLEST = 1 / 4000
"""Share of the peak below which a value is not worth a copy."""
CALLS = {
    torch.ops.dsc.offload.default: "out",
    torch.ops.dsc.offloaded.default: "out done",
    torch.ops.dsc.fetch.default: "in",
    torch.ops.dsc.fetched.default: "in done",
}


@dataclass(frozen=True, slots=True)
class Away:
    """One saved value, by names that hold for the joint graph and for both halves of it."""

    name: str
    lands: str
    """The call of the forward after which it is out; at the end if there is none of that name."""
    fetched: int
    """The place in the script at which it starts to come back."""


def install(
    forward: GraphModule, backward: GraphModule, away: Sequence[Away], tier: Tier, results: int
) -> dict[str, str]:
    """Put the copies into both graphs; old name of each input of the backward that changes -> new name.

    In the forward a handle is handed over in place of the value, in the backward the value is fetched by it.
    ``results``: how many of the forward's results are not saved values.
    """
    ahead = {n.name: n for n in forward.graph.nodes}
    behind = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    renamed = {}
    output = forward.graph.output_node()
    handed: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for a in away:
        x, old = ahead.get(a.name), behind.get(a.name)
        if x is None or old is None or x not in handed[results:]:
            continue
        saved = _leave(forward, x, ahead.get(a.lands), output, tier)
        handed[results:] = [saved if n is x else n for n in handed[results:]]
        _return(backward, old, saved, a.fetched)
        renamed[a.name] = saved.name
    output.args = (tuple(handed),)
    return renamed


def install_noted(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """``install`` for what the plan left on the nodes of the forward."""
    found = [n.meta.pop(AWAY) for n in forward.graph.nodes if AWAY in n.meta]
    by_tier: dict[str, list[Away]] = {}
    for away, tier in found:
        by_tier.setdefault(tier, []).append(away)
    for tier, away in by_tier.items():
        install(forward, backward, away, tiers.parse(tier), results)
    if found:
        forward.recompile()
        backward.recompile()


def leave_notes(node: Node, away: Away, tier: Tier) -> None:
    """Mark a node of the forward, for ``install_noted``."""
    node.meta[AWAY] = (away, str(tier))
    set_keep(node, "offload")


def _leave(gm: GraphModule, x: Node, lands: Node | None, output: Node, tier: Tier) -> Node:
    graph = gm.graph
    order = {n: i for i, n in enumerate(graph.nodes)}
    with graph.inserting_after(x):
        handle = graph.create_node("call_function", torch.ops.dsc.offload.default, (x, str(tier)), name=f"{x.name}_out")
    readers = [u for u in x.users if u is not output and u is not handle]
    order[handle] = order[x]
    after = max((handle, lands, *readers), key=order.__getitem__) if lands is not None else output
    with graph.inserting_after(after) if after is not output else graph.inserting_before(output):
        saved = graph.create_node("call_function", torch.ops.dsc.offloaded.default, (handle, x), name=f"{x.name}_away")
    for n in (handle, saved):
        n.meta["val"] = _handle_value(x)
    return saved


def _return(gm: GraphModule, old: Node, saved: Node, place: int) -> None:
    graph, t = gm.graph, ops.tensor(old)
    order = {n: i for i, n in enumerate(graph.nodes)}
    with graph.inserting_before(old):
        handle = graph.placeholder(saved.name)
    handle.meta = {"val": saved.meta["val"]}
    first = min(old.users, key=order.__getitem__, default=None)
    if first is None:
        graph.erase_node(old)
        return
    planned = next((n for n in graph.nodes if n.meta.get(PLACE, -1) >= place), first)
    with graph.inserting_before(min(planned, first, key=lambda n: order.get(n, -1))):
        y = graph.create_node(
            "call_function",
            torch.ops.dsc.fetch.default,
            (handle, list(t.shape), list(t.stride()), t.dtype, t.device),
            name=f"{old.name}_back",
        )
    y.meta["val"] = t
    with graph.inserting_before(first):
        graph.call_function(torch.ops.dsc.fetched.default, (y, handle)).meta["val"] = None
    old.replace_all_uses_with(y, delete_user_cb=lambda n: n is not y)
    graph.erase_node(old)


def _handle_value(x: Node) -> torch.Tensor:
    return ops.tensor(x).new_empty(1, dtype=torch.int64, device="cpu")


# --- what to move ------------------------------------------------------------------------------------------------------


def plan(
    forward: GraphModule,
    backward: GraphModule,
    saved: Mapping[str, int],
    results: int,
    budget: int,
    target: Target,
    tier: Tier,
    stay: Collection[str] = (),
) -> tuple[Away, ...] | None:
    """What to move so that a fused, split step stays within ``budget`` bytes; None if no choice does.

    ``saved``: input of the backward -> place among the forward's results, of which the first ``results`` are returned.
    ``stay``: names of those that are not to be moved.
    """
    first, second = steps(forward), steps(backward)
    profile = liveness.profile_step(forward, backward, saved)
    seconds = [step_seconds(s, target) for s in (*first, *second)]
    line = [offload.Step(t, alive) for t, (_, alive) in zip(seconds, profile.timeline)]
    found = offload.choose(
        line,
        len(first),
        [i for i in items(forward, first, second, saved, results, profile.peak, target.kind) if i.name not in stay],
        budget,
        tier.bandwidth(target),
    )
    if found is None:
        return None
    return tuple(_named(p, first, second) for p in found)


def items(
    forward: GraphModule,
    first: Sequence[Step],
    second: Sequence[Step],
    saved: Mapping[str, int],
    results: int,
    peak: int,
    kind: str,
) -> list[Item]:
    """Saved values that may be moved: made by the forward on a ``kind`` of device, not returned by it, and large."""
    out = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    held = {storage_of(n) for n in out[:results] if isinstance(n, Node)}
    born = {n: i for i, s in enumerate(first) for n in s.nodes}
    last = last_uses(first)
    wanted: dict[str, int] = {}
    for i, s in enumerate(second):
        for n in s.nodes:
            for a in n.all_input_nodes:
                wanted.setdefault(storage_of(a).name, len(first) + i)
    found = []
    for name, place in saved.items():
        n = out[place]
        if not isinstance(n, Node) or storage_of(n) is not n or n in held or n not in born or name not in wanted:
            continue
        if may_leave(n) and ops.tensor(n).device.type == kind and liveness.nbytes(n) >= peak * SMALLEST:
            found.append(Item(name, liveness.nbytes(n), born[n], max(last.get(n, 0), born[n]), wanted[name]))
    return found


def may_leave(n: Node) -> bool:
    """Whether a value has known sizes, and memory without holes; the state of a generator is no such value."""
    t = ops.value(n)
    if not isinstance(t, torch.Tensor) or t.layout != torch.strided or ops.name_of(n) == "dsc.rng_state.default":
        return False
    if not all(isinstance(s, int) for s in (*t.shape, *t.stride())) or t.numel() == 0:
        return False
    return liveness.nbytes(n) == t.numel() * t.element_size()


def _named(p: Placed, first: Sequence[Step], second: Sequence[Step]) -> Away:
    places = [n.meta[PLACE] for s in second[p.fetched - len(first) :] for n in s.nodes if PLACE in n.meta]
    return Away(p.item.name, first[p.lands].nodes[-1].name, places[0] if places else 0)


def step_seconds(step: Step, target: Target) -> float:
    return cost.seconds_of_group(step.nodes, target) if step.group is not None else cost.seconds(step.node, target)


def elapsed(forward: GraphModule, backward: GraphModule, target: Target, tier: Tier) -> float:
    """Modelled seconds of a split step with its copies."""
    events = []
    for gm in (forward, backward):
        for s in steps(gm):
            kind = CALLS.get(s.node.target) if s.group is None else None  # type: ignore[call-overload]
            if kind is None:
                events.append(Event("run", step_seconds(s, target)))
                continue
            handle, x = _names(s.node)
            events.append(Event(kind, 0.0, handle, liveness.nbytes(x) if x is not None else 0))
    return offload.elapsed(events, tier.bandwidth(target))


def _names(n: Node) -> tuple[str, Node | None]:
    """The value that a call deals with, under one name for both graphs, and its node."""
    match CALLS[n.target]:  # type: ignore[index]
        case "out":
            return ops.operand(n, 0).name, ops.operand(n, 0)
        case "out done":
            return ops.operand(n, 1).name, None
        case "in":
            return n.name, n
        case _:
            return ops.operand(n, 0).name, None
