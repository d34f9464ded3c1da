"""Products of groups (mixtures of experts): which kernel, its answers in the interpreter, its machine code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsc.debug.capture import capture
from dsc.debug.source import Model
from dsc.manager import Remark
from dsc.options import Options
from dsc.passes.grouped import MOST

grouped_mm = torch.ops.aten._grouped_mm


class Experts(nn.Module):
    """Rows that are sorted by their expert, as ``transformers`` has them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden, width).bfloat16() / 8)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        chosen, order = expert.sort(stable=True)
        ends = torch.searchsorted(chosen, torch.arange(1, len(self.weight) + 1)).to(torch.int32)
        y = grouped_mm(x[order], self.weight.transpose(-2, -1), ends)
        return y.float().square().mean()


def captured(target: str, model: nn.Module, *inputs: Tensor) -> tuple[list[Remark], list[str]]:
    """The pass's remarks, and the operators of the forward and backward programs."""
    session = capture(Model("experts", model, inputs), target, Options(passes=None))
    (region,) = session.regions
    remarks = [r for s in region.stages if s.name == "grouped" and s.report is not None for r in s.report.remarks]
    nodes = [n for p in region.programs for n in p.gm.graph.nodes if n.op == "call_function"]
    return remarks, [str(n.target) for n in nodes if "grouped" in str(n.target)]


def rows(count: int = 256, width: int = 64, experts: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, width).bfloat16().requires_grad_(), torch.randint(0, experts, (count,))


def test_before_sm_90_nothing_waits_for_the_host() -> None:
    """All three products: forward, and both gradients."""
    remarks, calls = captured("a100", Experts(4, 64, 128), *rows())
    assert [r.verdict for r in remarks] == ["did"] * 3 and "one launch" in remarks[0].why
    assert calls == ["dsc.grouped_mm.default"] * 3
    remarks, _ = captured("h100", Experts(4, 64, 128), *rows())
    assert [r.verdict for r in remarks] == ["did"] * 3, "so small that a launch more or less is what counts"
    remarks, calls = captured("h100", Experts(4, 512, 2048), *rows(4096, 512))
    assert [r.verdict for r in remarks] == ["skipped"] * 3 and "stays with ATen: modelled" in remarks[0].why
    assert calls == ["aten._grouped_mm.default"] * 3
    assert captured("cpu", Experts(4, 64, 128), *rows())[0] == []


