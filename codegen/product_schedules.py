"""The tiles that a product of matrices may have, and what a launch with each is modelled to take."""

from __future__ import annotations

from dataclasses import replace

from dsc import gemm_tiles
from dsc.codegen import triton_stream
from dsc.codegen.candidates import Code
from dsc.codegen.kernel import NBYTES, Kernel, product
from dsc.codegen.roofline import CACHE, LATENCY, START
from dsc.codegen.schedule import Schedule
from dsc.codegen.triton import emit
from dsc.codegen.triton_nest import cuttable, draws, evaluate, extent, longest, nest, rows_computed, with_tile
from dsc.cost import BANDWIDTH_EFFICIENCY, EFFICIENCY, LAUNCH_SECONDS
from dsc.target import Target

CUT = 2
"""Schedules with a contraction in parts that are tried."""
WAVES = 4
"""Waves of tiles from which on a last one that is partly filled costs little."""
FULL = 8
"""Warps that keep the matrix units of a multiprocessor busy."""
LARGE = Schedule(128, 256, 8, 3, KB=64)
"""The tile of persistent kernels in 16 bits that loads the least for each product."""


def schedules(kernel: Kernel, default: Schedule, target: Target | None = None) -> tuple[Schedule, ...]:
    """The default first, then the other tiles of the list, then those whose contraction is cut, where tiles are few.

    For a GPU, also those whose steps are shared evenly (``sharing``), and where the default has more tiles than there are multiprocessors (``walking``): the same as a persistent
    kernel, and from sm_90 on both with their operands loaded by descriptors.  Sizes are numbers.
    """
    dot = product(kernel)
    assert dot is not None
    batch, m, n, k = sizes(kernel)
    form, own = str(dot.attr), nest(kernel)
    lean = draws(kernel)
    found = [with_tile(t) for t in gemm_tiles.ranked(batch, m, n, form, rows_computed(own), lean=lean)]
    if cuttable(own) and gemm_tiles.tiles(gemm_tiles.best(batch, m, n, form), batch, m, n) < gemm_tiles.SMS:
        found += [with_tile(*x) for x in gemm_tiles.split(batch, m, n, k, form, longest(own), lean=lean)[:CUT]]
    if target is not None and not default.parts:
        found += walking(kernel, default, target)
    if target is not None and cuttable(own):
        found += sharing(kernel, target)
    return tuple(dict.fromkeys([default, *found]))


