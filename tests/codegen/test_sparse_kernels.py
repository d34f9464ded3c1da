"""Kernels for sparse weights and chosen blocks: their answers in the interpreter, and the machine code for both GPUs."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from dsc import block_attention, nm, packed
from dsc.codegen.cubin import KernelFacts, _tool, compile_source, spilled
from dsc.codegen.templates import block_attention as attention
from dsc.codegen.templates import block_attention_run, pack24, sparse_mm
from dsc.codegen.triton import Schedule
from dsc.codegen.triton_run import LANGUAGE, interpreted

SCHEDULE = Schedule(num_warps=pack24.WARPS)


def weights(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


# Packing.


@pytest.mark.parametrize("transposable", [False, True])
def test_packs_as_the_reference(transposable: bool) -> None:
    w = weights(64, 128)
    want = packed.pack24(w, transposable, torch.float16)
    found = [torch.zeros_like(t) for t in want]
    words = [t.view(torch.int32) for t in found if t.numel()]
    run = interpreted(pack24.source(transposable), "pack24")
    programs = 64 // pack24.ROWS * (128 // pack24.COLUMNS)
    fixed = {"dtype": tl.float16, "R": pack24.ROWS, "C": pack24.COLUMNS}
    run(programs, [w, *words, 64, 128], fixed, SCHEDULE)
    assert all(torch.equal(a, b) for a, b in zip(found, want))


@pytest.mark.parametrize("transposable", [False, True])
def test_unpacks_to_the_masked_weight_and_its_transpose(transposable: bool) -> None:
    w = weights(32, 64)
    values, meta, turned, turned_meta = packed.pack24(w, transposable, torch.bfloat16)
    mask = nm.nm_mask(w.abs(), torch.tensor(2), 4, transposable)
    assert torch.equal(packed.unpack(values, meta), (w * mask).bfloat16())
    assert values.nbytes + meta.nbytes == 1.125 * w.numel()
    if transposable:
        assert torch.equal(packed.unpack(turned, turned_meta), (w * mask).bfloat16().T)


def packing_facts(transposable: bool, capability: int) -> KernelFacts:
    types = ["*fp32", *["*i32"] * (4 if transposable else 2), "i32", "i32", *["constexpr"] * 3]
    fixed = {"dtype": tl.bfloat16, "R": pack24.ROWS, "C": pack24.COLUMNS}
    known = list(range(len(types) - 3))
    return compile_source(pack24.source(transposable), "pack24", types, fixed, known, SCHEDULE, capability)  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("transposable", [False, True])
def test_one_kernel_reads_a_weight_once_and_writes_an_eighth_more_than_half(
    transposable: bool, capability: int
) -> None:
    """Bytes of a program's accesses, of all threads: 4 a weight in, at most 1.125 out in each orientation."""
    found = packing_facts(transposable, capability)
    count = pack24.ROWS * pack24.COLUMNS
    threads = 32 * found.warps
    read = sum(a.width * a.count for a in found.accesses if not a.store) * threads / count
    values = sum(a.width * a.count for a in found.accesses if a.store and "values" in a.buffer) * threads / count
    assert read == 4
    assert values == 1 + transposable  # of bytes; meta is 256 of them a program, which half of the threads write
    assert all(a.width == 16 for a in found.accesses if "meta" not in a.buffer)
    assert found.spilled == 0 and found.registers <= 128


# Products by sparse tensor cores.


