"""Products of groups of rows, as mixtures of experts have them, by the kernel that is modelled faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from dsc import cost, gemm_tiles, grouped, ops  # noqa: F401  # registers the operator
from dsc.domain import shape
from dsc.manager import Pass, Remark, Report
from dsc.passes.canonicalize import Rewriter
from dsc.passes.gemm_model import TEMPLATE
from dsc.passes.triton_missing import without_triton
from dsc.target import Target
from dsc.torch_shim import optimization_hint

GROUPED = "_grouped_mm.default"
WAIT = 20e-6
"""Seconds that the device is idle while the host waits for the groups' ends and starts again, an estimate."""
MOST = 128
"""Groups whose ends a program compares, each with each."""


@dataclass(frozen=True)
class Grouped(Pass):
    """On CUDA targets, ``_grouped_mm`` with offsets -> ``dsc::grouped_mm`` (Triton) where that is modelled faster.

    1. Before sm_90 ATen waits for the offsets and launches a product for each group; Triton's kernel reads them on the device.
       From sm_90 on ATen has a grouped kernel of its own, which is taken to be faster.
    2. Forms: groups of rows, of columns, of the contraction (forward, and both gradients).  The sums are fp32, rounded once,
       as ATen's.
    3. Does not fire: without Triton; other dtypes than bf16, biases, sides that are not whole 16 bytes, no offsets, and where ``gain`` is not
       reached.
    """

    name: ClassVar[str] = "grouped"
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"
    on_inference: ClassVar[bool] = True

    gain: float = 1.1

    def run(self, gm: GraphModule, target: Target) -> Report:
        if target.kind != "cuda":
            return Report(False)
        if (missing := without_triton()) is not None:
            return Report(False, (missing,))
        rw = Rewriter(gm)
        found = [n for n in gm.graph.nodes if n.op == "call_function" and ops.name_of(n) == GROUPED]
        remarks = tuple(self.decide(rw, n, target) for n in found)
        return Report(any(r.verdict == "did" for r in remarks), remarks)

    def decide(self, rw: Rewriter, node: Node, target: Target) -> Remark:
        if (why := refuses(node)) is not None:
            return Remark(node.name, "skipped", f"stays with ATen: {why}")
        a, b, offs = (ops.operand(node, i) for i in range(3))
        old, new = aten(node, target), triton(node, target)
        words = f"modelled {new * 1e6:,.1f} us in one launch, {old * 1e6:,.1f} us by ATen"
        if new * self.gain > old:
            return Remark(node.name, "skipped", f"stays with ATen: {words}")
        with rw.gm.graph.inserting_before(node):
            made = rw.call(node, torch.ops.dsc.grouped_mm.default, a, b, offs)
        node.replace_all_uses_with(made)
        rw.gm.graph.erase_node(node)
        return Remark(made.name, "did", words)


def refuses(node: Node) -> str | None:
    """Why the kernel cannot have the product, in a few words."""
    given = cost.arguments(node)
    if given.get("bias") is not None or given.get("out_dtype") not in (None, torch.bfloat16):
        return "a bias, or a result of another dtype"
    if not isinstance(given.get("offs"), Node):
        return "no offsets: it is a batch"
    a, b, offs = (ops.tensor(ops.operand(node, i)) for i in range(3))
    if not all(t.dtype == torch.bfloat16 and ops.is_plain(t) for t in (a, b)) or offs.dtype != torch.int32:
        return "operands that are not bf16"
    out = ops.tensor(node)
    if not offs.is_contiguous() or not out.is_contiguous():
        return "sides that are not whole 16 bytes"
    if not isinstance(offs.shape[0], int) or offs.shape[0] > MOST:
        return f"more than {MOST} groups"
    return None


def sizes(node: Node) -> tuple[int, int, int, int]:
    """Groups, and the sides m, n, k of the product of a group that is as long as the others."""
    a, b, offs = (tuple(int(optimization_hint(e)) for e in shape(ops.tensor(ops.operand(node, i)))) for i in range(3))
    groups = max(offs[0], 1)
    if len(a) == len(b) == 2:
        return groups, a[0], b[1], max(a[1] // groups, 1)
    if len(a) == 2:
        return groups, max(a[0] // groups, 1), b[-1], a[1]
    return groups, a[1], max(b[1] // groups, 1), a[2]


def aten(node: Node, target: Target) -> float:
    """Seconds of ATen's product: one by one before sm_90."""
    groups, m, n, k = sizes(node)
    share = gemm_tiles.share(gemm_tiles.best(groups, m, n, "bf16"), groups, m, n, target.sms)
    launch = cost.LAUNCH_SECONDS["cuda"]
    if (target.capability or (9, 0)) >= (9, 0):
        return cost.roofline({node: cost.flops(node) / share}, cost.bytes_moved(node), target) + launch
    tile, parts = gemm_tiles.chosen(1, m, n, k, "bf16")
    alone = gemm_tiles.share(tile, parts, m, n, target.sms)
    return cost.roofline({node: cost.flops(node) / alone}, cost.bytes_moved(node), target) + WAIT + groups * launch


def triton(node: Node, target: Target) -> float:
    """Seconds of the kernel."""
    groups, m, n, _ = sizes(node)
    share = gemm_tiles.share(gemm_tiles.best(groups, m, n, "bf16"), groups, m, n, target.sms)
    factor = TEMPLATE.get(target.capability or (9, 0), min(TEMPLATE.values()))
    return cost.roofline({node: cost.flops(node) / share / factor}, cost.bytes_moved(node), target)