def walking(kernel: Kernel, default: Schedule, target: Target) -> list[Schedule]:
    """The default, and a larger tile, as persistent kernels, by descriptors, and both.

    1. A kernel that reduces rows before it multiplies does not walk: its loops cannot be made one.  Nor does one in fp32, of
       which a multiprocessor holds several programs: it has no matrix unit.
    2. The tiles of the default are more than the programs, a multiprocessor's worth of eight warps each.
    3. Descriptors are for sm_90, and operands that they can describe; the model does not tell them from loads, so that only
       a measurement takes them.  Of the larger tile only they leave room in the registers.
    """
    dot = product(kernel)
    assert dot is not None
    batch, m, n, _ = sizes(kernel)
    programs = target.sms * max(1, FULL // default.num_warps)
    out = []
    joined = dot.attr != "f32" and not any(v.op == "reduce" for v in kernel.lets)
    if joined and tiles_of(default, batch, m, n) > programs:
        out.append(replace(default, programs=programs))
    by_descriptor = replace(default, tma=True)
    if (
        target.capability is not None
        and target.capability >= (9, 0)
        and tiles_of(default, batch, m, n) >= target.sms
        and ".make_tensor_descriptor(" in emit(kernel, by_descriptor)
    ):
        out += [by_descriptor, *(replace(s, tma=True) for s in out)]
        large = replace(LARGE, tma=True, programs=target.sms)
        if joined and not draws(kernel) and tiles_of(large, batch, m, n) > large.programs:
            out.append(large)
    return out


def sharing(kernel: Kernel, target: Target) -> list[Schedule]:
    """Tiles whose steps as many programs share evenly as walk (``triton_stream``), best first: of few tiles that leave a last
    wave partly filled, with enough steps for every program.
    """
    dot = product(kernel)
    assert dot is not None
    batch, m, n, _ = sizes(kernel)
    found = []
    for t in gemm_tiles.ranked(batch, m, n, str(dot.attr), lean=draws(kernel)):
        count = gemm_tiles.tiles(t, batch, m, n)
        s = replace(with_tile(t), streams=target.sms * max(1, FULL // t.warps))
        h = triton_stream.share(kernel, s, s.streams)
        few = count % target.sms and count < WAVES * target.sms
        if few and h.longest >= gemm_tiles.LEAST_STEPS and h.total * s.streams < 2**31:
            found.append((share_of_rate(kernel, s, target), replace(s, parts=h.pieces)))
    return [s for _, s in sorted(found, key=lambda x: -x[0])[:CUT]]


def share_of_rate(kernel: Kernel, s: Schedule, target: Target) -> float:
    """Of the rate of good kernels, what the multiprocessors reach that have the most to do."""
    batch, m, n, k = sizes(kernel)
    tile = gemm_tiles.Tile(s.XB, s.RB, s.KB, s.num_warps, s.num_stages)
    if not s.streams:
        return gemm_tiles.share(tile, batch * max(s.parts, 1), m, n, target.sms)
    steps = triton_stream.share(kernel, s, s.streams).longest * -(-s.streams // target.sms)
    return batch * m * n * k / (target.sms * steps * s.XB * s.RB * s.KB) * gemm_tiles.reuse(tile)


def tiles_of(s: Schedule, batch: int, m: int, n: int) -> int:
    return batch * -(-m // s.XB) * -(-n // s.RB)


def sizes(kernel: Kernel) -> tuple[int, int, int, int]:
    """Batch, rows, columns, terms of a sum."""
    n = nest(kernel)
    batch, xn, rn, kn = (evaluate(e, {}) for e in (extent(n.batch), n.xn, n.rn, extent(n.summed)))
    return batch, xn, rn, kn


def seconds(kernel: Kernel, s: Schedule, code: Code, target: Target, moved: int) -> float:
    """The slower of arithmetic, at the share of the rate that the tile reaches, and of ``moved`` bytes; rows that are read in
    several passes are read from the second-level cache, by each column of tiles.  A contraction in parts has two launches,
    and its sums go through that cache.

    A program starts, and waits for its first operands, while nothing is multiplied, unless the multiprocessor holds another:
    once for each wave of programs, or once in all where programs walk the tiles.
    """
    dot = product(kernel)
    assert dot is not None
    form, (batch, m, n, k) = str(dot.attr), sizes(kernel)
    tile = gemm_tiles.Tile(s.XB, s.RB, s.KB, s.num_warps, s.num_stages)
    peak = target.peak.get({"f32": "fp32", "f16": "fp16"}.get(form, form), target.peak["fp32"])
    rate = peak * EFFICIENCY["matmul"] * share_of_rate(kernel, s, target)
    along = {a.name for a in nest(kernel).summed}
    rows = {v.access[0] for v in kernel.lets if v.op == "load" and v.axes & along}
    again = sum((code.passes.get(b, 1) - 1) * batch * m * k * NBYTES[kernel.buffer(b).dtype] for b in rows)
    cache = again * -(-n // s.RB) / (target.bandwidth * CACHE)
    memory = moved / (target.bandwidth * BANDWIDTH_EFFICIENCY)
    launches = LAUNCH_SECONDS[target.kind]
    waves = -(-gemm_tiles.tiles(tile, batch * max(s.parts, 1), m, n) // target.sms)
    waits = (1 if s.programs or s.streams or code.blocks > 1 else waves) * (START + LATENCY)
    if s.parts:
        cache += gemm_tiles.workspace(s.parts, batch, m, n) / (target.bandwidth * CACHE)
        launches *= 2
    return max(2.0 * batch * m * n * k / rate, memory) + cache + waits + launches
