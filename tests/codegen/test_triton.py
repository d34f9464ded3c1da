"""Emitted Triton: its text, and what it computes in the interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import sympy
import torch
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod, ModularIndexing, PythonMod

pytest.importorskip("triton")

from dsc.codegen.cubin import inspect
from dsc.codegen.triton import Schedule, default_schedule, emit, grid
from dsc.codegen.triton_index import bound, text
from dsc.codegen.triton_run import CheckFailed, interpreted, launch
from kit_kernels import DTYPES, Build, evaluate, pointwise, random_kernel
from kit_triton import (
    apply,
    bag_kernel,
    column_sum,
    gather_kernel,
    in_place_kernel,
    layernorm_kernel,
    randn,
    run,
    same,
    softmax_kernel,
    transpose_kernel,
)

NAN, INF = math.nan, math.inf


# -- reductions


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("schedule", [None, Schedule(4, 64), Schedule(1, 512)], ids=["wide", "looped", "row"])
def test_softmax(dtype: str, schedule: Schedule | None, golden: Callable[..., None]) -> None:
    kernel = softmax_kernel(7, 300, dtype)
    golden(emit(kernel, schedule))
    x = randn(7, 300, dtype=DTYPES[dtype]) * 3
    torch.testing.assert_close(apply(kernel, x, schedule=schedule), x.softmax(1))


@pytest.mark.parametrize("sizes", [(5, 100), (3, 1), (1, 257), (6, 64)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_layernorm(sizes: tuple[int, int], symbolic: bool, golden: Callable[..., None]) -> None:
    rows, columns = sizes
    kernel = layernorm_kernel("m", "n") if symbolic else layernorm_kernel(rows, columns)
    schedule = Schedule(2, 64) if symbolic else None
    if not symbolic or sizes == (5, 100):
        golden(emit(kernel, schedule))
    x, weight, bias = randn(rows, columns, dtype=torch.bfloat16), randn(columns), randn(columns, seed=1)
    y, mean, rstd = torch.empty_like(x), torch.empty(rows), torch.empty(rows)
    bound_sizes = {"m": rows, "n": columns} if symbolic else {}
    run(kernel, x, weight, bias, y, mean, rstd, sizes=bound_sizes, schedule=schedule)
    expected = torch.native_layer_norm(x.float(), (columns,), weight, bias, 1e-5)
    torch.testing.assert_close(y, expected[0].bfloat16())
    torch.testing.assert_close(mean, expected[1].flatten())
    torch.testing.assert_close(rstd, expected[2].flatten())


@pytest.mark.parametrize("schedule", [None, Schedule(16, 32)], ids=["default", "looped"])
def test_outer_reduction_keeps_the_columns_contiguous(schedule: Schedule | None, golden: Callable[..., None]) -> None:
    kernel = column_sum(100, 70)
    source = emit(kernel, schedule)
    golden(source)
    x, out = randn(100, 70), torch.empty(70)
    run(kernel, x, out, schedule=schedule)
    torch.testing.assert_close(out, x.sum(0))


NUMBERS = [(k, d) for k in ("sum", "prod", "max", "min") for d in ("f32", "f64", "i64")]


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), [*NUMBERS, ("any", "b1"), ("all", "b1")])
def test_reductions(kind: str, dtype: str, looped: bool) -> None:
    x = (randn(3, 50) * 2).to(DTYPES[dtype]) if dtype != "b1" else randn(3, 50) > 1.5
    x[2] = 1 if dtype == "b1" else x[2]
    b = Build("k", i=3, r_j=50)
    b.store("out", b["i"], b.reduce(kind, b.load("x", b["i"] * 50 + b["r_j"], dtype)), dtype)
    out = torch.empty(3, dtype=x.dtype)
    run(b.kernel(), x, out, schedule=Schedule(2, 16 if looped else 64))
    expected = {"max": torch.amax, "min": torch.amin}.get(kind) or getattr(torch, kind)
    torch.testing.assert_close(out, expected(x, 1))


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_max_and_min_keep_nan(kind: str, looped: bool) -> None:
    x = randn(64, 5)
    x[13, 2] = NAN
    x[:, 3] = -INF if kind == "max" else INF
    out = torch.empty(5)
    run(column_sum(64, 5, kind), x, out, schedule=Schedule(4, 16 if looped else 64))
    same(out, x.amax(0) if kind == "max" else x.amin(0))


def test_sum_of_all(golden: Callable[..., None]) -> None:
    """No parallel axis, and more elements than a tile holds."""
    b = Build("total", r_i=40, r_j=600)
    b.store("out", 0, b.reduce("sum", b.load("x", b["r_i"] * 600 + b["r_j"])))
    golden(emit(b.kernel()))
    x, out = randn(40, 600), torch.empty(())
    run(b.kernel(), x, out)
    torch.testing.assert_close(out, x.sum())
    run(b.kernel(), x, out, schedule=Schedule(1, 32768))
    torch.testing.assert_close(out, x.sum())


def test_early_store_spares_a_pass(golden: Callable[..., None]) -> None:
    b = Build("add_and_sum", i=3, r_j=100)
    at = b["i"] * 100 + b["r_j"]
    y = b.let("add", b.load("x", at), b.load("bias", b["r_j"]))
    b.store("y", at, y)
    b.store("total", b["i"], b.reduce("sum", y))
    source = emit(b.kernel(), Schedule(1, 32))
    golden(source)
    assert source.count("for r0") == 1
    x, bias, y, total = randn(3, 100), randn(100), torch.empty(3, 100), torch.empty(3)
    run(b.kernel(), x, bias, y, total, schedule=Schedule(1, 32))
    same(y, x + bias)
    torch.testing.assert_close(total, (x + bias).sum(1))


@pytest.mark.parametrize("schedule", [Schedule(2, 128), Schedule(2, 32)], ids=["persistent", "looped"])
def test_in_place(schedule: Schedule, golden: Callable[..., None]) -> None:
    """``x`` becomes its log softmax, and the first column is read from it too: loads come before the stores."""
    golden(emit(in_place_kernel(), schedule))
    x, first = randn(3, 100), torch.empty(3)
    expected = x.log_softmax(1)
    run(in_place_kernel(), x, first, schedule=schedule)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(first, expected[:, 0])


# -- shapes, indices


def test_symbolic_sizes(golden: Callable[..., None]) -> None:
    kernel = softmax_kernel("m", "n")
    schedule = Schedule(2, 16)
    source = emit(kernel, schedule)
    golden(source)
    fn = interpreted(source, kernel.name)
    for m, n in [(3, 40), (1, 1), (5, 16), (0, 4)]:
        x, out = randn(m, n), torch.empty(m, n)
        launch(kernel, schedule, fn, [x, out], {"m": m, "n": n})
        torch.testing.assert_close(out, x.softmax(1))


def test_transpose_and_broadcast(golden: Callable[..., None]) -> None:
    kernel = transpose_kernel(2, 40, 33)
    golden(emit(kernel))
    x, bias, out = randn(2, 33, 40), randn(33), torch.empty(2, 40, 33)
    for schedule in (None, default_schedule(kernel), Schedule(4, 16), Schedule(128, 64)):
        run(kernel, x, bias, out.fill_(0), schedule=schedule)
        same(out, x.mT + bias)
    narrow = transpose_kernel(1, 40, 3)  # not worth tiles of two sides
    assert "RB" not in emit(narrow)
    x, bias, out = randn(1, 3, 40), randn(3), torch.empty(1, 40, 3)
    run(narrow, x, bias, out)
    same(out, x.mT + bias)


def test_zero_d_and_unit_axes(golden: Callable[..., None]) -> None:
    b = Build("unit", i=1, j=1, r_k=1)
    x = b.load("x", b["i"] * 7 + b["j"] + b["r_k"])
    b.store("out", b["i"], b.let("add", b.reduce("sum", x), b.const(1.0)))
    golden(emit(b.kernel()))
    out = torch.empty(1)
    run(b.kernel(), torch.tensor(2.0), out)
    assert out.item() == 3
    b = Build("scalar")
    b.store("out", 0, b.let("mul", b.load("x", 0, "bf16"), b.load("n", 0, "bf16")), "bf16")
    golden(emit(b.kernel()), "scalar")
    x, out = torch.tensor(1.7).bfloat16(), torch.empty((), dtype=torch.bfloat16)
    run(b.kernel(), x, x, out)
    same(out, x * x)
    for capability in (80, 90):
        inspect(b.kernel(), None, capability)


def test_fill_of_a_broadcast_row() -> None:
    """Values that vary along fewer axes than they are stored along, or reduced over."""
    b = Build("fill", i=4, r_j=8)
    at = b["i"] * 8 + b["r_j"]
    row = b.load("row", b["i"])
    b.store("a", at, row)
    b.store("b", at, b.const(2.5))
    b.store("c", b["i"], b.reduce("sum", row))
    b.store("d", b["i"], b.reduce("sum", b.const(1, "i64")), "i64")
    b.store("e", at, b.reduce("max", b.load("column", b["r_j"])))
    row, column = randn(4), randn(8)
    for schedule in (Schedule(4, 8), Schedule(2, 16), Schedule(2, 4), Schedule(8, 2)):
        outs = [
            torch.zeros(4, 8),
            torch.zeros(4, 8),
            torch.zeros(4),
            torch.zeros(4, dtype=torch.long),
            torch.zeros(4, 8),
        ]
        run(b.kernel(), row, *outs[:4], column, outs[4], schedule=schedule)
        same(outs[0], row[:, None].expand(4, 8))
        same(outs[1], torch.full((4, 8), 2.5))
        torch.testing.assert_close(outs[2], row * 8)
        assert outs[3].tolist() == [8] * 4
        same(outs[4], column.max().expand(4, 8))


def test_indirect(golden: Callable[..., None]) -> None:
    kernel = gather_kernel(20)
    golden(emit(kernel))
    index, table, out = torch.tensor([0, 19, 3, 3, 7, 1], dtype=torch.int32), randn(20, 10), torch.empty(6, 10)
    run(kernel, index, table, out, schedule=Schedule(16))
    same(out, table[index])
    for bad in (20, -1, 2**31 - 1):
        index[4] = bad
        with pytest.raises(CheckFailed, match="embedding: index out of range"):
            run(kernel, index, table, out)
        same(out[:4], table[index[:4]])
    fail = torch.zeros(1, dtype=torch.int32)
    schedule = default_schedule(kernel)
    launch(kernel, schedule, interpreted(emit(kernel), kernel.name), [index, table, out], {}, fail)
    assert fail.item() == 1


def test_indirect_into_nothing() -> None:
    n = sympy.Symbol("n", integer=True)
    with pytest.raises(CheckFailed):
        run(gather_kernel(n), torch.zeros(6, dtype=torch.int32), torch.empty(0, 10), torch.empty(6, 10), sizes={"n": 0})


@pytest.mark.parametrize("schedule", [Schedule(2, 16), Schedule(2, 4)], ids=["persistent", "looped"])
def test_indirect_in_a_reduction(schedule: Schedule) -> None:
    """Tail lanes load nothing and may not fail a check."""
    index, table, out = torch.randint(1, 6, (3, 9)), randn(5), torch.empty(3)
    run(bag_kernel(), index, table, out, schedule=schedule)
    torch.testing.assert_close(out, table[index - 1].sum(1))
    index[1, 8] = 0
    with pytest.raises(CheckFailed):
        run(bag_kernel(), index, table, out, schedule=schedule)


def test_index_functions() -> None:
    i, n = sympy.symbols("i n", integer=True, nonnegative=True)
    cases = {
        FloorDiv(i, 3): "(i // 3)",
        Mod(i, n): "(i % n)",
        PythonMod(i, 4): "(i % 4)",
        sympy.Mod(i, 4): "(i % 4)",
        ModularIndexing(i, 3, 4): "((i // 3) % 4)",
        ModularIndexing(i, 1, 4): "(i % 4)",
        CeilDiv(i, 4): "((i + 3) // 4)",
        Min(i, n): "tl.minimum(i, n)",
        Max(i, n): "tl.maximum(i, n)",
        sympy.floor(i / 3): "(i // 3)",
        sympy.floor((i + 1) / n): "((i + 1) // n)",
        i**2 * n: "i*i*n",
        i * (i + 1) / 2: "((i*(i + 1)) // 2)",
    }
    for e, expected in cases.items():
        assert text(e) == expected
        value = eval(text(e), {"i": 17, "n": 5, "tl": _Python})
        assert value == int(e.subs({i: 17, n: 5}))
    with pytest.raises(TypeError, match="not an integer index"):
        text(sympy.sqrt(n))


class _Python:
    minimum, maximum = min, max


def test_index_bound_and_width() -> None:
    i, j = sympy.symbols("i j", integer=True, nonnegative=True)
    extents = {"i": 100, "j": 50}
    assert bound(i * 50 + j, extents) == 99 * 50 + 49
    assert bound(Mod(i, 7) + 3, extents) == 102
    assert bound(sympy.Symbol("n") * i, extents) is None
    assert "int64" not in emit(pointwise("exp", 1000, ["f32"], "f32"))
    assert "tl.program_id(0).to(tl.int64)" in emit(pointwise("exp", 2**31, ["f32"], "f32"))
    b = Build("wide_reduction", i=4, r_j=2**16)
    b.store("out", b["i"], b.reduce("sum", b.load("x", b["r_j"] * 2**16 + b["i"])))
    assert "tl.arange(0, RB).to(tl.int64)" in emit(b.kernel())


def test_view_of_a_view() -> None:
    b = Build("view", i=24)
    i = b["i"]
    b.store("out", i, b.load("x", ModularIndexing(i, 1, 4) * 6 + FloorDiv(i, 4)))
    x, out = randn(24), torch.empty(24)
    run(b.kernel(), x, out)
    same(out, x.view(4, 6).t().reshape(-1))


def test_names_do_not_collide() -> None:
    b = Build("x", xm=40, r_r=10)
    b.store("rm", b["xm"], b.reduce("sum", b.load("r", b["xm"] * 10 + b["r_r"])))
    x, out = randn(40, 10), torch.empty(40)
    run(b.kernel(), x, out, schedule=Schedule(32, 4))
    torch.testing.assert_close(out, x.sum(1))


def test_only_what_is_used_is_written() -> None:
    b = Build("dead", i=4)
    b.let("tanh", b.load("y", b["i"]))
    b.store("out", b["i"], b.load("x", b["i"]))
    assert "tanh" not in emit(b.kernel())
    assert emit(b.kernel()) == emit(b.kernel())


# -- random kernels


@pytest.mark.parametrize("seed", range(60))
def test_random_kernel(seed: int) -> None:
    """Any tiling of any kernel computes what the kernel means."""
    kernel, buffers, sizes = random_kernel(seed)
    expected = {name: t.clone() for name, t in buffers.items()}
    evaluate(kernel, expected, sizes)
    for schedule in (default_schedule(kernel), Schedule(2, 2), Schedule(4, 64), Schedule(32, 1)):
        actual = {name: t.clone() for name, t in buffers.items()}
        run(kernel, *(actual[b.name] for b in kernel.buffers), sizes=sizes, schedule=schedule)
        for name, t in expected.items():
            coarse = t.dtype in (torch.bfloat16, torch.float16)
            torch.testing.assert_close(actual[name], t, rtol=2e-2 if coarse else 1e-4, atol=1e-3, equal_nan=True)


# -- schedules


def test_grid_and_default_schedule() -> None:
    kernel = softmax_kernel("m", 300)
    assert grid(kernel, Schedule(4, 512), {"m": 9}) == 3
    assert default_schedule(kernel) == Schedule(4, 512, 4)
    assert default_schedule(softmax_kernel(8, 16384)) == Schedule(1, 16384, 16)
    assert default_schedule(softmax_kernel(8, 16385)) == Schedule(1, 2048, 4)
    assert default_schedule(softmax_kernel(8, "n")) == Schedule(1, 2048, 4)
    assert default_schedule(pointwise("exp", 10, ["f32"], "f32")) == Schedule(16, 1, 1)
    assert default_schedule(transpose_kernel(8, 100, 100)) == Schedule(64, 32, 4)
    assert grid(transpose_kernel(8, 100, "m"), Schedule(64, 32), {"m": 65}) == 9 * 4
    assert default_schedule(column_sum(100, 70)) == Schedule(32, 128, 8)
    assert default_schedule(column_sum(10000, 70)) == Schedule(32, 64, 4)


# -- the interpreter leaves nothing behind


def test_interpreter_leaves_nothing_patched() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    def state() -> list[object]:
        places = (tl, tl.core, tl.math, tl.tensor, tl.dtype, interpreter, interpreter.InterpreterBuilder)
        grid_state = ("grid_idx", "grid_dim")
        own = {k: v for k, v in vars(interpreter.interpreter_builder).items() if k not in grid_state}
        return [dict(vars(p)) for p in places] + [own]

    before = state()
    x = randn(3, 40, dtype=torch.bfloat16)
    apply(softmax_kernel(3, 40, "bf16"), x)
    assert state() == before
    source = emit(pointwise("exp", 4, ["f32"], "f32")).replace("tl.exp(v0)", "tl.static_assert(False, 'intended')")
    with pytest.raises(AssertionError, match="intended"):
        interpreted(source, "exp_f32")(1, [randn(4), randn(4)], {"XB": 4}, Schedule(4))
    assert state() == before
