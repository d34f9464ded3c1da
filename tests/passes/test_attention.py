"""Attention on GPUs: which form is taken, what it leaves alone, and that numbers stay eager's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsc import text
from dsc.debug.capture import Session, capture
from dsc.debug.source import Model
from dsc.manager import Remark
from dsc.options import Options

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Attention with shared heads, around a core [B, H, T, D] x [B, H', T, D] -> [B, H, T, D]."""

    def __init__(self, core: Core, width: int = 32, heads: int = 4, kv: int = 4) -> None:
        super().__init__()
        self.core, self.heads, self.kv = core, heads, kv
        self.q, self.k, self.v = (nn.Linear(width, width * n // heads, bias=False) for n in (heads, kv, kv))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(*x.shape[:2], n, -1).transpose(1, 2)
            for f, n in ((self.q, self.heads), (self.k, self.kv), (self.v, self.kv))
        )
        return self.core(q, k, v).transpose(1, 2).reshape(x.shape)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in nanoGPT."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril().logical_not()
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in Hugging Face's LLaMA: heads repeated by hand, a mask that is added, a softmax in fp32."""
    batch, kv, length, width = k.shape
    k, v = (x[:, :, None].expand(batch, kv, q.shape[1] // kv, length, width).reshape(q.shape) for x in (k, v))
    mask = torch.full((length, length), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device).triu(1)
    scores = q @ k.transpose(2, 3) / math.sqrt(width) + mask
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def repeats(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def session(core: Core, dtype: torch.dtype = torch.float32, passes: str | None = None, **options: Any) -> Session:
    """The layer's train step for an H100."""
    layer = Layer(core, kv=2 if core in (shared, repeats) else 4).to(dtype)
    x = torch.randn(2, 24, 32, dtype=dtype, requires_grad=True)
    given = Options(passes=passes and f"canonicalize,{passes},recompute,fuse", **options)
    return capture(Model("layer", layer, (x,)), "h100", given)


def told(found: Session) -> tuple[Remark, ...]:
    (report,) = (s.report for s in found.regions[0].of("joint") if s.name == "attention")
    assert report is not None
    return report.remarks


def joint(found: Session) -> str:
    return text.show(found.regions[0].of("joint")[-1].gm.graph)


# By hand.


@pytest.mark.parametrize("core", [causal, shared])
def test_numbers_are_eagers(core: Core) -> None:
    torch.manual_seed(0)
    layer = Layer(core, kv=2 if core is shared else 4)
    x = torch.randn(2, 24, 32, requires_grad=True)
    passes = "canonicalize,attention{gain=0},recompute,fuse"
    sources: list[str] = []
    compiled = torch.compile(
        layer, backend="dsc",
        options={"target": "h100", "passes": passes, "cache": False, "on_compile": lambda c: sources.append(c.program.source)},
    )  # fmt: skip

    def step(f: Callable[[Tensor], Tensor], m: nn.Module, x: Tensor) -> list[Tensor]:
        y = f(x)
        weights = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
        return [y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *m.parameters()])]

    found, eager = step(compiled, layer, x), step(layer, layer, x)
    assert ["flash_attention" in s for s in sources] == [True, True], "forward and backward"
    exact_layer = copy.deepcopy(layer).double()
    exact = step(exact_layer, exact_layer, x.detach().double().requires_grad_())
    for mine, theirs, true in zip(found, eager, exact):
        assert mine.stride() == theirs.stride()
        assert (mine - true).norm() <= 4 * (theirs - true).norm()


def test_a_causal_mask_is_not_read_and_heads_are_not_repeated() -> None:
    found = session(shared, torch.bfloat16, "attention{gain=0, fast=true}")
    (remark,) = told(found)
    assert remark.verdict == "did" and "causal" in remark.why
    graph = joint(found)
    assert "bf16[2,2,24,8]" in graph and "None, None, 1.0, True" in graph
    assert "expand" not in graph and "bmm" not in graph and "triu" not in graph


def test_dropout_keeps_the_calls_to_the_generator() -> None:
    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.mT / 3).softmax(-1), 0.1) @ v

    found = session(dropped, torch.float32, "attention{gain=0}")
    assert [r.verdict for r in told(found)] == ["did"]
    graph = joint(found)
    assert "native_dropout(new_empty_default, 0.1, True)" in graph and "_softmax" not in graph
    assert "1.1111" in graph, "what stays is scaled up"


def test_sixteen_bits_need_fast_numerics() -> None:
    (remark,) = told(session(causal, torch.bfloat16))
    assert remark.verdict == "skipped" and 'numerics="fast"' in remark.why
    (remark,) = told(session(causal, torch.bfloat16, numerics="fast"))
    assert 'numerics="fast"' not in remark.why, "only time speaks against it now"


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + q.sum(-1, keepdim=True)).softmax(-1) @ v


def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v * weights.sum()


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(q.sum(-1, keepdim=True) > 0, -1e4).softmax(-1) @ v


REFUSED = {
    "its mask has a gradient": (biased, torch.float32),
    "its weights are read": (read, torch.float32),
    "what is not seen is a number, and a row may see nothing": (filled, torch.float32),
    "f64 operands": (causal, torch.float64),
}


@pytest.mark.parametrize("why", REFUSED)
def test_it_says_why_not(why: str) -> None:
    core, dtype = REFUSED[why]
    (remark,) = told(session(core, dtype, "attention{gain=0, fast=true}"))
    assert (remark.verdict, remark.why) == ("skipped", f"stays products and a softmax: {why}")


def test_what_is_modelled_slower_stays() -> None:
    (remark,) = told(session(causal, torch.float32, "attention{gain=1000}"))
    assert (
        remark.verdict == "skipped" and " us and " in remark.why and "Triton's flash attention would take" in remark.why
    )


# ATen's kernels.


def test_flash_reads_shared_heads_as_they_are() -> None:
    found = session(repeats, torch.bfloat16)
    (remark,) = told(found)
    assert (remark.verdict, remark.why.split(":")[0]) == ("did", "reads 2 heads where one is shared")
    graph = joint(found)
    assert "expand" not in graph and graph.count("_scaled_dot_product_flash_attention") == 2
    assert "sum" not in graph, "the kernel sums the gradients of shared heads"


def test_memory_efficient_attention_with_shared_heads() -> None:
    found = session(repeats, torch.float32, "attention{gain=0}")
    (remark,) = told(found)
    assert remark.verdict == "did" and "instead of ATen's efficient kernel" in remark.why
    graph = joint(found)
    assert graph.count("dsc.flash_attention") == 2 and "expand" not in graph and "efficient" not in graph
    (remark,) = told(session(repeats, torch.float32, "attention{gain=1000}"))
    assert remark.why.startswith("ATen's efficient kernel stays:")


def test_programs_for_cpus_have_no_such_pass() -> None:
    layer, x = Layer(causal), torch.randn(2, 24, 32, requires_grad=True)
    found = capture(Model("layer", layer, (x,)), "cpu")
    assert all(s.name != "attention" for s in found.regions[0].stages)
