"""What 8-bit products mean: scales, rounding, what is not finite, and that PyTorch's own say the same."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dsc.errors import BadPrecision, BadPrecisionPlan, UnknownFormat
from dsc.precision import emulate, formats, ops, plan, request
from dsc.precision.plan import Choice, PrecisionPlan

SIZES = st.integers(1, 300)
NOISE = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "int8": 0.5 / 127}
"""Of an element: relative to itself for floats, to the largest that shares its scale for integers."""


def drawn(rows: int, columns: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=25, deadline=None)
@given(SIZES, SIZES, st.sampled_from(list(NOISE)), st.sampled_from(emulate.GRAINS), st.sampled_from([1e-6, 1.0, 1e5]))
def test_rounding_is_as_near_as_the_format_allows(m: int, n: int, dtype: str, grain: str, scale: float) -> None:
    x = drawn(m, n, m * n, scale)
    q, s = ops.quantise(x, dtype, grain)
    assert q.dtype == emulate.STORED[dtype]
    assert tuple(s.shape) == emulate.scale_shape(m, n, grain)
    top = emulate.spread(emulate.largest(x, grain), x.shape, grain).expand_as(x)
    unit = top if dtype == "int8" else torch.maximum(x.abs(), top * 2.0**-8 if dtype == "e4m3" else top * 2.0**-20)
    slack = 2 if grain == "row" and dtype == "int8" else 1  # powers of two leave up to half of the range unused
    wide = emulate.spread(s, x.shape, grain) if s.dim() else s
    assert bool(((q.float() * wide - x).abs() <= unit * NOISE[dtype] * slack * 1.001).all())


@pytest.mark.parametrize("grain", emulate.GRAINS)
@pytest.mark.parametrize("dtype", list(NOISE))
def test_both_directions_are_those_of_the_transpose(dtype: str, grain: str) -> None:
    x = drawn(200, 300, 1)
    q, s, qt, st_ = ops.quantise_both(x, dtype, grain)
    want, scale = ops.quantise(x, dtype, grain)
    turned, turned_scale = ops.quantise(x.t(), dtype, grain)
    assert torch.equal(q.float(), want.float()) and torch.equal(s, scale)
    assert torch.equal(qt.float(), turned.float()) and torch.equal(st_, turned_scale)
    assert qt.is_contiguous()


@pytest.mark.parametrize("shape", [(64, 300, 96), (5, 20, 7), (33, 1024, 17), (256, 256, 256)])
@pytest.mark.parametrize("pair", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_rows_equal_scaled_mm_bit_for_bit(shape: tuple[int, int, int], pair: tuple[str, str], out: torch.dtype) -> None:
    m, k, n = shape
    (a, sa), (b, sb) = ops.quantise(drawn(m, k, 1), pair[0], "row"), ops.quantise(drawn(n, k, 2, 0.1), pair[1], "row")
    want = torch._scaled_mm(a, b.t(), scale_a=sa, scale_b=sb.t(), out_dtype=out)
    got = ops.mm8(a, sa, b, sb, out)
    assert torch.equal(got, want)
    slow = (emulate.dequantise(a, sa).double() @ emulate.dequantise(b, sb).double().t()).to(out)
    torch.testing.assert_close(got, slow, rtol=1e-5 if out == torch.float32 else 8e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 300, 96), (5, 20, 7), (3, 700, 33)])
@pytest.mark.parametrize("pair", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_whole_matrices_equal_scaled_mm(shape: tuple[int, int, int], pair: tuple[str, str]) -> None:
    m, k, n = shape
    (a, sa), (b, sb) = (
        ops.quantise(drawn(rows, k, i, 3.0), dtype, "tensor") for i, (rows, dtype) in enumerate(zip((m, n), pair))
    )
    for out in (torch.float32, torch.bfloat16):
        want = torch._scaled_mm(a, b.t(), scale_a=sa, scale_b=sb, out_dtype=out)
        got = ops.mm8(a, sa, b, sb, out)
        if torch.__version__.startswith("2.13"):  # whose order of sums is known
            assert torch.equal(got, want)
        torch.testing.assert_close(got, want, rtol=1e-5 if out == torch.float32 else 8e-3, atol=1e-5)


def test_large_whole_matrices_are_summed_as_products_are(monkeypatch: pytest.MonkeyPatch) -> None:
    (a, sa), (b, sb) = (
        ops.quantise(drawn(64, 300, 1), "e4m3", "tensor"),
        ops.quantise(drawn(32, 300, 2), "e4m3", "tensor"),
    )
    monkeypatch.setattr(emulate, "adds_one_by_one", lambda: True)
    exact = ops.mm8(a, sa, b, sb, torch.float32)
    monkeypatch.setattr(emulate, "IN_ORDER", 1000)
    assert torch.equal(ops.mm8(a, sa, b, sb, torch.float32), emulate.dequantise(a, sa) @ emulate.dequantise(b, sb).t())
    torch.testing.assert_close(ops.mm8(a, sa, b, sb, torch.float32), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grain", emulate.GRAINS)
def test_int8_equals_integer_products(grain: str) -> None:
    (a, sa), (b, sb) = ops.quantise(drawn(40, 128, 1), "int8", grain), ops.quantise(drawn(30, 128, 2), "int8", grain)
    wide = a.double() * emulate.spread(sa, a.shape, grain).double() if sa.dim() else a.double() * sa
    other = b.double() * emulate.spread(sb, b.shape, grain).double() if sb.dim() else b.double() * sb
    got = ops.mm8(a, sa, b, sb, torch.float32).double()
    torch.testing.assert_close(got, wide @ other.t(), rtol=1e-4, atol=1e-5)
    if grain == "tensor":
        torch.testing.assert_close(got, torch._int_mm(a, b.t()) * (sa * sb).double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", list(NOISE))
@pytest.mark.parametrize("grain", emulate.GRAINS)
def test_what_is_not_finite_stays_so(dtype: str, grain: str) -> None:
    for bad in (float("nan"), float("inf")):
        x = drawn(3, 130, 0)
        x[1, 5] = bad
        q, s = ops.quantise(x, dtype, grain)
        assert not bool(torch.isfinite(ops.mm8(q, s, q, s, torch.float32)[1]).all())


@pytest.mark.parametrize("dtype", list(NOISE))
@pytest.mark.parametrize("grain", emulate.GRAINS)
def test_zeros_and_the_smallest_numbers(dtype: str, grain: str) -> None:
    q, s = ops.quantise(torch.zeros(4, 130), dtype, grain)
    assert bool((s == 1).all()) and bool((q.float() == 0).all())
    q, s = ops.quantise(torch.full((4, 130), 1e-44), dtype, grain)
    assert bool(torch.isfinite(s).all()) and bool(torch.isfinite(emulate.dequantise(q, s)).all())


def test_tf32_keeps_ten_bits() -> None:
    x = drawn(8, 300, 3)
    got = emulate.round_tf32(x)
    assert bool(((got - x).abs() <= x.abs() * 2.0**-11).all())
    assert bool((got.view(torch.int32) & 0x1FFF == 0).all())
    assert torch.equal(emulate.round_tf32(got), got)
    assert not bool(torch.isfinite(emulate.round_tf32(torch.tensor([float("inf"), float("nan")]))).any())


def test_names_of_formats() -> None:
    assert formats.find("fp8").name == "fp8-blockwise"
    assert formats.find("int8", "rowwise").name == formats.find("int8-rowwise").name == "int8-rowwise"
    with pytest.raises(UnknownFormat, match="'fp9' is not a format of matrix products; did you mean 'fp8'"):
        formats.find("fp9")


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (3, "Option 'precision' cannot be 3; give a format"),
        ({}, "cannot be {}; give a format"),
        ({"*": 3}, "for each layer a format, or a mapping of 'forward', 'backward', 'dgrad', 'wgrad' to formats"),
        ({"*": {"backwards": "bf16"}}, "for each layer a format"),
    ],
)
def test_bad_requests(value: object, match: str) -> None:
    with pytest.raises(BadPrecision, match=match):
        request.check(value)


def test_the_first_pattern_decides_and_roles_are_named() -> None:
    found = request.parse({"*.attn.*": {"forward": "bf16", "backward": "fp32"}, "*": "fp8"}, "rowwise")
    rule = found.rule("blocks.0.attn.q")
    assert rule is not None and {r: f.name for r, f in rule.formats.items()} == {
        "forward": "bf16", "dgrad": "fp32", "wgrad": "fp32",
    }  # fmt: skip
    other = found.rule("head")
    assert other is not None and other.formats["wgrad"].name == "fp8-rowwise"


def test_plans_are_saved_edited_and_refused() -> None:
    made = PrecisionPlan((Choice("a.forward", "bf16", 0.1, 2e-6, (1, 2, 3)),), "h100", 0.02, 0.1, None, 3, 4e-6)
    assert plan.parse(made.dump()) == made
    assert made.speedup == 2.0
    assert made.changed({"a.forward": "fp32"}).formats() == {"a.forward": "fp32"}
    for text, why in ((made.dump().replace("bf16", "bf17"), "'bf17' is no format"), ("{}", "KeyError"), ("x", "JSON")):
        with pytest.raises(BadPrecisionPlan, match=why):
            plan.parse(text)
    with pytest.raises(BadPrecisionPlan, match="No such file"):
        plan.load("/nowhere/plan.json")