def mma_sp(a: Tensor, b: Tensor, e: Sequence[int], c: Tensor) -> Tensor:
    """``mma.sp.m16n8k32`` with selector 0 on the registers of 32 lanes, as the PTX ISA lays them out.

    a [32, 4, 2], b [32, 4, 2], e: a word for each lane (lanes 0 and 1 of each four count), c [32, 4].
    """
    whole, right = torch.zeros(16, 32), torch.zeros(32, 8)
    for lane in range(32):
        group, thread = lane >> 2, lane & 3
        for r in range(4):
            row = group + 8 * (r & 1)
            for half in range(2):
                at = thread * 2 + 8 * (r >> 1) + half  # of the 16 kept values of a row
                quad = at // 2
                word = e[group * 4 + quad // 4] >> (16 if row >= 8 else 0)
                place = word >> 4 * (quad % 4) + 2 * (at % 2) & 3
                whole[row, quad * 4 + place] = a[lane, r, half]
                right[thread * 2 + 8 * r + half, group] = b[lane, r, half]
    out = c.clone()
    product = whole @ right
    for lane in range(32):
        for r in range(4):
            out[lane, r] += product[(lane >> 2) + 8 * (r >> 1), (lane & 3) * 2 + (r & 1)]
    return out


def test_lanes_hold_what_the_instruction_wants() -> None:
    """The packed form, fed to an emulated instruction the way the kernel does, multiplies."""
    w, x = weights(32, 64), torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    mask = nm.nm_mask(w.abs(), torch.tensor(2), 4, False)
    values, meta = packed.pack(w, mask, torch.float32)
    y = torch.zeros(8, 32)
    for strip in range(2):
        c = torch.zeros(32, 4)
        for step in range(2):
            lane = torch.arange(32)
            columns = step * 32 + 2 * (lane[:, None, None] % 4 + 4 * torch.arange(4)[:, None]) + torch.arange(2)
            b = x[lane[:, None, None] // 4, columns]
            e = [int(meta[strip, step, i // 4, i % 2]) & 0xFFFFFFFF for i in range(32)]
            c = mma_sp(values[strip, step].view(32, 4, 2), b, e, c)
        for i in range(32):
            for r in range(4):
                y[i % 4 * 2 + r % 2, strip * 16 + i // 4 + r // 2 * 8] = c[i, r]
    assert torch.allclose(y, x @ (w * mask).T, atol=1e-5)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_the_loop_is_sparse_instructions_fed_without_shuffles(kind: str, capability: int) -> None:
    tile = sparse_mm.LARGE
    fixed = dict(sparse_mm.constants(tile, kind))
    names = ("values", "meta", "x", "y", "K", "x_stride", "y_stride")
    types = dict(zip(names, ("*i32", "*i32", "*i32", f"*{'bf16' if kind == 'bf16' else 'fp16'}", "i32", "i32", "i32")))
    types |= dict.fromkeys(fixed, "constexpr")
    hints = {(i,): [["tt.divisibility", 16]] for i in range(len(names))}
    with LANGUAGE:
        out = triton.compile(
            GluonASTSource(sparse_mm.sparse_mm, types, fixed, hints),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": tile.warps},
        )
    cubin, ptx = out.asm["cubin"], out.asm["ptx"]
    count: Mapping[str, int] = collections.Counter(
        re.findall(r"\*/\s+(?:@!?U?P\d+ +)?([A-Z]\w*(?:\.\w+)?)", _tool("cuobjdump", cubin, "-sass"))
    )
    macs = tile.rows * tile.columns * tile.deep
    assert count["HMMA.SP"] == macs // 4096 // tile.warps  # a turn of the loop, a warp
    assert count["HMMA.16816"] == 0 and count["SHFL"] == 0
    assert count["LDSM.16"] * 2 <= count["HMMA.SP"]
    assert not any(n.startswith(("SHFL", "STS", "LDS.")) for n in count)
    found = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", cubin, "-res-usage"))
    assert found is not None and int(found[1]) <= 128 and int(found[2]) == 0
    assert spilled(ptx, Schedule(num_warps=tile.warps)) == 0


def test_products_of_the_cpu() -> None:
    w, x = weights(64, 64), torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    values, meta, turned, turned_meta = torch.ops.dsc.pack24(w, True, torch.bfloat16)
    mask = nm.nm_mask(w.abs(), torch.tensor(2), 4, True)
    low, sparse = x.bfloat16(), (w * mask).bfloat16()
    mm = torch.ops.dsc.sparse_mm24
    assert torch.equal(mm(low, values, meta, w, torch.tensor(2), False), low @ sparse.T)
    assert torch.equal(mm(low, turned, turned_meta, w, torch.tensor(2), True), low @ sparse)
    assert torch.equal(mm(low, values, meta, w, torch.tensor(4), False), low @ w.bfloat16().T)
    torch.library.opcheck(mm, (low, values, meta, w, torch.tensor(2), False), test_utils="test_faketensor")
    torch.library.opcheck(torch.ops.dsc.pack24, (w, True, torch.bfloat16), test_utils="test_faketensor")


def test_cusparselt_has_shapes_without_a_gpu() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        w, x = torch.empty(128, 64, dtype=torch.bfloat16, device="cuda"), torch.empty(9, 64, device="cuda").bfloat16()
        small = torch.ops.dsc.cslt_compress(w)
        y = torch.ops.dsc.cslt_mm(x, small, w, torch.tensor(2), False)
    assert small.numel() * 2 == w.numel() * 2 * 9 // 16
    assert y.shape == (9, 128) and y.dtype == torch.bfloat16 and y.device.type == "cuda"


# Attention over chosen blocks.


def run(name: str, programs: int, arguments: Sequence[object], constants: Mapping[str, object]) -> None:
    interpreted(Path(attention.__file__).read_text(), name)(programs, arguments, constants, Schedule())  # type: ignore[arg-type]


@pytest.mark.parametrize(("kv", "causal", "length"), [(1, True, 40), (2, False, 36)])
def test_attention_as_on_the_cpu(kv: int, causal: bool, length: int) -> None:
    g = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(1, 2, length, 8, generator=g) for _ in range(2))
    k, v = (torch.randn(1, kv, length, 8, generator=g) for _ in range(2))
    index = block_attention.block_select(q, k, causal, 16, 1, 0, 1)
    out, sums = block_attention.block_attention(q, k, v, index, causal, 16, 0.3)
    found = block_attention_run.forward(run, q, k, v, index, causal, 16, 0.3)
    assert torch.allclose(found[0], out, atol=1e-6) and torch.allclose(found[1], sums, atol=1e-6)
    want = block_attention.block_attention_backward(grad, q, k, v, out, sums, index, causal, 16, 0.3)
    got = block_attention_run.backward(run, grad, q, k, v, out, sums, index, causal, 16, 0.3)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want))


def test_attention_over_operands_of_more_than_32_bits_count(tmp_path: Path) -> None:
    """Batches lie further apart than 2**31 elements, in a file with holes."""
    g = torch.Generator().manual_seed(0)
    near = [torch.randn(3, 1, 16, 8, generator=g).half() for _ in range(4)]
    step = (1 << 30) + 64
    far = []
    for i, x in enumerate(near):
        whole = torch.from_file(str(tmp_path / str(i)), shared=True, size=3 * step, dtype=torch.float16)
        far.append(whole.as_strided(x.shape, (step, 128, 8, 1)).copy_(x))
    index = torch.zeros(3, 1, 1, 1, dtype=torch.int32)
    settings = (index, True, 16, 0.3)
    want = block_attention_run.forward(run, *near[:3], *settings)
    found = block_attention_run.forward(run, *far[:3], *settings)
    assert all(map(torch.equal, found, want))
    grads = block_attention_run.backward(run, near[3], *near[:3], *want, *settings)
    assert all(map(torch.equal, block_attention_run.backward(run, far[3], *far[:3], *want, *settings), grads))


@pytest.mark.parametrize("capability", [80, 90])
def test_attention_runs_on_tensor_cores_without_spills(capability: int) -> None:
    source = Path(attention.__file__).read_text()
    fixed = {"LISTED": 13, "CAUSAL": True, "BLOCK": 64, "D": 64, "WIDTH": 64, "PRECISION": "ieee"}
    half, sizes = "*bf16", ["i32"] * 4 + ["fp32"]
    types = [half] * 3 + ["*i32", half, "*fp32", *sizes, *["i32"] * 12]
    for name, kinds, constants in (
        ("forward", types, fixed),
        ("backward_queries", [half] * 4 + ["*i32", "*fp32", "*fp32", half, *sizes, *["i32"] * 15], fixed),
        (
            "backward_keys",
            [half] * 4 + ["*i32", "*i32", "*fp32", "*fp32", half, half, *sizes, *["i32"] * 18],
            {k: v for k, v in fixed.items() if k != "LISTED"},
        ),
    ):
        known = [i for i, t in enumerate(kinds) if t.startswith("*")]
        strided = [i for i, t in enumerate(kinds) if t == "i32"][4:]
        schedule = Schedule(num_warps=block_attention_run.WARPS, num_stages=block_attention_run.STAGES)
        facts = compile_source(
            source,
            name,
            [*kinds, *["constexpr"] * len(constants)],
            constants,
            [*known, *strided],
            schedule,
            capability,  # type: ignore[arg-type]
        )
        assert facts.spilled == 0, name
        assert set(facts.tensor) == {"HMMA"} if capability == 80 else set(facts.tensor) <= {"HMMA", "HGMMA"}
        assert facts.tensor
