"""Gradients of tables that are looked up: the same numbers as eager's, without a matrix of zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsc import embedding
from dsc.compilation import Compilation
from dsc.debug.capture import capture
from dsc.debug.source import Model
from dsc.manager import Remark

ROWS, WIDTH = 4000, 24
ALL = "canonicalize,embedding{gain=0},recompute,fuse"


class Tied(nn.Module):
    """A table that is the head's weight too; ``also``: a second one, added to it."""

    def __init__(self, also: int = 0, **settings: Any) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH, **settings) for _ in range(1 + also))
        for table in self.tables:
            table.weight = self.tables[0].weight  # type: ignore[assignment]

    def forward(self, index: Tensor) -> Tensor:
        x = sum(table(index + i).tanh() for i, table in enumerate(self.tables))
        return F.linear(x, self.tables[0].weight).logsumexp(-1).sum()  # type: ignore[arg-type,union-attr]


def indices(count: int = 40) -> Tensor:
    """Many of them equal."""
    return torch.randint(0, 12, (2, count // 2), generator=torch.Generator().manual_seed(0))


def gradient(model: nn.Module, call: Callable[..., Tensor], index: Tensor) -> Tensor:
    model.zero_grad()
    call(index).backward()
    found = next(model.parameters()).grad
    assert found is not None
    return found.clone()


def compiled(model: nn.Module, index: Tensor, passes: str = ALL) -> tuple[Tensor, Compilation]:
    made: list[Compilation] = []
    torch.compiler.reset()
    call = torch.compile(model, backend="dsc", options={"passes": passes, "cache": False, "on_compile": made.append})
    return gradient(model, call, index), next(m for m in made if m.kind == "backward")


@pytest.mark.parametrize(
    "settings",
    [{}, {"padding_idx": 3}, {"dtype": torch.bfloat16}, {"also": 1}],
    ids=["plain", "padding", "bf16", "two"],
)
def test_a_shared_table_takes_the_rows_in_place(settings: Mapping[str, Any]) -> None:
    model, index = Tied(**settings), indices()
    want = gradient(model, model, index)
    found, made = compiled(model, index)
    apart, _ = compiled(model, index, "canonicalize,recompute,fuse")
    assert torch.equal(found, apart), "as by ATen, bit by bit"
    torch.testing.assert_close(found, want)
    source = made.program.source
    assert source.count("op_embedding_add__default(") == 1 + settings.get("also", 0)
    assert "embedding_dense_backward" not in source
    assert gradient(model, model, index).equal(want), "nothing of the model was written to"


def decided(
    model: nn.Module, target: str, *inputs: Tensor, passes: str = "canonicalize,embedding,recompute"
) -> list[Remark]:
    from dsc.options import Options

    session = capture(Model("m", model, inputs), target, Options(passes=passes))
    return [
        r
        for region in session.regions
        for stage in region.stages
        if stage.name == "embedding" and stage.report is not None
        for r in stage.report.remarks
    ]


class Head(nn.Module):
    def __init__(self, rows: int, width: int, read: str = "") -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(rows, width, scale_grad_by_freq=read == "freq"), read

    def forward(self, index: Tensor) -> Tensor:
        x = self.table(index)
        if self.read == "alone":
            return x.square().sum()
        y = F.linear(x, self.table.weight).square().mean()
        return y + F.linear(x.tanh(), self.table.weight).square().mean() if self.read == "twice" else y


def test_where_it_is_modelled_to_win() -> None:
    few, index = Head(16, 64), torch.arange(16).repeat(64)
    (remark,) = decided(few, "cpu", index)
    assert remark.verdict == "skipped" and "modelled" in remark.why, "all rows of a small table are looked up"
    wide = Head(50304, 64)
    for target in ("cpu", "h100"):
        (remark,) = decided(wide.bfloat16() if target == "h100" else wide, target, torch.arange(256))
        assert remark.verdict == ("did" if target == "cpu" else "skipped"), remark  # 9 launches for 26 MB
    (remark,) = decided(Head(50304, 768).bfloat16(), "h100", torch.arange(256))
    assert remark.verdict == "did" and "in place" in remark.why


def test_alone_on_a_gpu_where_eager_does_not_sort() -> None:
    assert decided(Head(512, 64, "alone"), "cpu", torch.arange(8)) == []
    (many,) = decided(Head(512, 64, "alone"), "h100", torch.arange(512).repeat(6))
    assert many.verdict == "did" and many.node.startswith("embedding_grad")
    (few,) = decided(Head(512, 64, "alone"), "h100", torch.arange(64))
    assert few.verdict == "skipped"
    assert decided(Head(512, 64, "alone"), "h100", torch.arange(512).repeat(8)) == [], "eager sorts as well"


def test_what_stays_with_aten() -> None:
    (remark,) = decided(Head(4000, 8, "freq"), "cpu", torch.arange(8))
    assert remark.verdict == "skipped" and "scaled" in remark.why
    assert [r.verdict for r in decided(Head(4000, 8).double(), "h100", torch.arange(8))] == []


def test_two_products_and_a_table_are_one_gradient() -> None:
    model = Head(4000, 8, "twice")
    want = gradient(model, model, indices())
    found, made = compiled(model, indices())
    torch.testing.assert_close(found, want)
    assert "op_embedding_add__default(" in made.program.source


def test_the_operators_are_what_they_say() -> None:
    base, grad = torch.randn(50, 8), torch.randn(2, 10, 8)
    index = torch.randint(0, 50, (2, 10))
    want = base + torch.ops.aten.embedding_dense_backward(grad, index, 50, 7, False)
    assert torch.equal(torch.ops.dsc.embedding_add(base, grad, index, 7), want)
    torch.library.opcheck(torch.ops.dsc.embedding_add, (base, grad, index, 7), test_utils="test_faketensor")
    torch.library.opcheck(torch.ops.dsc.embedding_grad, (grad, index, 50, 7), test_utils="test_faketensor")
    assert embedding.embedding_add_(base, grad, index, 7) is base and torch.equal(base, want)
    gradient = torch.ops.dsc.embedding_grad(grad, index, 50, 7)
    assert torch.equal(gradient, torch.ops.aten.embedding_dense_backward(grad, index, 50, 7, False))


# The Triton kernel.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("padding", [-1, 2])
def test_the_kernel_sums_runs(dtype: torch.dtype, padding: int) -> None:
    """Runs shorter and longer than what is read at once, tails of rows, a table in wider strides."""
    pytest.importorskip("triton")
    from dsc.codegen.templates import embedding_ops
    from dsc.codegen.triton import Schedule
    from dsc.codegen.triton_run import interpreted

    def run(programs: int, arguments: Sequence[object], constants: Mapping[str, int]) -> None:
        interpreted(embedding_ops.source(), "embedding_sum")(programs, arguments, constants, Schedule())

    index = torch.tensor([2] * 3 + [5] * 16 + [0] + [9] * 35 + [2])[torch.randperm(56)]
    grad = torch.randn(56, 300).to(dtype)
    whole = torch.randn(10, 320).to(dtype)
    table, rest = whole[:, :300], whole[:, 300:].clone()
    keep = index != padding
    sums = torch.zeros(10, 300, dtype=torch.float64).index_add_(0, index[keep], grad[keep].double())
    want = (table.double() + sums.to(dtype).double()).to(dtype)
    assert embedding_ops.add_rows(run, table, grad, index, padding) is table
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-2}
    torch.testing.assert_close(table, want, **close)
    assert torch.equal(whole[:, 300:], rest)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
def test_the_machine_code(capability: int, pointer: str) -> None:
    pytest.importorskip("triton")
    from dsc.codegen.cubin import compile_source
    from dsc.codegen.templates import embedding_ops, embedding_sum
    from dsc.codegen.triton import Schedule

    types = [pointer, pointer, "*i64", "*i64", "i32", "i32", "i32", "i32", "constexpr", "constexpr"]
    fixed = embedding_sum.constants(768)
    schedule = Schedule(num_warps=embedding_sum.WARPS)
    known = [0, 1, 2, 3, 5, 7]  # whole rows of 16 bytes
    found = compile_source(embedding_ops.source(), "embedding_sum", types, fixed, known, schedule, capability)
    assert found.spilled == 0 and found.registers <= 128
    assert {a.width for a in found.accesses if a.buffer == "grad"} == {16}, "rows of the gradient"
    assert all(a.width >= 4 for a in found.accesses if a.buffer == "at"), "a row of sums has few elements a thread"
