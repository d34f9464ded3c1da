"""Attention over sequences of any length: its kernels in Triton's interpreter, and their machine code for both GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dsc.codegen.cubin import LIMITS, KernelFacts, compile_source
from dsc.codegen.templates import flash_attention_run as runs
from dsc.codegen.templates import varlen_run
from dsc.codegen.templates.varlen_ops import source
from dsc.codegen.triton import Schedule
from dsc.codegen.triton_run import interpreted

UNEVEN = (0, 0, 40, 41, 60, 60, 95), (0, 7, 40, 48, 50, 50, 100)
"""Lengths of 0, 1 and others; queries without keys, keys without queries, more of either."""


def run(
    name: str, programs: int, arguments: Sequence[object], constants: Mapping[str, object], tile: runs.Tile
) -> None:
    interpreted(source(name), name)(programs, arguments, constants, Schedule())  # type: ignore[arg-type]


def small(name: str, width: int, itemsize: int) -> runs.Tile:
    return runs.Tile(32, 1, 4, 1) if name == "products" else runs.Tile(16, 32, 4, 1)


@dataclass(frozen=True)
class Case:
    q_ends: tuple[int, ...] = UNEVEN[0]
    k_ends: tuple[int, ...] = UNEVEN[1]
    heads: int = 2
    shared: int = 1
    width: int = 8
    left: int = -1
    right: int = -1
    from_end: bool = True
    dtype: torch.dtype = torch.float32
    spare: int = 0
    """Rows after the last sequence."""

    def operands(self) -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        kv = self.heads // self.shared
        rows, columns = self.q_ends[-1] + self.spare, self.k_ends[-1] + self.spare
        shapes = [(rows, self.heads), (columns, kv), (columns, kv), (rows, self.heads)]
        return [torch.randn(*s, self.width, generator=g).to(self.dtype) for s in shapes]

    @property
    def settings(self) -> tuple[Tensor, Tensor, int, int, bool, float]:
        ends = [torch.tensor(e, dtype=torch.int32) for e in (self.q_ends, self.k_ends)]
        return ends[0], ends[1], self.left, self.right, self.from_end, 0.3


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Sequence by sequence in float64: out, sums of rows, and the three gradients."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    outs, sums = [], []
    for (a, b), (c, d) in zip(pairwise(case.q_ends), pairwise(case.k_ends)):
        mine, keys, values = leaves[0][a:b], leaves[1][c:d], leaves[2][c:d]
        keys, values = (x.repeat_interleave(case.shared, 1) for x in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", mine, keys) * 0.3
        last = torch.arange(b - a)[:, None] + ((d - c) - (b - a) if case.from_end else 0)
        j = torch.arange(d - c)
        hidden = torch.zeros(b - a, d - c, dtype=torch.bool)
        if case.right >= 0:
            hidden |= j > last + case.right
        if case.left >= 0:
            hidden |= j < last - case.left
        blind = hidden.all(-1)[None, :, None]
        weights = torch.softmax(scores.masked_fill(hidden & ~blind, float("-inf")), -1).masked_fill(blind, 0.0)
        outs.append(torch.einsum("hij,jhd->ihd", weights, values))
        total = torch.logsumexp(scores.masked_fill(hidden, float("-inf")), -1)
        sums.append(total.masked_fill(blind[..., 0], float("inf")))
    out, given = torch.cat(outs), grad[case.q_ends[0] : case.q_ends[-1]].double()
    return [out.detach(), torch.cat(sums, -1).detach(), *torch.autograd.grad(out, leaves, given)]


CASES = {
    "everything": Case(),
    "causal from the end, shared heads": Case(heads=4, shared=2, right=0),
    "causal from the start": Case(right=0, from_end=False),
    "a window to the left, a width that is no power of two": Case(left=5, right=0, width=24),
    "a window both ways": Case(left=7, right=3),
    "a window to the right": Case(right=4),
    "fp16": Case(right=0, width=16, dtype=torch.float16),
    "one sequence": Case((0, 33), (0, 33), right=0),
    "rows before and after": Case((3, 20, 50), (5, 21, 40), right=0, spare=9),
}


@pytest.mark.parametrize("name", CASES)
def test_as_each_sequence_alone(name: str) -> None:
    case = CASES[name]
    q, k, v, grad = case.operands()
    want = exact(case, q, k, v, grad)
    close = {"atol": 2e-3, "rtol": 2e-3} if case.dtype == torch.float16 else {"atol": 5e-6, "rtol": 1e-5}
    rows, columns = slice(case.q_ends[0], case.q_ends[-1]), slice(case.k_ends[0], case.k_ends[-1])
    out, sums = varlen_run.forward(run, small, q, k, v, *case.settings)
    torch.testing.assert_close(out[rows].double(), want[0], **close)
    torch.testing.assert_close(sums[:, rows].double(), want[1], atol=1e-5, rtol=1e-5)
    got = varlen_run.backward(run, small, grad, q, k, v, out, sums, *case.settings)
    for mine, true, at in zip(got, want[2:], (rows, columns, columns)):
        torch.testing.assert_close(mine[at].double(), true[at], **close)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_on_a_cpu(name: str) -> None:
    case = CASES[name]
    q, k, v, grad = case.operands()
    want = exact(case, q, k, v, grad)
    close = {"atol": 2e-3, "rtol": 2e-3} if case.dtype == torch.float16 else {"atol": 5e-6, "rtol": 1e-5}
    rows, columns = slice(case.q_ends[0], case.q_ends[-1]), slice(case.k_ends[0], case.k_ends[-1])
    out, sums = torch.ops.dsc.varlen_attention(q, k, v, *case.settings)
    torch.testing.assert_close(out[rows].double(), want[0], **close)
    torch.testing.assert_close(sums[:, rows].double(), want[1], atol=1e-5, rtol=1e-5)
    got = torch.ops.dsc.varlen_attention_backward(grad, q, k, v, out, sums, *case.settings)
    for mine, true, at in zip(got, want[2:], (rows, columns, columns)):
        torch.testing.assert_close(mine[at].double(), true[at], **close)


def test_results_are_laid_out_as_the_operands() -> None:
    """Also those that are parts of one product, as in ``qkv.unbind(1)``, and those that are turned."""
    settings = Case(right=0).settings
    qkv = torch.randn(100, 3, 2, 8)
    turned = torch.randn(2, 100, 8).transpose(0, 1)
    for q, k, v in (qkv.unbind(1), (turned, turned, turned)):
        q = q[:95]
        out, sums = torch.ops.dsc.varlen_attention(q, k, v, *settings)
        found = varlen_run.forward(run, small, q, k, v, *settings)
        assert found[0].stride() == out.stride() == torch.empty_like(q).stride()
        assert found[1].shape == (2, 95) and found[1].is_contiguous()
        torch.testing.assert_close(found, (out, sums), atol=2e-6, rtol=1e-5)
        grads = varlen_run.backward(run, small, q, q, k, v, out, sums, *settings)
        wanted = torch.ops.dsc.varlen_attention_backward(q, q, k, v, out, sums, *settings)
        assert [x.stride() for x in grads] == [x.stride() for x in wanted]
        torch.testing.assert_close(grads, wanted, atol=5e-6, rtol=1e-5)


def test_numbers_of_a_sequence_do_not_hang_on_the_others() -> None:
    """Bit for bit: what stands beside a sequence is no part of its sums."""
    q, k, v, grad = Case((0, 40), (0, 40)).operands()
    alone = Case((0, 40), (0, 40), right=0).settings
    many = Case((0, 17, 57, 80), (0, 9, 49, 90), right=0).settings
    wide = [torch.cat([torch.randn(17, 2, 8), q, torch.randn(23, 2, 8)]) for q in (q, grad)]
    keys = [torch.cat([torch.randn(9, 2, 8), x, torch.randn(41, 2, 8)]) for x in (k, v)]
    out, sums = varlen_run.forward(run, small, q, k, v, *alone)
    packed, all_sums = varlen_run.forward(run, small, wide[0], *keys, *many)
    assert torch.equal(packed[17:57], out) and torch.equal(all_sums[:, 17:57], sums)
    one = varlen_run.backward(run, small, grad, q, k, v, out, sums, *alone)
    all_ = varlen_run.backward(run, small, wide[1], wide[0], *keys, packed, all_sums, *many)
    assert all(torch.equal(x, y[at : at + 40]) for x, y, at in zip(one, all_, (17, 9, 9)))


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 64])
def test_every_tile_finds_its_sequence(count: int) -> None:
    g = torch.Generator().manual_seed(count)
    lengths = torch.randint(0, 40, (count,), generator=g) * (torch.rand(count, generator=g) > 0.3)
    ends = (0, *lengths.cumsum(0).tolist())
    case = Case(ends, ends, heads=1)
    q, k, v, grad = case.operands()
    out, _ = varlen_run.forward(run, small, q, k, v, *case.settings)
    torch.testing.assert_close(out.double(), exact(case, q, k, v, grad)[0], atol=5e-6, rtol=1e-5)


def test_the_operators_tell_shapes_and_strides() -> None:
    case = Case(heads=4, shared=2, right=0)
    q, k, v, grad = case.operands()
    out, sums = torch.ops.dsc.varlen_attention(q, k, v, *case.settings)
    torch.library.opcheck(torch.ops.dsc.varlen_attention, (q, k, v, *case.settings), test_utils="test_faketensor")
    given = (grad, q, k, v, out, sums, *case.settings)
    torch.library.opcheck(torch.ops.dsc.varlen_attention_backward, given, test_utils="test_faketensor")


# The machine code.

POINTERS = {"forward": "xxxxs", "backward_keys": "xxxxssxx", "backward_queries": "xxxxssx"}
"""x: of the operands' dtype; s: fp32."""
SIZES = ("heads", "shared", "total", "count", "steps", "tiles", "right", "span")
STRIDES = {"forward": 8, "backward_keys": 12, "backward_queries": 10}


