"""Persistent products: programs walk the tiles, in one loop with the sums."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from collections.abc import Callable

from dsc.codegen import cubin
from dsc.codegen.alternatives import alternatives, modelled
from dsc.codegen.candidates import Code
from dsc.codegen.triton import default_schedule, emit
from dsc.target import find
from kit_products import LAYOUTS, TAILS, bound, drawn, matrices, walked

Tensor = torch.Tensor


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_programs_walk_the_tiles(layout: str, dtype: torch.dtype) -> None:
    """Tiles that are no multiple of the programs, edges, a bias, a residual; what a backward needs is stored too."""
    a, b = matrices(layout, 200, 168, 72, dtype)
    bias, residual = drawn(168, dtype=dtype), drawn(200, 168, dtype=dtype)

    def f(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.addmm(bias, a, b)
        return h, residual + torch.tanh(h) * 0.5

    close = 3e-5 if dtype == torch.float32 else 6e-3
    source = walked(f, a, b, bias, residual, close=close)
    assert "flatten=True" in source and source.index("flatten=True") < source.index("range(0, 72, KB)")
    if dtype == torch.float16:
        both = walked(f, a, b, bias, residual, close=close, tma=True)
        assert both.index("make_tensor_descriptor(") < both.index("flatten=True"), "made once, not for each tile"


def test_programs_walk_batches_and_computed_operands() -> None:
    a, b = matrices("nt", 70, 100, 33, torch.float32, 3)
    walked(lambda a, b: torch.relu(torch.bmm(a, b) * 2), a, b, close=3e-5)
    walked(lambda a, s, b: torch.mm(a * s + 1, torch.exp(b)) - 1, drawn(130, 50), drawn(50), drawn(50, 132), close=1e-4)
    # what belongs to a row or a column as a whole is computed before the main loop
    f = lambda a, s, b, t: torch.relu(torch.mm(a * s, b * t))  # noqa: E731
    walked(f, drawn(130, 50), drawn(130, 1), drawn(50, 132), drawn(132), close=3e-5)

    def norm(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        y = torch.ops.aten.native_layer_norm(x, [x.shape[-1]], g, None, 1e-5)[0]
        return F.relu(torch.mm(y, w.t()))

    walked(norm, drawn(200, 80), drawn(80), drawn(150, 80) / 8, close=3e-5)


def joined(sass: str, unit: str, copy: str) -> int:
    """Instructions of the shortest loop that multiplies, fetches operands and stores results: of tiles and terms at once."""
    found = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]*);", sass)]
    jumps = [(at, int(to[0], 16)) for at, text in found if "BRA" in text and (to := re.findall("0x[0-9a-f]+", text))]
    loops = [[text for at, text in found if to <= at <= end] for end, to in jumps if to < end]
    whole = [x for x in loops if all(any(word in text for text in x) for word in (unit, copy, "STG"))]
    return min(map(len, whole), default=0)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_machine_code_of_walking_programs(capability: int, layout: str) -> None:
    """One loop that is pipelined across tiles: copies of the next one's operands are in the loop that stores this one."""
    a, b = matrices(layout, 4096, 4096, 4096, torch.bfloat16)
    c, r = drawn(4096, dtype=torch.bfloat16), drawn(4096, 4096, dtype=torch.bfloat16)
    kernel = bound(TAILS["gelu+residual"], a, b, c, r).kernel
    target = find("a100" if capability == 80 else "h100")
    unit = "HMMA" if capability == 80 else "HGMMA"
    tried = [s for s in alternatives(kernel, default_schedule(kernel), target) if s.programs]
    assert {s.tma for s in tried} == ({False} if capability == 80 else {True, False})
    for s in tried:
        facts = cubin.inspect(kernel, s, capability)
        if s.RB == 256:
            continue  # the large tile: with a tail as long as this one it spills, and is ruled out
        assert s.programs == target.sms
        assert facts.spilled == 0 and 0 < facts.shared <= cubin.LIMITS[capability].shared_block
        assert set(facts.tensor) == {unit}
        assert joined(facts.sass(), unit, "UTMALDG" if s.tma else "LDGSTS")
        assert {x.width for x in facts.accesses if x.buffer != "b3"} == {16}
    plain = cubin.inspect(kernel, default_schedule(kernel), capability)
    assert not joined(plain.sass(), unit, "LDGSTS")


def test_machine_code_of_the_large_tile() -> None:
    a, b = matrices("nt", 4096, 4096, 4096, torch.bfloat16)
    kernel = bound(lambda a, b: torch.relu(a @ b), a, b).kernel
    (large,) = [s for s in alternatives(kernel, default_schedule(kernel), find("h100")) if s.RB == 256]
    facts = cubin.inspect(kernel, large, 90)
    assert facts.spilled == 0 and facts.shared <= cubin.LIMITS[90].shared_block and facts.code.blocks == 1
    assert joined(facts.sass(), "HGMMA", "UTMALDG") and "HGMMA.64x256x16" in facts.sass()


def test_where_programs_walk() -> None:
    """Where tiles outnumber them: not in a small product, one in fp32, a contraction in parts, or behind a norm.

    The model takes it where a multiprocessor holds one tile at a time and many follow each other after short sums.
    """
    half = lambda *shape: drawn(*shape, dtype=torch.bfloat16)  # noqa: E731
    relu = lambda a, b: torch.relu(a @ b)  # noqa: E731
    a100 = find("a100")
    for k, taken in ((256, True), (8192, False)):
        kernel = bound(relu, half(4096, k), half(k, 4096)).kernel
        default = default_schedule(kernel)
        tried = alternatives(kernel, default, a100)
        (walk,) = [s for s in tried if s.programs]
        assert walk == replace(default, programs=108) and "108 programs walk the tiles" in walk.label
        assert not any(s.programs for s in alternatives(kernel, default))
        alone = Code(156, 0, 65536, 8, 1, 0.125, 500, {}, {}, tensor=4)
        choice = modelled(kernel, default, a100, dict.fromkeys(tried, alone))
        assert (choice.chosen == walk) == taken, choice.why
        beside = dict.fromkeys(tried, replace(alone, blocks=2))
        assert modelled(kernel, default, a100, beside).chosen == default, "another tile multiplies while one waits"
    for f, inputs in (
        (relu, (half(512, 512), half(512, 512))),
        (relu, (drawn(4096, 256), drawn(256, 4096))),
        (lambda x, g: torch.mm(x.t(), g).float() * 2, (half(8192, 256), half(8192, 128))),
        (lambda x, w: torch.relu(F.layer_norm(x, (256,)) @ w), (half(4096, 256), half(256, 4096))),
    ):
        kernel = bound(f, *inputs).kernel  # type: ignore[arg-type]
        assert not any(s.programs for s in alternatives(kernel, default_schedule(kernel), a100))


def test_text(golden: Callable[..., None]) -> None:
    """Descriptors before the loop over tiles, and no address of an operand in it."""
    a, b = matrices("nt", 1024, 768, 512, torch.bfloat16)
    kernel = bound(lambda a, b: torch.relu(a @ b), a, b).kernel
    golden(emit(kernel, replace(default_schedule(kernel), programs=132, tma=True)))
