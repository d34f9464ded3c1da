"""The tiles that a product of matrices may have, and what a launch with each is modelled to take."""

from __future__ import annotations

from dataclasses import replace

from dsc import gemm_tiles
from dsc.codegen.candidates import Code
from dsc.codegen.kernel import NBYTES, Kernel, product
from dsc.codegen.roofline import CACHE
from dsc.codegen.schedule import Schedule
from dsc.codegen.triton import emit
from dsc.codegen.triton_nest import cuttable, evaluate, extent, longest, nest, rows_computed, with_tile
from dsc.cost import BANDWIDTH_EFFICIENCY, EFFICIENCY, LAUNCH_SECONDS
from dsc.target import Target

CUT = 2
"""Schedules with a contraction in parts that are tried."""


def schedules(kernel: Kernel, default: Schedule, capability: tuple[int, int] | None = None) -> tuple[Schedule, ...]:
    """The default first, then the other tiles of the list, then those whose contraction is cut, where tiles are few.

    Then, from sm_90 on, the default with its operands loaded by descriptors, where it has enough tiles: the model does not
    tell them apart, so that only a measurement takes them.  Sizes are numbers.
    """
    dot = product(kernel)
    assert dot is not None
    batch, m, n, k = sizes(kernel)
    form, own = str(dot.attr), nest(kernel)
    found = [with_tile(t) for t in gemm_tiles.ranked(batch, m, n, form, rows_computed(own))]
    if cuttable(own) and gemm_tiles.tiles(gemm_tiles.best(batch, m, n, form), batch, m, n) < gemm_tiles.SMS:
        found += [with_tile(*x) for x in gemm_tiles.split(batch, m, n, k, form, longest(own))[:CUT]]
    by_descriptor = replace(default, tma=True)
    if (
        capability is not None
        and capability >= (9, 0)
        and not default.parts
        and gemm_tiles.tiles(gemm_tiles.best(batch, m, n, form), batch, m, n) >= gemm_tiles.SMS
        and ".make_tensor_descriptor(" in emit(kernel, by_descriptor)
    ):
        found.append(by_descriptor)
    return tuple(dict.fromkeys([default, *found]))


def sizes(kernel: Kernel) -> tuple[int, int, int, int]:
    """Batch, rows, columns, terms of a sum."""
    n = nest(kernel)
    batch, xn, rn, kn = (evaluate(e, {}) for e in (extent(n.batch), n.xn, n.rn, extent(n.summed)))
    return batch, xn, rn, kn


def seconds(kernel: Kernel, s: Schedule, code: Code, target: Target, moved: int) -> float:
    """The slower of arithmetic, at the share of the rate that the tile reaches, and of ``moved`` bytes; rows that are read in
    several passes are read from the second-level cache, by each column of tiles.  A contraction in parts has two launches,
    and its sums go through that cache.
    """
    dot = product(kernel)
    assert dot is not None
    form, (batch, m, n, k) = str(dot.attr), sizes(kernel)
    tile = gemm_tiles.Tile(s.XB, s.RB, s.KB, s.num_warps, s.num_stages)
    peak = target.peak.get({"f32": "fp32", "f16": "fp16"}.get(form, form), target.peak["fp32"])
    rate = peak * EFFICIENCY["matmul"] * gemm_tiles.share(tile, batch * max(s.parts, 1), m, n, target.sms)
    along = {a.name for a in nest(kernel).summed}
    rows = {v.access[0] for v in kernel.lets if v.op == "load" and v.axes & along}
    again = sum((code.passes.get(b, 1) - 1) * batch * m * k * NBYTES[kernel.buffer(b).dtype] for b in rows)
    cache = again * -(-n // s.RB) / (target.bandwidth * CACHE)
    memory = moved / (target.bandwidth * BANDWIDTH_EFFICIENCY)
    launches = LAUNCH_SECONDS[target.kind]
    if s.parts:
        cache += gemm_tiles.workspace(s.parts, batch, m, n) / (target.bandwidth * CACHE)
        launches *= 2
    return max(2.0 * batch * m * n * k / rate, memory) + cache + launches