def facts(
    name: str, width: int, capability: int, pointer: str = "*bf16", half: str = "", upper: bool = True,
    lower: bool = False, short: bool = False, ones: tuple[str, ...] = (),
) -> KernelFacts:  # fmt: skip
    """Compiled with aligned pointers and strides, as almost all launches are; ``half``: KEYS or VALUES.

    ``ones``: sizes that are 1, which Triton takes as constants.
    """
    tile = runs.tiles(capability)(name, runs.padded(width), 4 if pointer == "*fp32" else 2)
    if short:
        tile = varlen_run.short(name, tile)
    types = ["*fp32" if c == "s" else pointer for c in POINTERS[name]] + ["*i32"] * 2
    known = list(range(len(types)))
    types += ["constexpr" if n in ones else "i32" for n in SIZES] + ["fp32"]
    known += [i + len(types) for i in range(STRIDES[name])]
    types += ["i32"] * STRIDES[name]
    fixed: dict[str, object] = {
        "UPPER": upper, "LOWER": lower, "FROM_END": True, "M": tile.queries, "N": tile.keys, "D": runs.padded(width),
        "WIDTH": width, "PRECISION": "ieee",
    }  # fmt: skip
    if name == "backward_keys":
        fixed |= {"KEYS": half != "VALUES", "VALUES": half != "KEYS"}
    schedule = Schedule(num_warps=tile.warps, num_stages=tile.stages)
    types += ["constexpr"] * len(fixed)
    fixed |= dict.fromkeys(ones, 1)
    return compile_source(source(name), name, types, fixed, known, schedule, capability)  # type: ignore[arg-type]  # constants of other types than int


