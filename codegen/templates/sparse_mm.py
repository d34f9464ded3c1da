"""``y = x @ w.T`` for a packed 2:4 weight by ``mma.sp``, which Triton's own dot does not reach: a kernel in Gluon.

Lanes read the weight (``dsc.packed``) from memory straight into the registers in which the instruction wants it; x goes
through a ring of buffers in shared memory, filled ahead by cp.async.  One layout serves all operands, so that nothing
is shuffled in the loop.  For sm_80 and sm_90 (where wgmma would need descriptors that no inline assembly can make).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy as cp

ASM = (
    "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{t}.{t}.f32 "
    "{{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9,$10,$11}}, {{$16,$17,$18,$19}}, $12, 0x0;"
)
CONSTRAINTS = "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f"
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # until Triton 3.6


@dataclass(frozen=True)
class Tile:
    """What one block computes: ``16 warps strips`` columns of y for ``8 tokens`` rows."""

    warps: int = 4
    tokens: int = 8
    strips: int = 2
    steps: int = 4
    """Of 32 along K, by buffer."""
    buffers: int = 3

    @property
    def rows(self) -> int:
        return 8 * self.tokens

    @property
    def columns(self) -> int:
        return 16 * self.warps * self.strips

    @property
    def deep(self) -> int:
        """Along K."""
        return 32 * self.steps


LARGE, SMALL = Tile(), Tile(tokens=1)
FEW = 32
"""Rows up to which the small tile is used: there the bytes of the weight decide."""


def constants(tile: Tile, kind: str) -> Mapping[str, Any]:
    """The kernel's constants: layouts and the instruction, for ``kind`` bf16 or f16."""
    w, j, steps = tile.warps, tile.tokens, tile.steps
    warps, tokens = w.bit_length() - 1, j.bit_length() - 1
    accumulator = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], *([0, 1 << i, 0, 0] for i in range(tokens))],
        [[0, 0, 1 << i, 0] for i in range(5)],
        [[1 << i, 0, 0, 0] for i in range(warps)],
        [],
        [w, j, 32, 4],
    )
    fragment = gl.DistributedLinearLayout(
        [[0, 4], [0, 8], *([8 << i, 0] for i in range(tokens))],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[0, 0]] * warps,
        [],
        [8 * j, 16],
    )
    across = 4 * steps  # threads along K, 16 bytes each
    return {
        "ACC": accumulator,
        "FRAGMENT": fragment,
        "COPY": gl.BlockedLayout([1, 4], [32 // across, across], [w, 1], [1, 0]),
        "SHARED": gl.SwizzledSharedLayout(4, 1, 8 if steps > 1 else 4, [1, 0]),
        "ASM": ASM.format(t=kind),
        "W": w, "J": j, "S": tile.strips, "KS": steps, "NB": tile.buffers,
    }  # fmt: skip


@gluon.jit
def sparse_mm(
    values, meta, x, y, K, x_stride, y_stride,
    ACC: gl.constexpr, FRAGMENT: gl.constexpr, COPY: gl.constexpr, SHARED: gl.constexpr, ASM: gl.constexpr,
    W: gl.constexpr, J: gl.constexpr, S: gl.constexpr, KS: gl.constexpr, NB: gl.constexpr,
):  # fmt: skip
    """``values``, ``meta`` and ``x`` ([M, K/2]) as words of 32 bits, y [M, N]; whole tiles only."""
    BM: gl.constexpr = 8 * J
    BK: gl.constexpr = 16 * KS
    column, row = gl.program_id(0), gl.program_id(1) * BM
    ring = gl.allocate_shared_memory(gl.int32, [NB, BM, BK], SHARED)
    rows = row + gl.arange(0, BM, gl.SliceLayout(1, COPY))
    words = gl.arange(0, BK, gl.SliceLayout(0, COPY))
    source = x + rows[:, None] * x_stride + words[None, :]
    deep = K // 32
    stages = deep // KS
    A: gl.constexpr = gl.SliceLayout(1, ACC)  # [W, 32, 4]
    warp3 = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None, None]
    lane3 = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    word3 = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    warp2 = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None]
    lane2 = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :]
    first = gl.zeros([W, J, 32, 4], gl.float32, ACC)
    second = gl.zeros([W, J, 32, 4], gl.float32, ACC)
    strip = column * (W * S)
    for ahead in gl.static_range(NB - 1):
        cp.async_copy_global_to_shared(ring.index(ahead), source + ahead * BK, mask=ahead < stages)
        cp.commit_group()
    for stage in range(stages):
        cp.wait_group(NB - 2)
        barrier()
        later = stage + NB - 1
        cp.async_copy_global_to_shared(ring.index(later % NB), source + later * BK, mask=later < stages)
        cp.commit_group()
        buffer = ring.index(stage % NB)
        for step in gl.static_range(KS):
            b = buffer.slice(step * 16, 16, dim=1).load(FRAGMENT)
            b = gl.permute(gl.reshape(b, [J, 8, 4, 4]), [0, 1, 3, 2])
            b = gl.convert_layout(gl.reshape(b, [J, 32, 4]), gl.SliceLayout(0, ACC))
            b = gl.expand_dims(b, 0)
            k = stage * KS + step
            for t in gl.static_range(S):
                place3, place2 = (strip + warp3 * S + t) * deep + k, (strip + warp2 * S + t) * deep + k
                a = gl.expand_dims(gl.load(values + place3 * 128 + lane3 * 4 + word3), 1)
                e = gl.load(meta + place2 * 16 + lane2 // 4 * 2 + lane2 % 2)
                a4, b4 = gl.broadcast(a, b)
                e4, b4 = gl.broadcast(gl.expand_dims(gl.expand_dims(e, 2), 1), b4)
                if t == 0:
                    first = gl.inline_asm_elementwise(
                        ASM, CONSTRAINTS_, [a4, b4, e4, first], dtype=gl.float32, is_pure=True, pack=4
                    )
                else:
                    second = gl.inline_asm_elementwise(
                        ASM, CONSTRAINTS_, [a4, b4, e4, second], dtype=gl.float32, is_pure=True, pack=4
                    )
    warp4 = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, ACC))))[:, None, None, None]
    token4 = gl.arange(0, J, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, ACC))))[None, :, None, None]
    lane4 = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, ACC))))[None, None, :, None]
    word4 = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, ACC))))[None, None, None, :]
    m = row + token4 * 8 + lane4 % 4 * 2 + word4 % 2
    n = (strip + warp4 * S) * 16 + lane4 // 4 + word4 // 2 * 8
    gl.store(y + m * y_stride + n, first.to(y.dtype.element_ty))
    if S == 2:
        gl.store(y + m * y_stride + n + 16, second.to(y.dtype.element_ty))


CONSTRAINTS_ = gl.constexpr(CONSTRAINTS)
