"""Integers wrap at their width, divide and shift as eager does, and keep their signs.

Generated code that promotes to a wider type must come back to the narrow one where eager stores it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.case import Case

SMALL = torch.tensor([0, -1, 11, 127, -128, 90, -100], dtype=torch.int8)
BYTES = torch.tensor([0, 1, 6, 127, 128, 200, 255], dtype=torch.uint8)


def uint8_wraparound() -> Case:
    """pytorch/pytorch#105264, #187018, #93829: 8-bit sums, negations and products before wider uses."""

    def fn(a: Tensor, b: Tensor) -> Any:
        s, n, c = a + a, -a, b * b
        return (
            s.to(torch.int32), n < 9, torch.cat([-a.abs(), s]).sum(), (c - 1).float(), b.abs() >= 0,
            a - b.to(torch.uint8), ~a, a << 1,
        )  # fmt: skip

    return Case(fn, [(BYTES, SMALL), (BYTES.repeat(9), SMALL.repeat(9))])


def int32_wrap_before_widen() -> Case:
    """pytorch/pytorch#190764, #108520: 32-bit sums and products wrap before they are widened or compared."""

    def fn(x: Tensor, y: Tensor) -> Any:
        p = x * y
        return (x + x).to(torch.int64), p.to(torch.int64) // 3, (x - y).double(), p > 0, (x.abs() * 2).long()

    x = torch.tensor([2**31 - 1, -(2**31), 65536, 46341, -7], dtype=torch.int32)
    y = torch.tensor([1, 1, 65536, 46341, 2**31 - 1], dtype=torch.int32)
    return Case(fn, [(x, y), (x.repeat(13), y.repeat(13))])


def int16_chains() -> Case:
    """Chains of 16-bit arithmetic, negation and comparison that would differ if kept in 32 bits."""

    def fn(x: Tensor, y: Tensor) -> Any:
        a = x * y + x
        return a, a > x, (-x - 1).to(torch.int64), (a * a).sum(), torch.where(a < 0, a, y) + y, a.to(torch.uint8)

    x = torch.tensor([32767, -32768, 300, -300, 181, 0], dtype=torch.int16)
    return Case(fn, [(x, x.flip(0)), (x.repeat(11), x.flip(0).repeat(11))])


def int64_index_arithmetic() -> Case:
    """pytorch/pytorch#175966, #183901: index arithmetic beyond 32 bits."""

    def fn(rows: Tensor, cols: Tensor) -> Any:
        r = torch.arange(rows.shape[0], dtype=torch.int64)
        big = torch.tensor([1_700_000_000], dtype=torch.int64)
        flat = r[:, None] * 3_000_000_019 + torch.arange(cols.shape[0]) * 65537
        return r * big, flat, flat % 1009, (r * big).to(torch.float64).sum()

    return Case(fn, [(torch.zeros(11), torch.zeros(5)), (torch.zeros(300), torch.zeros(2))], dynamic=False)


def int64_wraps_and_compares_exactly() -> Case:
    """64-bit values beyond 2^53 must not pass through a double."""

    def fn(x: Tensor) -> Any:
        return (
            x + 1,
            x * 3,
            x == x + 1,
            x > 2**53,
            x.sum(),
            x.max(),
            x.amin(),
            torch.where(x > 0, x, -x),
            x.clamp(-(2**60), 2**60),
        )

    return Case(fn, [(torch.tensor([2**53, 2**53 + 1, -(2**63), 2**63 - 1, -(2**53) - 1]),)])


def division_signs_and_minimum() -> Case:
    """pytorch/pytorch#184406: floor, truncation and remainder of negative operands."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return (
            torch.floor_divide(x, y), torch.remainder(x, y), torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc"),
            x / y, x % 3, x // -4, torch.div(x, y, rounding_mode="floor"),
        )  # fmt: skip

    x = torch.tensor([-7, 7, -7, 7, 0], dtype=torch.int32)
    y = torch.tensor([2, -2, -2, 2, -3], dtype=torch.int32)
    return Case(fn, [(x, y), (x.to(torch.int8), y.to(torch.int8)), (x.long(), y.long()), (x.float(), y.float())])


def minimum_divided_by_minus_one() -> Case:
    """pytorch/pytorch#184406: the one quotient that does not fit must not kill the process."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return torch.floor_divide(x, y) + 1

    x = torch.tensor([-(2**31), 10, -10, 5] * 4, dtype=torch.int32)
    y = torch.tensor([-1, 3, 3, -5] * 4, dtype=torch.int32)
    return Case(fn, [(x[:1], y[:1]), (x, y)])