def check(found: KernelFacts, capability: int, product: bool = True) -> None:
    assert found.spilled == 0
    assert found.shared <= LIMITS[capability].shared_block
    if product:
        assert set(found.tensor) == {"HMMA" if capability == 80 else "HGMMA"}


KERNELS = (("forward", ""), ("backward_keys", ""), ("backward_queries", ""))
WIDE = (("forward", ""), ("backward_keys", "KEYS"), ("backward_keys", "VALUES"), ("backward_queries", ""))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tensor_cores_whole_accesses_and_no_spills(width: int, capability: int) -> None:
    for name, half in KERNELS if width < runs.APART else WIDE:
        found = facts(name, width, capability, half=half)
        check(found, capability)
        assert {a.width for a in found.accesses if a.width < 16} <= {4}, "the ends, and a number a row of fp32"
        assert sum(a.count for a in found.accesses if a.width < 16) <= 24
        assert found.wide(store=True) > 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [64, 128])
def test_tiles_for_short_sequences_windows_and_no_order(width: int, capability: int) -> None:
    for name, half in KERNELS:
        check(facts(name, width, capability, half=half, short=True), capability)
        check(facts(name, width, capability, half=half, lower=True), capability)
        check(facts(name, width, capability, half=half, upper=False), capability)
    check(facts("forward", 96, capability), capability)


def test_sizes_of_one_are_constants() -> None:
    """One sequence, heads that share nothing, a window of one."""
    for name, half in KERNELS:
        check(facts(name, 64, 90, half=half, ones=("shared", "count", "steps", "tiles")), 90)
        check(facts(name, 64, 80, half=half, lower=True, ones=("heads", "shared", "steps", "right", "span")), 80)


def test_fp32_stays_fp32() -> None:
    for name, half in KERNELS:
        found = facts(name, 64, 80, "*fp32", half=half)
        check(found, 80, product=False)
        assert not found.tensor, "no tf32 unless it is allowed"
