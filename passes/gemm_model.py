"""How long a product of matrices takes, by the library and as a generated kernel with what comes before and after.

Arithmetic runs at the library's rate times the share of it that the best tile reaches (``dsc.gemm_tiles``), of a
generated kernel times ``TEMPLATE``; bytes and launches count as everywhere (``dsc.cost``).  What is computed of the
rows is computed by every tile of them, and read from the L2 cache once for each pass over a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from dsc import cost, gemm_tiles, ops
from dsc.products import Product
from dsc.target import Target

TEMPLATE: Mapping[tuple[int, int], float] = {(8, 0): 0.9, (9, 0): 0.75}
"""Compute capability -> share of the library's rate that generated 16-bit and tf32 products are taken to reach: an estimate,
of Triton without TMA and warps of several kinds; not measured."""
FP32 = 0.5
"""The same of products in fp32, which have no matrix unit."""
CACHE = 2.0
"""Bandwidth of the L2 cache over that of the memory: an estimate."""
STEPS = 8
"""Instructions for an element of a row, for each node that computes it on the way to the product."""
PASSES: Mapping[str, int] = {"rowwise": 2, "reduction": 1}
"""Kind of a node -> passes over a row before the product's own: a norm's mean and variance."""


def library(p: Product, target: Target) -> float:
    """Seconds of the product alone, by cuBLAS, on its best tile."""
    return _arithmetic([p.node], p, target, 1.0)


def generated(nodes: Sequence[Node], p: Product, target: Target, rows: Sequence[Node] = ()) -> float:
    """Seconds of one kernel for the product and all else in ``nodes``, of which ``rows`` are computed of its rows."""
    factor = FP32 if p.form == "f32" else TEMPLATE.get(target.capability or (9, 0), min(TEMPLATE.values()))
    return _arithmetic(nodes, p, target, factor, rows) + (_again(p, target, rows) if rows else 0.0)


def _arithmetic(nodes: Sequence[Node], p: Product, target: Target, factor: float, rows: Sequence[Node] = ()) -> float:
    """The roofline, launch included, of a contraction in parts where those are modelled to be faster."""
    batch, m, n, k = p.sizes
    lean = any(ops.name_of(x) == "dsc.keep.default" for x in nodes)
    tile, parts = gemm_tiles.chosen(batch, m, n, k, p.form, lean=lean)
    if rows:
        tile, parts = gemm_tiles.best(batch, m, n, p.form, True), 1
    work = {x: cost.flops(x) for x in nodes}
    for x in rows:
        work[x] *= STEPS * -(-n // tile.n)
    work[p.node] /= gemm_tiles.share(tile, batch * parts, m, n, target.sms) * factor
    whole = cost.roofline(work, cost.bytes_of_group(nodes), target)
    if parts == 1:
        return whole
    through_cache = gemm_tiles.workspace(parts, batch, m, n) / (CACHE * target.bandwidth)
    return whole + through_cache + cost.LAUNCH_SECONDS[target.kind]


def _again(p: Product, target: Target, rows: Sequence[Node]) -> float:
    """Seconds of the reads beyond those that a plain product makes of the same operand."""
    batch, m, n, _ = p.sizes
    passes = 1 + max(PASSES.get(ops.info(x).kind, 0) for x in rows)
    inside = set(rows)
    written = sum(cost.stored_bytes(ops.tensor(x)) for x in rows if cost.read_outside(x, inside | {p.node}))
    plain = cost.stored_bytes(ops.tensor(p.a))
    read = cost.bytes_of_group(rows) - written - (0 if p.node in inside else plain)
    columns = -(-n // gemm_tiles.best(batch, m, n, p.form, True).n)
    return max(0.0, passes * read - plain) * columns / (CACHE * target.bandwidth)


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