def shifts_and_bits() -> Case:
    """Shifts by the width and more, of negative numbers, and bitwise calls with numbers."""

    def fn(x: Tensor, n: Tensor) -> Any:
        return x << n, x >> n, x & 0x55, x | 1, x ^ n, ~x, x << 1, x >> 1, (x << 3) >> 3

    n = torch.tensor([0, 1, 7, 2, 3, 31, 5], dtype=torch.int8)
    return Case(fn, [(SMALL, n), (SMALL.int() * 1000003, n.int()), (BYTES, n.to(torch.uint8))])


def absolute_value_sign_and_extremes() -> Case:
    """``abs`` of the minimum, ``sign``, ``min`` and ``max`` of signed and unsigned bytes."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return (
            x.abs(),
            x.sign(),
            torch.maximum(x, y),
            torch.minimum(x, y),
            x.amax(),
            x.amin(),
            x.clamp(3, 100),
            x.square(),
        )

    return Case(fn, [(SMALL, SMALL.flip(0)), (BYTES, BYTES.flip(0))])


def sums_and_products() -> Case:
    """Reductions of narrow integers run in 64 bits, or in the dtype that is asked for."""

    def fn(x: Tensor) -> Any:
        return (
            x.sum(),
            x.prod(),
            x.sum(dtype=torch.int8),
            x.cumsum(0),
            x.prod(dtype=torch.int32),
            x.double().mean(),
            (x > 0).sum(),
        )

    return Case(fn, [(SMALL[1:].repeat(5),), (BYTES[1:].repeat(5),), (SMALL[1:].int() * 999983,)])


def powers() -> Case:
    """Integer powers wrap; negative exponents of integers are an error of their own."""

    def fn(x: Tensor) -> Any:
        return x**2, x**3, x**0, 2 ** (x & 15), torch.pow(x, torch.tensor([3], dtype=x.dtype))

    return Case(fn, [(SMALL,), (SMALL.int(),), (SMALL.long() * 10**5,)])


def mixed_integer_and_float() -> Case:
    """Promotion between integer tensors, bool tensors, float tensors, 0-dim tensors and numbers."""

    def fn(i: Tensor, b: Tensor, f: Tensor, z: Tensor) -> Any:
        return i + b, i * 2.5, b + b, b * 3, i + z, f.half() + z, i / 2, i + f, b & (i > 3), b ^ (i > 0), i.mul(True)

    return Case(fn, [(SMALL, SMALL > 0, SMALL.float() / 3, torch.tensor(1.5, dtype=torch.float64))])


def floats_out_of_range_into_integers() -> Case:
    """Casts of numbers that an integer cannot hold, by ``to`` and by writes: whatever ATen makes of them."""

    def fn(i: Tensor, j: Tensor, x: Tensor) -> Any:
        big = x * 3e10
        a = i.copy_(big.sum())
        b = j.mT.copy_(big)
        return a, b, big.to(torch.int16), big[:, 0].to(torch.int64)

    x = torch.tensor([[1.0, float("nan"), -1.0], [float("inf"), 2.0, 0.5]])
    blank = torch.zeros(2, 3, dtype=torch.int32)
    return Case(fn, [(blank, blank.t().contiguous(), x), (blank + 1, blank.t() + 1, x.clamp(-1, 1).nan_to_num())])


CASES = (
    uint8_wraparound,
    int32_wrap_before_widen,
    int16_chains,
    int64_index_arithmetic,
    int64_wraps_and_compares_exactly,
    division_signs_and_minimum,
    minimum_divided_by_minus_one,
    shifts_and_bits,
    absolute_value_sign_and_extremes,
    sums_and_products,
    powers,
    mixed_integer_and_float,
    floats_out_of_range_into_integers,
)
