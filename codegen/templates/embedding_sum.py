"""Triton that sums the rows of a gradient which have one index, and adds each sum to the row of a table.

The indices come sorted, each with the place that it had.  The program of the first of a run of equal ones walks the run,
``T`` rows at a time in fp32, and writes the row once; all others end at once.  No atomic operations: the sums are the
same on every run.  A sum is rounded to the table's dtype before it is added, as eager has it in memory.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

ROWS = 16
"""Of a run, that are read at once."""
COLUMNS = 256
"""Of a row, at most."""
WARPS = 4


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def embedding_sum(
    table, grad, index, place, count, columns, padding_idx, table_stride,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Table [V, D] += sums of grad [count, D]; index, place [count] int64, index sorted."""
    across = (columns + C - 1) // C
    first = tl.program_id(0) // across
    here = tl.load(index + first)
    before = tl.load(index + first - 1, mask=first > 0, other=-1)
    if (here != before) & (here != padding_idx):
        j = tl.program_id(0) % across * C + tl.arange(0, C)
        inside = j < columns
        total = tl.full([T, C], 0.0, tl.float32)
        start = first
        found = T
        while found == T:
            i = start + tl.arange(0, T)
            mine = tl.load(index + i, mask=i < count, other=-1) == here
            row = tl.load(place + i, mask=mine, other=0)
            read = mine[:, None] & inside[None, :]
            total += tl.load(grad + row[:, None] * columns + j[None, :], mask=read, other=0.0).to(tl.float32)
            found = tl.reduce(mine.to(tl.int32), 0, add)
            start += T
        at = table + here * table_stride + j
        value = tl.reduce(total, 0, add).to(table.dtype.element_ty).to(tl.float32)
        tl.store(
            at, (tl.load(at, mask=inside, other=0.0).to(tl.float32) + value).to(table.dtype.element_ty), mask=inside
        )


def constants(columns: int) -> dict[str, int]:
    """Tiles for rows of so many columns."""
    return {"T": ROWS, "C": min(COLUMNS, max(16, 1 << (columns - 1).bit_length()))}


def programs(count: int, columns: int) -> int:
    return count * -(-columns // constants(columns)["C"])