def test_what_stays_with_aten() -> None:
    class Batch(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return grouped_mm(a, b)

    a, b = torch.randn(4, 16, 32).bfloat16(), torch.randn(4, 32, 64).bfloat16()
    (remark,), _ = captured("a100", Batch(), a, b)
    assert remark.verdict == "skipped" and "no offsets" in remark.why


def test_the_flops_of_a_group_are_its_own() -> None:
    from dsc import cost
    from kit_graphs import trace

    offs = torch.tensor([10, 30, 64], dtype=torch.int32)
    x, w, g = torch.randn(64, 32).bfloat16(), torch.randn(3, 32, 48).bfloat16(), torch.randn(64, 48).bfloat16()
    gm = trace(lambda x, w, g, o: (grouped_mm(x, w, o), grouped_mm(x.t(), g, o)), x, w, g, offs)
    found = [cost.flops(n) for n in gm.graph.nodes if "grouped" in str(n.target)]
    assert found == [2 * 64 * 32 * 48] * 2


def test_the_operator_is_atens() -> None:
    from dsc import grouped

    offs = torch.tensor([10, 10, 64], dtype=torch.int32)
    x, w, g = torch.randn(64, 32).bfloat16(), torch.randn(3, 32, 48).bfloat16(), torch.randn(64, 48).bfloat16()
    for a, b in ((x, w), (w.transpose(1, 2), x.t()), (x.t(), g)):
        assert torch.equal(torch.ops.dsc.grouped_mm(a, b, offs), grouped_mm(a, b, offs))
        torch.library.opcheck(torch.ops.dsc.grouped_mm, (a, b, offs), test_utils="test_faketensor")
    assert torch.equal(grouped.grouped_mm(x, w, offs), grouped_mm(x, w, offs))


# The Triton kernels.


def multiplied(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """In the interpreter."""
    pytest.importorskip("triton")
    from dsc.codegen.templates import grouped_ops
    from dsc.codegen.triton import Schedule
    from dsc.codegen.triton_run import interpreted

    def run(name: str, programs: int, arguments: Sequence[object], constants: Mapping[str, Any], tile: object) -> None:
        interpreted(grouped_ops.source(), name)(programs, arguments, constants, Schedule())

    return grouped_ops.multiply(run, a, b, offs)


ENDS = {
    "one empty, one longer than a tile": [3, 3, 100, 170],
    "the first is empty, rows are left over": [0, 64, 65, 150],
    "one": [170],
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("turned", [False, True])
def test_as_a_product_for_each_group(name: str, turned: bool) -> None:
    offs = torch.tensor(ENDS[name], dtype=torch.int32)
    s, k, n, groups = 170, 72, 88, len(offs)
    last = int(offs[-1])
    g = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(s, size, generator=g).half() for size in (k, n))
    w = torch.randn(groups, n, k, generator=g).half().transpose(1, 2) if turned else torch.randn(groups, k, n).half()
    spans = list(zip([0, *ENDS[name]], ENDS[name]))
    close = {"rtol": 2e-3, "atol": 3e-2}
    want = torch.cat([x[i:j] @ w[e] for e, (i, j) in enumerate(spans)])
    torch.testing.assert_close(multiplied(x, w, offs)[:last], want, **close)
    turned_want = multiplied(w.transpose(1, 2), x.t(), offs)
    assert turned_want.shape == (n, s)
    torch.testing.assert_close(turned_want[:, :last], want.t(), **close)
    sums = torch.stack([x[i:j].t() @ grad[i:j] for i, j in spans])
    torch.testing.assert_close(multiplied(x.t(), grad, offs), sums, **close)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("form", ["forward", "rows' gradient", "weights' gradient"])
def test_the_machine_code(form: str, whole: bool, capability: int) -> None:
    """Of the strides that a linear layer's forward, and its two gradients have."""
    pytest.importorskip("triton")
    from dsc.codegen.cubin import LIMITS, compile_source
    from dsc.codegen.templates import grouped_ops
    from dsc.codegen.triton import Schedule

    tile = grouped_ops.rows_tile(8192, 8, 4096)
    fixed: dict[str, Any] = {"M": tile.m, "N": tile.n, "K": tile.k, "WHOLE": whole}
    pointers = ["*bf16", "*bf16", "*bf16", "*i32"]
    if form == "weights' gradient":  # out, m, n, a is transposed rows, b is rows
        ones, types = {"a0": 1, "b1": 1}, [*pointers, *["i32"] * 6]
        names = ["m", "n", "a0", "a1", "b0", "b1"]
    else:
        ones, types = {"a1": 1, "o1": 1, "b1" if form == "forward" else "b2": 1}, [*pointers, *["i32"] * 10]
        names = ["n", "k", "groups", "a0", "a1", "b0", "b1", "b2", "o0", "o1"]
        fixed["E"] = MOST
    types = ["constexpr" if i >= 4 and names[i - 4] in ones else t for i, t in enumerate(types)]
    known = [0, 1, 2, 3, *(i + 4 for i, x in enumerate(names) if x not in ones and x != "groups")]
    name = "grouped_sums" if form == "weights' gradient" else "grouped_rows"
    schedule = Schedule(num_warps=tile.warps, num_stages=tile.stages)
    types += ["constexpr"] * len(fixed)
    found = compile_source(grouped_ops.source(), name, types, {**fixed, **ones}, known, schedule, capability)
    assert found.spilled == 0 and found.shared <= LIMITS[capability].shared_block
    assert set(found.tensor) == {"HMMA" if capability == 80 else "HGMMA"}
    assert {a.width for a in found.accesses if a.width > 4} == {16}
    assert found.wide(store=True) > 0 and found.wide(store=False) > 0
