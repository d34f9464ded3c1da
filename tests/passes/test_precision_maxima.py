"""The maxima that 8-bit scales need are found where the values are made, and are those of ``emulate`` bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from dsc import ops, target
from dsc.manager import Pass, Report
from dsc.notes import notes
from dsc.passes.fuse import Fuse
from dsc.passes.precision_maxima import find_maxima
from dsc.passes.precision_produce import fuse_producers
from dsc.precision import emulate
from dsc.precision import ops as eight
from dsc.target import Target
from kit_graphs import story, trace

H100 = target.find("h100")
Golden = Callable[..., None]
aten = torch.ops.aten


@dataclass(frozen=True)
class Maxima(Pass):
    """What the pass ``precision`` does last, on a GPU's graph."""

    name: ClassVar[str] = "maxima"
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"

    def run(self, gm: Any, target: Target) -> Report:
        return Report(bool([*fuse_producers(gm), *find_maxima(gm, target)]))


def normed(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    y = aten.native_layer_norm(x, [x.shape[-1]], g, None, 1e-5)[0]
    return eight.quantise(y, "e4m3", "row")  # type: ignore[no-any-return]


def test_a_norm_finds_the_maxima_of_its_rows(golden: Golden) -> None:
    inputs = torch.empty(1024, 512, dtype=torch.bfloat16), torch.empty(512, dtype=torch.bfloat16)
    golden(story(trace(normed, *inputs), Maxima(), Fuse(), where=H100))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("grain", ["tensor", "row"])
@pytest.mark.parametrize("both", [False, True])
def test_the_same_numbers(dtype: str, grain: str, both: bool) -> None:
    """Also of rows of zeros, of an infinity and of what is no number."""
    x = torch.randn(70, 130, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3], x[5, 7], x[6, 9] = 0, float("inf") if grain == "row" else 3, float("nan") if grain == "row" else 1
    quantise = eight.quantise_both if both else eight.quantise
    gm = trace(lambda x: quantise(torch.relu(x) - 1, dtype, grain), x)
    want = gm(x)
    (made,) = find_maxima(gm, H100)
    gm.recompile()
    assert "_by" in ops.name_of(made)
    for got, exact in zip(gm(x), want, strict=True):
        assert torch.equal(got.float().nan_to_num(nan=-7), exact.float().nan_to_num(nan=-7))


def test_blocks_are_left_to_the_kernel_that_rounds() -> None:
    x = torch.randn(128, 256)
    for f in (
        lambda x: eight.quantise_both(torch.relu(x), "e4m3", "1x128"),
        lambda x: eight.quantise_both(torch.relu(x), "e4m3", "128x128"),
    ):
        gm = trace(f, x)
        assert find_maxima(gm, H100) == [] and len(fuse_producers(gm)) == 1


@pytest.mark.parametrize("grain", ["tensor", "row"])
def test_an_activation_is_not_rounded_before_its_maximum_is_known(grain: str) -> None:
    """It is made by a kernel that finds the maxima too; a product's bias and activation as well."""

    def f(y: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return eight.quantise_both(torch.nn.functional.gelu(y + b), "e4m3", grain)  # type: ignore[no-any-return]

    gm = trace(f, torch.empty(1024, 2048, dtype=torch.bfloat16), torch.empty(2048, dtype=torch.bfloat16))
    assert fuse_producers(gm) == [] and len(find_maxima(gm, H100)) == 1
    Fuse().run(gm, H100)
    groups = {ops.name_of(n): notes(n).group for n in reversed(gm.graph.nodes) if n.op == "call_function"}
    rows = next(n for n in gm.graph.nodes if ops.name_of(n) == "amax.default")
    assert notes(rows).group == groups["gelu.default"] == groups["add.Tensor"] is not None


def feed(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = torch.nn.functional.gelu(torch.addmm(b, x, w.t()))
    return eight.quantise(y, "int8", "row")  # type: ignore[no-any-return]


def bf16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def test_a_product_finds_the_maxima_of_its_blocks(golden: Golden) -> None:
    inputs = bf16(4096, 512), bf16(2048, 512), bf16(2048)
    golden(story(trace(feed, *inputs), Maxima(), Fuse(), where=target.find("a100")))


def test_a_product_that_stays_with_the_library_leaves_its_rows_whole() -> None:
    """Of long sums; and one whose columns are no whole blocks."""
    for k, n in ((16384, 2048), (512, 2040)):
        gm = trace(feed, bf16(4096, k), bf16(n, k), bf16(n))
        find_maxima(gm, H100)
        assert not any(ops.name_of(m) == "view.default" for m in gm.graph.nodes)
        assert sum(ops.name_of(m) == "amax.default" for m in gm.graph.nodes) == 1


@pytest.mark.parametrize("grain", ["tensor", "row"])
def test_the_maxima_of_blocks_give_the_same_numbers(grain: str) -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return eight.quantise_both(torch.relu(x @ w), "e4m3", grain)  # type: ignore[no-any-return]

    x, w = (torch.randn(*s, generator=torch.Generator().manual_seed(s[0])).bfloat16() for s in ((512, 64), (64, 256)))
    gm = trace(f, x, w)
    want = gm(x, w)
    find_maxima(gm, target.find("a100"))
    gm.recompile()
    assert any(ops.name_of(m) == "view.default" for m in gm.graph.nodes)
    for got, exact in zip(gm(x, w), want, strict=True):
        assert torch.equal(got.float(), exact.float())


@pytest.mark.parametrize("grain", ["tensor", "row", "1x128"])
def test_what_is_produced_is_what_is_scaled(grain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a scale of a whole row or matrix was that of the input of the activation."""
    pytest.importorskip("triton")
    from dsc.codegen.templates import precision_ops

    given: list[tuple[Tensor, str]] = []

    def rounded(x: Tensor, *_: object, producer: str = "", **__: object) -> None:
        given.append((x, producer))

    monkeypatch.setattr(precision_ops, "rounded", rounded)
    x = torch.randn(4, 256) * 5
    precision_ops.quantise_of([x], "relu", "int8", grain)
    ((found, producer),) = given
    assert (producer == "") == (grain in precision_ops.WIDE)
    assert torch.equal(emulate.largest(found, "row"), emulate.largest(x if producer else torch.relu(x), "row"))
