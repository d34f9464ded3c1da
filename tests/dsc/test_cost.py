"""Operations against torch's own counter, bytes against counts made by hand, seconds against the roofline."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dsc import cost, target
from dsc.ops import name_of
from dsc.passes.fuse import Fuse
from kit_graphs import CPU, trace

A100 = target.find("a100")


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def backward_of(f: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda *xs: torch.autograd.grad(f(*xs).sum(), xs)


PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "mm": (torch.mm, (rand(3, 5), rand(5, 7))),
    "addmm": (torch.addmm, (rand(7), rand(3, 5), rand(5, 7))),
    "bmm": (torch.bmm, (rand(2, 3, 5), rand(2, 5, 7))),
    "baddbmm": (torch.baddbmm, (rand(2, 3, 7), rand(2, 3, 5), rand(2, 5, 7))),
    "conv": (lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=2), (rand(2, 4, 9, 9), rand(6, 2, 3, 3))),
    "conv1d": (lambda x, w: F.conv1d(x, w), (rand(2, 4, 9), rand(6, 4, 3))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (rand(2, 4, 5, 5), rand(4, 3, 3, 3))),
    "conv backward": (
        backward_of(lambda x, w: F.conv2d(x, w, padding=1)),
        (rand(2, 4, 9, 9).requires_grad_(), rand(6, 4, 3, 3).requires_grad_()),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_convolutions_are_torchs(name: str) -> None:
    f, inputs = PRODUCTS[name]
    with FlopCounterMode(display=False) as counter:
        f(*inputs)
    gm = trace(f, *inputs)
    assert sum(cost.flops(n) for n in gm.graph.nodes if cost.unit(n) != "vector") == counter.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    """2 and 5 products of [T, T, D] a head; half of them if causal."""
    x = rand(2, 3, 64, 16).requires_grad_()
    gm = trace(backward_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)), x, x, x)
    once = 2 * (2 * 3 * 64 * 64 * 16) / (2 if causal else 1)
    found = [cost.flops(n) for n in gm.graph.nodes if cost.unit(n) == "attention"]
    assert found == [2 * once, 5 * once]


def test_attention_of_sequences_that_lie_one_after_the_other() -> None:
    """Three of 20 tokens on average, 4 heads of 16; and the layout of ATen's own kernels."""
    varlen = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    x, ends = rand(60, 4, 16).bfloat16().requires_grad_(), torch.tensor([0, 10, 40, 60], dtype=torch.int32)
    once = 2 * (2 * 60 * 20 * 4 * 16)

    def both(q: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        out = varlen(q, q, q, ends, ends, 30, 30)
        return out, *torch.autograd.grad(out.float().sum(), q)

    gm = trace(both, x, ends)
    found = [cost.flops(n) for n in gm.graph.nodes if "varlen" in str(n.target)]
    assert found == [once, 2.5 * once]

    def rows(q: Tensor, ends: Tensor | None) -> Tensor:
        return torch.ops.aten._flash_attention_forward(q, q, q, ends, ends, 30, 30, 0.0, False, False)[0]

    flat = rand(60, 4, 16).bfloat16()
    (node,) = (n for n in trace(rows, flat, ends).graph.nodes if "flash" in str(n.target))
    assert cost.flops(node) == once
    whole = trace(lambda q: rows(q, None), rand(3, 20, 4, 16).bfloat16())
    assert [cost.flops(n) for n in whole.graph.nodes if "flash" in str(n.target)] == [once]


def test_one_an_element() -> None:
    gm = trace(lambda x: (x.exp() + 1).sum(1).view(2, 4), rand(8, 32))
    assert [cost.flops(n) for n in gm.graph.nodes if n.op == "call_function"] == [256, 256, 256, 0]


def test_bytes() -> None:
    def f(table: Tensor, index: Tensor, row: Tensor) -> Tensor:
        looked = F.embedding(index, table)
        return (looked + row.expand(3, 8)).t()

    gm = trace(f, rand(1000, 8), torch.tensor([1, 2, 3]), rand(8))
    found = {name_of(n): cost.bytes_moved(n) for n in gm.graph.nodes if n.op == "call_function"}
    assert found == {
        "embedding.default": 3 * 8 * 4 + 3 * 8 + 3 * 8 * 4,
        "expand.default": 0,
        "add.Tensor": 3 * 8 * 4 + 8 * 4 + 3 * 8 * 4,
        "t.default": 0,
    }


def test_a_group_moves_only_what_crosses_its_border() -> None:
    gm = trace(lambda x: (x.exp() + x).sin(), rand(1024))
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert cost.bytes_of_group(nodes) == 2 * 4096
    assert cost.seconds_of_group(nodes, A100) == pytest.approx(8192 / (2039e9 * 0.85) + 3e-6)


def test_graph_cost_follows_the_groups() -> None:
    gm = trace(lambda x: (x.exp() + x).sin(), rand(1024))
    apart = cost.graph_cost(gm, A100)
    Fuse().run(gm, CPU)
    together = cost.graph_cost(gm, A100)
    assert apart.bytes == (2 + 3 + 2) * 4096
    assert together.bytes == 2 * 4096
    assert apart.seconds > 2 * together.seconds
    assert apart.flops == together.flops == 3 * 1024


@pytest.mark.parametrize(
    ("dtype", "machine", "peak"),
    [
        (torch.bfloat16, "a100", 312e12),
        (torch.float32, "a100", 19.5e12),
        (torch.bfloat16, "h100", 989e12),
        (torch.float32, "cpu", 0.7e12),
    ],
)
def test_a_large_product_is_bound_by_arithmetic(dtype: torch.dtype, machine: str, peak: float) -> None:
    gm = trace(torch.mm, rand(2048, 2048, dtype=dtype), rand(2048, 2048, dtype=dtype))
    (mm,) = (n for n in gm.graph.nodes if n.op == "call_function")
    assert cost.seconds(mm, target.find(machine)) == pytest.approx(2 * 2048**3 / (0.65 * peak), rel=0.15)


def test_symbolic_sizes_count_as_hints() -> None:
    gm = trace(torch.mm, rand(6, 5), rand(5, 7), dynamic=True)
    (mm,) = (n for n in gm.graph.nodes if name_of(n) == "mm.default")
    assert (cost.flops(mm), cost.bytes_moved(mm)) == (2 * 6 * 5 * 7, 4 * (30 + 35 + 42))
