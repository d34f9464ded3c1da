"""Flash attention's kernels: their answers in Triton's interpreter, and the machine code for both GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dsc import flash_attention
from dsc.codegen.cubin import LIMITS, KernelFacts, compile_source
from dsc.codegen.templates import flash_attention_run as runs
from dsc.codegen.templates.flash_ops import source
from dsc.codegen.triton import Schedule
from dsc.codegen.triton_run import interpreted


def run(
    name: str, programs: int, arguments: Sequence[object], constants: Mapping[str, object], tile: runs.Tile
) -> None:
    interpreted(source(name), name)(programs, arguments, constants, Schedule())  # type: ignore[arg-type]


def small(name: str, width: int, itemsize: int) -> runs.Tile:
    return runs.Tile(32, 1, 4, 1) if name == "products" else runs.Tile(16, 32, 4, 1)


@dataclass(frozen=True)
class Case:
    heads: int
    shared: int
    rows: int
    columns: int
    width: int
    causal: bool = False
    mask: str = "none"
    drop: bool = False
    dtype: torch.dtype = torch.float32

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        g = torch.Generator().manual_seed(0)
        kv = self.heads // self.shared
        shapes = [(1, n, t, self.width) for n, t in ((self.heads, self.rows), (kv, self.columns), (kv, self.columns))]
        q, k, v = (torch.randn(s, generator=g).to(self.dtype) for s in shapes)
        whole = (1, self.heads, self.rows, self.columns)
        mask = keep = None
        if self.mask == "bool":  # one row sees nothing
            mask = (torch.rand(self.rows, self.columns, generator=g) > 0.3).index_fill(0, torch.tensor([1]), False)
        if self.mask == "add":
            mask = torch.randn(self.heads, 1, self.columns, generator=g).to(self.dtype)
        if self.drop:
            keep = torch.rand(whole, generator=g) > 0.2
        grad = torch.randn(shapes[0], generator=g).to(self.dtype)
        return q, k, v, grad, None if mask is None else mask.expand(whole), keep


CASES = {
    "causal, shared heads": Case(2, 2, 40, 40, 8, causal=True),
    "bool mask, dropout": Case(1, 1, 20, 50, 16, mask="bool", drop=True),
    "added mask, fp16, a width that is no power of two": Case(2, 2, 32, 64, 24, mask="add", dtype=torch.float16),
    "causal, more rows than keys": Case(1, 1, 48, 20, 8, causal=True),
}


@pytest.mark.parametrize("name", CASES)
def test_as_products_and_a_softmax(name: str) -> None:
    case = CASES[name]
    q, k, v, grad, mask, keep = case.operands()
    settings = (mask, keep, 1.25, case.causal, 0.3)
    close = {"atol": 2e-3, "rtol": 2e-3} if case.dtype == torch.float16 else {"atol": 2e-6, "rtol": 1e-5}
    want = flash_attention.flash_attention(q, k, v, *settings, True)
    found = runs.forward(run, small, q, k, v, *settings, True)
    torch.testing.assert_close(found[0], want[0], **close)
    torch.testing.assert_close(found[1], want[1], atol=1e-5, rtol=1e-5)
    wanted = flash_attention.flash_attention_backward(grad, q, k, v, *want, *settings)
    got = runs.backward(run, small, grad, q, k, v, *want, *settings)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, **close)


def test_a_row_that_sees_nothing_is_no_number_as_in_a_softmax() -> None:
    q, k, v, _, mask, _ = Case(1, 1, 4, 8, 16, mask="bool").operands()
    assert mask is not None
    out, _ = runs.forward(run, small, q, k, v, mask, None, 1.0, False, 0.3, False)
    want = torch.softmax((q @ k.mT * 0.3).masked_fill(~mask, float("-inf")), -1) @ v
    assert out.isnan().any(-1).tolist() == [[[False, True, False, False]]]
    torch.testing.assert_close(out, want, equal_nan=True, atol=1e-6, rtol=1e-5)


def test_masks_may_be_larger_than_32_bits_count() -> None:
    """Rows of one and heads of the other lie further apart than 2**31 elements; only what is read has memory."""
    case = Case(17, 1, 20, 50, 16, mask="bool", drop=True)
    q, k, v, grad, mask, keep = case.operands()
    assert mask is not None and keep is not None
    apart = torch.empty(17 << 27, dtype=torch.bool).as_strided((1, 1, 17, 50), (0, 0, 1 << 27, 1))
    far = torch.empty(17 << 27, dtype=torch.bool).as_strided((1, 17, 20, 50), (0, 1 << 27, 50, 1))
    rows = slice(0, 17)
    apart.copy_(mask[:, :1, rows])
    far.copy_(keep)
    q, grad, far = q[:, :, rows], grad[:, :, rows], far[:, :, rows]
    settings = (apart.expand(1, 17, 17, 50), far, 1.25, False, 0.3)
    near = (mask[:, :, rows], keep[:, :, rows], *settings[2:])
    want = flash_attention.flash_attention(q, k, v, *near, True)
    found = runs.forward(run, small, q, k, v, *settings, True)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    wanted = flash_attention.flash_attention_backward(grad, q, k, v, *want, *near)
    torch.testing.assert_close(runs.backward(run, small, grad, q, k, v, *want, *settings), wanted, atol=1e-5, rtol=1e-5)


def test_keys_whose_heads_lie_far_apart_are_laid_out_anew() -> None:
    far = torch.empty(1, 32, 1 << 19, 128, device="meta")
    assert runs.near(far).stride() == (1 << 31, 128, 1 << 12, 1)
    assert runs.near(far[:, :31]).stride() == far.stride()


def test_errors_are_no_larger_than_those_of_scores_rounded_in_memory() -> None:
    case = Case(2, 1, 64, 64, 32, causal=True, dtype=torch.float16)
    q, k, v, grad, _, _ = case.operands()

    def by_hand(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        scores = leaves[0] @ leaves[1].mT * 0.3
        hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
        out = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ leaves[2]
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    settings = (None, None, 1.0, True, 0.3)
    out, sums = runs.forward(run, small, q, k, v, *settings, False)
    ours = [out, *runs.backward(run, small, grad, q, k, v, out, sums, *settings)]
    for mine, eager, exact in zip(ours, by_hand(torch.float16), by_hand(torch.float64)):
        assert (mine - exact).norm() <= (eager - exact).norm()


def test_the_reference_is_attention() -> None:
    q, k, v, grad, _, _ = Case(4, 2, 12, 12, 8, causal=True).operands()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(want, leaves, grad)
    raw = [x.detach() for x in leaves]
    settings = (None, None, 1.0, True, 8**-0.5)
    out, sums = torch.ops.dsc.flash_attention(*raw, *settings, False)
    found = torch.ops.dsc.flash_attention_backward(grad, *raw, out, sums, *settings)
    torch.testing.assert_close((out, *found), (want, *wanted), atol=1e-5, rtol=1e-5)
    torch.library.opcheck(torch.ops.dsc.flash_attention, (*raw, *settings, False), test_utils="test_faketensor")
    given = (grad, *raw, out, sums, *settings)
    torch.library.opcheck(torch.ops.dsc.flash_attention_backward, given, test_utils="test_faketensor")


# The machine code.

POINTERS = {
    "forward": "xxx mk x s",
    "products": "xxs",
    "backward_keys": "xxxx mk ss xx",
    "backward_queries": "xxxx mk ss x",
}
"""x: of the operands' dtype; m, k: masks; s: fp32."""
STRIDES = {"forward": 12, "products": 6, "backward_keys": 18, "backward_queries": 15}


