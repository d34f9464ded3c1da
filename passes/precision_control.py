"""Give products of a joint graph formats that a controller switches while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from dsc import live, ops
from dsc.passes.precision_apply import Rewriter, apply, drop_dead_views
from dsc.passes.precision_sites import Operand, Site
from dsc.passes.precision_time import grain
from dsc.precision.controller import PrecisionController
from dsc.precision.formats import FORMATS, Format
from dsc.precision.plan import PrecisionPlan
from dsc.precision.rules import Product, choices, planned_error, seen_name, slot_name
from dsc.precision.switch import switch

aten = torch.ops.aten


def apply_switched(
    gm: GraphModule,
    sites: Sequence[Site],
    formats: Mapping[str, Format],
    controller: PrecisionController,
    plan: PrecisionPlan | None,
    reports: bool = True,
) -> None:
    """Every product of ``formats`` becomes one that looks its format up; batched ones keep the one that is planned.

    A product that another graph has under the same name is one with it: it has its formats, and the one that it is in.
    Without ``reports`` what products see is not kept: batches of an evaluation say nothing of the training.
    """
    fixed = [s for s in sites if s.name in formats and ops.tensor(s.node).dim() == 3]
    apply(gm, fixed, {s.name: formats[s.name] for s in fixed})
    rewriter = Rewriter(gm, (), {})
    for site in sites:
        f = formats.get(site.name)
        if f is None or ops.tensor(site.node).dim() == 3:
            continue
        shared = controller.products.get(site.name)
        options = shared.formats if shared is not None else choices(f.name)
        error, seconds = planned_error(plan, site.name)
        product = Product(site.name, site.instance, site.role, options, error, seconds)
        controller.register(product, ops.tensor(site.node).device)
        _replace(gm, rewriter, site, options, controller, reports)
    drop_dead_views(gm)


def _replace(
    gm: GraphModule,
    rewriter: Rewriter,
    site: Site,
    options: Sequence[str],
    controller: PrecisionController,
    reports: bool,
) -> None:
    old = site.node
    blocks = ",".join(grain(o, FORMATS["int8-blockwise"]) for o in (site.left, site.right))
    gradients = "".join(str(int(o.gradient)) for o in (site.left, site.right))
    with gm.graph.inserting_before(old):
        slot = live.read(gm, controller.state, slot_name(site.name))
        sides = [_side(rewriter, site, o) for o in (site.left, site.right)]
        made = rewriter.call(old, switch, *sides, slot, ",".join(options), blocks, gradients)
        rewriter.note(made, options[0])
    result, seen = rewriter.items(made, old, 2)
    if site.bias is not None:
        with gm.graph.inserting_before(old):
            result = rewriter.call(old, aten.add.Tensor, result, site.bias)
    old.replace_all_uses_with(result)
    rewriter.now[old] = result
    gm.graph.erase_node(old)
    if reports:
        live.update(gm, controller.state, seen_name(site.name), seen)
    else:
        gm.graph.erase_node(seen)


def _side(rewriter: Rewriter, site: Site, o: Operand) -> Node:
    """One side with its rows along the contraction: a view."""
    base = rewriter.now.get(o.base, o.base)
    return rewriter.call(site.node, aten.t.default, base) if o.turned else base
