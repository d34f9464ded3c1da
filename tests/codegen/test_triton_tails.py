"""What may follow a product beside arithmetic: dropout that is drawn there, and maxima for scales of 8 bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from collections.abc import Callable

from dsc import keep  # noqa: F401  # defines dsc::keep
from dsc.codegen import cubin
from dsc.codegen.alternatives import alternatives
from dsc.codegen.builder import Unlowerable
from dsc.codegen.triton import default_schedule, emit
from dsc.codegen.triton_nest import cuttable, nest
from dsc.codegen.triton_run import interpreted, launch
from dsc.target import find
from kit_products import LAYOUTS, bound, check, drawn, in_parts, matrices, walked

Tensor = torch.Tensor


# Dropout behind a product.


def dropping(a: Tensor, b: Tensor, c: Tensor, r: Tensor, seed: Tensor) -> Tensor:
    y = torch.addmm(c, a, b)
    return r + y * torch.ops.dsc.keep(seed, list(y.shape), 0.9) * 1.125


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_behind_a_product(layout: str) -> None:
    """The mask that the product's tiles draw is the one that is drawn alone; also by programs that walk, and in parts."""
    a, b = matrices(layout, 100, 72, 256, torch.float16)
    inputs = a, b, drawn(72, dtype=torch.float16), drawn(100, 72, dtype=torch.float16), torch.tensor(2**40 + 5)
    check(dropping, *inputs, close=6e-3)
    in_parts(dropping, *inputs, parts=2, close=6e-3)
    a, b = matrices(layout, 200, 168, 64, torch.float16)
    walked(
        dropping, a, b, drawn(168, dtype=torch.float16), drawn(200, 168, dtype=torch.float16), inputs[-1], close=6e-3
    )


def test_a_gradient_through_dropout_behind_a_product() -> None:
    """With a mask of eager's, which is stored: the product of the gradient takes it."""
    mask = drawn(100, 72) > 0
    f = lambda g, w, m, h: torch.ops.aten.gelu_backward(  # noqa: E731
        torch.ops.aten.native_dropout_backward(g @ w, m, 1.25), h
    )
    check(f, drawn(100, 48), drawn(48, 72), mask, drawn(100, 72), close=3e-5)


@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code_of_dropout_behind_a_product(capability: int) -> None:
    a, b = matrices("nt", 4096, 4096, 512, torch.bfloat16)
    c, r = drawn(4096, dtype=torch.bfloat16), drawn(4096, 4096, dtype=torch.bfloat16)
    kernel = bound(dropping, a, b, c, r, torch.tensor(1)).kernel
    default = default_schedule(kernel)
    target = find("a100" if capability == 80 else "h100")
    tried = alternatives(kernel, default, target)
    assert all(s.RB <= 64 for s in tried), "wider ones spill on sm_90"
    assert any(s.programs for s in tried)
    for s in tried:
        facts = cubin.inspect(kernel, s, capability)
        assert facts.spilled == 0 and set(facts.tensor) == {"HMMA" if capability == 80 else "HGMMA"}
        assert {x.width for x in facts.accesses if x.buffer not in ("b3", "b4")} == {16}


# Maxima of blocks of columns, for the scales of 8-bit formats.


def peaked(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    y = F.silu(torch.addmm(c, a, b))
    return y, y.abs().view(y.shape[0], -1, 64).amax(2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_finds_the_maxima_of_its_blocks(layout: str) -> None:
    """Of what it stores, bit for bit, also at the edges, where programs walk, and of what is no number."""
    a, b = matrices(layout, 200, 320, 72, torch.float16)
    c = drawn(320, dtype=torch.float16)
    made = check(peaked, a, b, c, close=6e-3)
    assert [x.role for x in made.kernel.buffers].count("out") == 2 and not cuttable(nest(made.kernel))
    walked(peaked, a, b, c, close=6e-3)
    a[3, 5] = float("nan")
    made = bound(peaked, a, b, c)
    schedule = default_schedule(made.kernel)
    y, top = torch.empty(200, 320, dtype=torch.float16), torch.full((200, 5), 7.0, dtype=torch.float16)
    given = dict(zip((n.name for n in made.nodes[0].graph.nodes if n.op == "placeholder"), (a, b, c)))
    outs = iter((y, top))
    buffers = [given[n.name] if n.op == "placeholder" else next(outs) for n in made.nodes]
    launch(made.kernel, schedule, interpreted(emit(made.kernel, schedule), made.kernel.name), buffers, {})
    assert torch.equal(top[4:], y[4:].abs().view(196, 5, 64).amax(2)) and bool(top[3].isnan().all())


def test_maxima_of_batches() -> None:
    a, b = matrices("nt", 70, 128, 33, torch.float16, 3)
    f = lambda a, b: ((y := torch.bmm(a, b) * 2), y.abs().view(3, 70, 2, 64).amax(3))  # noqa: E731
    check(f, a, b, close=6e-3)


def test_maxima_that_no_tile_has_are_no_part_of_a_product() -> None:
    """Of other blocks, of rows, of fp32, whose tiles are narrower."""
    half = lambda *shape: drawn(*shape, dtype=torch.float16)  # noqa: E731
    for f, inputs in (
        (lambda a, b: (a @ b).abs().view(64, -1, 32).amax(2), (half(64, 48), half(48, 128))),
        (lambda a, b: (a @ b).abs().amax(1), (half(64, 48), half(48, 128))),
        (lambda a, b: (a @ b).abs().view(64, -1, 64).amax(2), (drawn(64, 48), drawn(48, 128))),
    ):
        with pytest.raises(Unlowerable):
            bound(f, *inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_machine_code_of_maxima(capability: int, layout: str) -> None:
    a, b = matrices(layout, 4096, 2048, 512, torch.bfloat16)
    kernel = bound(peaked, a, b, drawn(2048, dtype=torch.bfloat16)).kernel
    default = default_schedule(kernel)
    target = find("a100" if capability == 80 else "h100")
    tried = [default, *(s for s in alternatives(kernel, default, target) if s.programs)]
    assert len(tried) > 1
    for s in tried:
        facts = cubin.inspect(kernel, s, capability)
        assert facts.spilled == 0 and 0 < facts.shared <= cubin.LIMITS[capability].shared_block
        assert set(facts.tensor) == {"HMMA" if capability == 80 else "HGMMA"}
        assert {x.width for x in facts.accesses if x.buffer in ("b0", "b1", "o0")} == {16}


def test_text(golden: Callable[..., None]) -> None:
    """A mask that is drawn, and maxima that are found, behind the sums."""

    def f(a: Tensor, b: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        y = a @ b
        y = y * torch.ops.dsc.keep(seed, list(y.shape), 0.9) * 1.125
        return y, y.abs().view(y.shape[0], -1, 64).amax(2)

    a, b = matrices("nn", 1024, 768, 512, torch.bfloat16)
    kernel = bound(f, a, b, torch.tensor(1)).kernel
    golden(emit(kernel, default_schedule(kernel)))
