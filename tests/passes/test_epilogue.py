"""Which products of matrices take what follows them, and which stay with the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsc import link, ops, products, target
from dsc.manager import Remark
from dsc.notes import notes
from dsc.options import Options
from dsc.passes import gemm_model
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.steps import Step
from kit_graphs import story, trace

H100, A100 = target.find("h100"), target.find("a100")
Golden = Callable[..., None]


def bf16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def mlp(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r + F.gelu(torch.addmm(b, x, w.t()), approximate="tanh")


def fused(
    f: Callable[..., object], *inputs: Tensor, where: target.Target = H100, **options: bool
) -> tuple[dict[str, str | None], list[Remark]]:
    """Node -> its group, and what was said of products."""
    gm = trace(f, *inputs)
    Canonicalize().run(gm, where)
    report = Fuse(**options).run(gm, where)  # type: ignore[arg-type]
    groups = {n.name: notes(n).group for n in gm.graph.nodes if n.op == "call_function"}
    return groups, [r for r in report.remarks if r.node in groups and "mm" in r.node]


def test_a_tail_is_taken(golden: Golden) -> None:
    inputs = bf16(1024, 512), bf16(768, 512), bf16(768), bf16(1024, 768)
    golden(story(trace(mlp, *inputs), Fuse(), where=H100))


def test_not_on_cpus_nor_where_it_is_switched_off() -> None:
    inputs = bf16(1024, 512), bf16(768, 512), bf16(768), bf16(1024, 768)
    for where, options in ((target.find("cpu"), {}), (H100, {"gemm": False})):
        groups, remarks = fused(mlp, *inputs, where=where, **options)
        assert groups["addmm"] is None and remarks == []


def test_a_product_alone_stays_with_the_library() -> None:
    groups, remarks = fused(lambda a, b: a @ b, bf16(512, 512), bf16(512, 512))
    assert groups["mm"] is None and remarks == []


@pytest.mark.parametrize("where", [H100, A100])
def test_large_products_are_faster_in_the_library(where: target.Target) -> None:
    """Of 8192 terms a sum: the rate lost is more than the bytes saved."""
    inputs = bf16(8192, 16384), bf16(8192, 16384), bf16(8192), bf16(8192, 8192)
    groups, remarks = fused(mlp, *inputs, where=where)
    assert groups["addmm"] is None
    assert [r.verdict for r in remarks] == ["skipped"] and "stays with ATen, modelled" in remarks[0].why


def test_products_without_matrix_unit_stay_with_the_library() -> None:
    shapes = ((1024, 512), (768, 512), (768,), (1024, 768))
    groups, remarks = fused(mlp, *(torch.empty(*s) for s in shapes))
    assert groups["addmm"] is None and "stays with ATen" in remarks[0].why


def test_short_sides_have_no_tile() -> None:
    groups, remarks = fused(mlp, bf16(8, 512), bf16(768, 512), bf16(768), bf16(8, 768))
    assert groups["addmm"] is None and "too short" in remarks[0].why


def test_what_reduces_stays_a_kernel_and_reads_the_sum(golden: Golden) -> None:
    """Residual and norm: the sum is made by the product, the norm is a kernel after it."""

    def f(x: Tensor, w: Tensor, b: Tensor, r: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        y = r + torch.addmm(b, x, w.t())
        return y, F.layer_norm(y, (y.shape[-1],), g)

    golden(story(trace(f, bf16(1024, 512), bf16(768, 512), bf16(768), bf16(1024, 768), bf16(768)), Fuse(), where=H100))


def test_rows_are_made_where_they_are_read_if_that_saves_more_than_it_repeats() -> None:
    """A norm before a small product joins it; before a large one every tile would compute it again."""

    def f(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(torch.addmm(b, F.layer_norm(x, (x.shape[-1],), g), w.t()), approximate="tanh")

    groups, remarks = fused(f, bf16(1024, 384), bf16(384), bf16(1536, 384), bf16(1536))
    assert groups["native_layer_norm"] == groups["addmm"] == groups["gelu"] is not None
    assert "computes its rows" in remarks[-1].why
    groups, remarks = fused(f, bf16(16384, 1024), bf16(1024), bf16(4096, 1024), bf16(4096))
    assert groups["native_layer_norm"] not in (None, groups["addmm"])
    assert "stays a kernel of its own: modelled" in remarks[-1].why


def test_path_through_a_third_would_be_a_cycle() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        return y * (y @ b).softmax(-1).cumsum(-1)

    groups, remarks = fused(f, bf16(256, 256), bf16(256, 256))
    assert groups["mm"] is None
    assert any(r.node == "mm" and "runs between the two" in r.why for r in remarks), remarks


def test_tails_that_read_in_another_order_are_left() -> None:
    def f(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a @ b).t().relu() + c

    groups, _ = fused(f, bf16(256, 512), bf16(512, 128), bf16(128, 256))
    assert groups["mm"] is None


def test_inputs_written_in_place_are_left() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        y = (a @ b).relu()
        a.copy_(a * 2)
        return y

    groups, remarks = fused(f, bf16(256, 256), bf16(256, 256))
    assert groups["mm"] is None and "written in place" in remarks[0].why


def test_the_model_counts_bytes_and_waves() -> None:
    gm = trace(lambda a, b: (a @ b).relu(), bf16(4096, 64), bf16(64, 4096))
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    p = products.of(nodes[0])
    assert p is not None and p.sizes == (1, 4096, 4096, 64)
    least = 2 * (4096 * 4096 + 2 * 4096 * 64) / (H100.bandwidth * 0.85)
    assert least < gemm_model.library(p, H100) < 1.2 * least + 3e-6
    assert gemm_model.generated(nodes, p, H100) == pytest.approx(gemm_model.library(p, H100), rel=1e-3)  # bytes decide


def looked_up(ids: Tensor, table: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(torch.addmm(b, F.embedding(ids, table), w.t()))


def test_a_look_up_stays_before_the_product() -> None:
    """Its check of the indices is no part of a tile."""
    ids = torch.zeros(8192, dtype=torch.int64)
    for where in (A100, H100):
        groups, _ = fused(looked_up, ids, torch.empty(512, 64), torch.empty(512, 64), torch.empty(512), where=where)
        assert groups["embedding"] != groups["addmm"] or groups["addmm"] is None


def test_what_no_kernel_can_be_is_taken_apart_in_order() -> None:
    """Rows, product and tail as one group that cannot be lowered: the product runs between what is left of it."""
    norm = lambda x, g, w, b: F.gelu(torch.addmm(b, F.layer_norm(x, (x.shape[-1],), g), w.t()))  # noqa: E731
    ids = torch.zeros(64, dtype=torch.int64)
    cases = (
        (looked_up, (ids, torch.empty(50, 32), torch.empty(48, 32), torch.empty(48))),
        (norm, (torch.empty(64, 32), torch.empty(32), torch.empty(48, 32), torch.empty(48))),
    )
    for f, inputs in cases:
        gm = trace(lambda *given, f=f: (f(*given),), *inputs)  # type: ignore[misc,operator]
        nodes = [n for n in gm.graph.nodes if n.op == "call_function" and not ops.is_view(n)]
        rows, tail = link.without_products(Step(tuple(nodes), "k0"))
        assert rows.group == "k0_rows" and tail.group == "k0" and [n.name for n in tail.nodes] == ["gelu"]
        assert [n.name for n in nodes if n not in (*rows.nodes, *tail.nodes)] == ["addmm"]
        program, bound, _ = link.link(gm, Options(emit="cpp"), "inference")
        assert set(bound) == {"k0_rows", "k0"} and program.source.index("run_0") < program.source.index("aten.addmm")