def facts(
    name: str, width: int, capability: int, pointer: str = "*bf16", half: str = "", mask: str = "none",
    drop: bool = False, ragged: bool = False,
) -> KernelFacts:  # fmt: skip
    """Compiled with aligned pointers and strides, as almost all launches are; ``half``: KEYS or VALUES."""
    tile = runs.tiles(capability)(name, runs.padded(width), 4 if pointer == "*fp32" else 2)
    if mask != "none" or drop:
        tile = runs.masked(name, tile)
    kinds = {"x": pointer, "s": "*fp32", "m": "*u8" if mask == "bool" else pointer, "k": "*u8" if drop else pointer}
    if name == "products":
        types = [pointer, pointer, "*fp32", "i32", "i32"]
        fixed: dict[str, object] = {"M": tile.queries, "D": runs.padded(width), "WIDTH": width}
    else:
        types = [*(kinds[c] for c in POINTERS[name].replace(" ", "")), *["i32"] * 4, "fp32", "fp32"]
        fixed = {
            "CAUSAL": mask == "none", "MASK": mask, "DROP": drop, "M": tile.queries, "N": tile.keys,
            "D": runs.padded(width), "WIDTH": width, "RAGGED": ragged, "PRECISION": "ieee",
        }  # fmt: skip
    if name == "forward":
        fixed["SAFE"] = False
    if name == "backward_keys":
        fixed |= {"KEYS": half != "VALUES", "VALUES": half != "KEYS"}
    strides = ["i32"] * STRIDES[name]
    known = [i for i, t in enumerate(types) if t.startswith("*")]
    known += range(len(types), len(types) + len(strides))
    types += strides
    if name != "products":  # mb, mh, mt, ms, db, dh, dt: rows of masks are whole, one element after the other
        fixed |= {"ms": 1}
        known += [i + len(types) for i in (0, 1, 2, 4, 5, 6)]
        types += ["i32", "i32", "i32", "constexpr", "i32", "i32", "i32"]
    schedule = Schedule(num_warps=tile.warps, num_stages=tile.stages)
    count = len(fixed) - ("ms" in fixed)
    return compile_source(source(name), name, [*types, *["constexpr"] * count], fixed, known, schedule, capability)  # type: ignore[arg-type]  # constants of other types than int


def check(found: KernelFacts, capability: int, product: bool = True) -> None:
    assert found.spilled == 0
    assert found.shared <= LIMITS[capability].shared_block
    if product:
        assert set(found.tensor) == {"HMMA" if capability == 80 else "HGMMA"}


KERNELS = (("forward", ""), ("backward_keys", ""), ("backward_queries", ""), ("products", ""))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tensor_cores_whole_accesses_and_no_spills(width: int, capability: int) -> None:
    wide = (("backward_keys", "KEYS"), ("backward_keys", "VALUES"))
    for name, half in KERNELS if width < runs.APART else (*wide, *(k for k in KERNELS if k[0] != "backward_keys")):
        found = facts(name, width, capability, half=half)
        check(found, capability, name != "products")
        narrow = {a.width for a in found.accesses if a.width < 16}
        assert narrow <= {4}, "only a number a row of fp32"
        assert sum(a.count for a in found.accesses if a.width < 16) <= 16
        assert found.wide(store=True) > 0 or name == "products"


@pytest.mark.parametrize("capability", [80, 90])
def test_masks_dropout_and_rests_spill_nothing_either(capability: int) -> None:
    for name in ("forward", "backward_keys", "backward_queries"):
        check(facts(name, 64, capability, mask="add", ragged=True), capability)
        check(facts(name, 96, capability, mask="bool", drop=True, ragged=True), capability)


def test_fp32_stays_fp32() -> None:
    for name in ("forward", "backward_keys", "backward_queries"):
        found = facts(name, 64, 80, "*fp32")
        check(found, 80, product=False)
        assert not found.tensor, "no tf32 unless it is allowed"
