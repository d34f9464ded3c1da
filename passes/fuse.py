"""Group nodes into kernels, by the bytes that it saves to compute them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from dsc.manager import Pass, Report
from dsc.notes import notes
from dsc.passes import epilogue
from dsc.passes.fuse_copy import duplicate
from dsc.passes.fuse_grow import grow, join_small
from dsc.passes.fuse_mark import apart, explain, mark
from dsc.passes.fuse_web import build
from dsc.target import Target

LAUNCH_SECONDS = 4e-6
"""Of one CUDA kernel; calls of C++ kernels in one sequence cost nothing worth counting."""


@dataclass(frozen=True)
class Fuse(Pass):
    """Note ``group`` on every node that a kernel of ours computes.

    1. Pointwise, creating, reducing and rowwise nodes start as groups of one; everything else stays with ATen.
    2. Two groups join, best saving first, if they read or write fewer bytes as one: a value passed on inside is not
       read again, nor written if nobody else wants it; an input that both read in the same order is read once.
    3. Only groups with a common loop nest join (``domain.meet``): reductions over other axes do not; a group that is
       merely read by the other, at any index, joins if it reduces nothing (it is computed where it is read).
    4. Groups do not join if a path between them leaves and comes back: that would be a cycle.
    5. A producer that costs fewer bytes to compute again in each reader than to write and read is copied into them.
    6. Whole reductions with nothing parallel left do not join what follows them: that would run on one core.
    7. Two small groups over the same space join to save a launch, on targets where launches cost.
    8. A lone copy, cat or fill that ATen does as well stays with ATen.
    9. Groups that only share an input join if they stand near each other: of two layers, they would keep the operands
       of both alive, and if the input is no trifle.
    10. A sum of all rows (``columns``; None: on CUDA) joins a group that reduces these rows and reads the same, if rows
        fit the registers of a program and are many: partial sums are kept there and added up by a second launch.
    11. A write into an input (``copy_``) joins the group that computes the value, which then stores it there, if the
        group reduces nothing and reads that input in no other order.
    12. On CUDA a product of matrices takes what follows it into its kernel where that is modelled to be faster than the
        library's product and a kernel (``gemm=false``: never; see ``dsc.passes.epilogue``).
    """

    name: ClassVar[str] = "fuse"
    gives: ClassVar[frozenset[str]] = frozenset({"group"})

    max_nodes: int = 64
    """Larger groups are not made, to bound compile time and registers."""
    columns: bool | None = None
    """Whether kernels that reduce rows may sum over all rows too; None: on CUDA."""
    gemm: bool = True
    """Whether products of matrices may be generated on CUDA."""

    def run(self, gm: GraphModule, target: Target) -> Report:
        web = build(gm)
        web.columns = self.columns if self.columns is not None else target.kind == "cuda"
        remarks = list(web.remarks)
        grow(web, self.max_nodes)
        if target.kind == "cuda":
            join_small(web, self.max_nodes, LAUNCH_SECONDS * target.bandwidth)
        parted = list(apart(web, self.max_nodes))
        duplicate(gm, web, self.max_nodes)
        remarks += mark(web)
        remarks += explain(web, parted)
        if self.gemm and target.kind == "cuda":
            remarks += epilogue.absorb(gm, target, self.max_nodes)
        kernels = {group for n in gm.graph.nodes if (group := notes(n).group) is not None}
        return Report(bool(web.live()), tuple(remarks), (("kernels", float(len(kernels))),))
