"""Attention over sequences of any length on GPUs: which form is taken, what stays with ATen, and the numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from dsc import cost, link
from dsc.manager import PassPipeline, Remark
from dsc.options import Options
from dsc.passes.attention import Attention
from dsc.passes.attention_varlen import EFFICIENT, FLASH, _band
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.target import find as find_target
from kit_graphs import trace

varlen = pytest.importorskip("torch.nn.attention.varlen")
aten = torch.ops.aten
TAKES = inspect.signature(varlen.varlen_attn).parameters
SHARED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in TAKES else {}
ENDS = (0, 10, 10, 40, 41, 60)
Function = Callable[..., Any]


def ends(*places: int) -> Tensor:
    return torch.tensor(places or ENDS, dtype=torch.int32)


def operands(
    rows: int = 60, heads: int = 4, kv: int = 2, width: int = 16, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(rows, n, width, generator=g).to(dtype).requires_grad_() for n in (heads, kv, kv)]


def rewritten(
    f: Function, *given: Tensor, where: str = "h100", gain: float = 0, dynamic: bool = False
) -> tuple[GraphModule, list[Remark]]:
    gm = trace(lambda *a: f(*a), *given, dynamic=dynamic)
    reports = dict(PassPipeline((Canonicalize(), Attention(gain=gain))).run(gm, find_target(where)))
    return gm, list(reports["attention"].remarks)


def calls(gm: GraphModule) -> list[str]:
    """The operators of attention in a graph."""
    names = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    return [n for n in names if "attention" in n or "varlen" in n]


OURS = ["dsc.varlen_attention.default", "dsc.varlen_attention_backward.default"]
ATENS = ["torch_attn._varlen_attn.default", "torch_attn._varlen_attn_backward.default"]


def causal(q: Tensor, k: Tensor, v: Tensor, e: Tensor, longest: int = 30, **settings: Any) -> tuple[Tensor, ...]:
    """A train step's part, with the sums of rows."""
    given: dict[str, Any] = {"window_size": (-1, 0), **SHARED, **settings}
    out, sums = varlen.varlen_attn(q * 2, k, v, e, e, longest, longest, return_aux=varlen.AuxRequest(lse=True), **given)
    return out, sums, *torch.autograd.grad(out.float().square().sum(), (q, k, v))


def exact(q: Tensor, k: Tensor, v: Tensor, places: tuple[int, ...], scale: float, causal: bool = True) -> list[Tensor]:
    """``causal`` in float64, sequence by sequence, all with as many queries as keys."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    outs, sums = [], []
    for a, b in pairwise(places):
        mine, keys, values = (x[a:b] for x in leaves)
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", mine * 2, keys) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(b - a, b - a, dtype=torch.bool).triu(1), float("-inf"))
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    out = torch.cat(outs)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    return [out.detach(), torch.cat(sums, -1).detach(), *grads]


def close(found: Any, true: list[Tensor], dtype: torch.dtype) -> None:
    for mine, want in zip(found, true, strict=True):
        error = (mine.double() - want).norm() / want.norm()
        assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5)


# Where it fires.


@pytest.mark.parametrize("where", ["a100", "h100"])
def test_short_sequences_are_modelled_faster(where: str) -> None:
    """32 of 128 tokens; of 2,048 tokens ATen's kernel stays."""
    given = operands(4096, 8, 2, 64)
    places = ends(*range(0, 4097, 128))
    gm, (remark,) = rewritten(lambda *a: causal(*a, longest=128), *given, places, where=where, gain=1.1)
    assert (remark.verdict, calls(gm)) == ("did", OURS)
    assert remark.why.startswith("Triton instead of ATen's flash kernel: ") and " us and " in remark.why
    gm, (remark,) = rewritten(lambda *a: causal(*a, longest=2048), *given, ends(0, 2048, 4096), where=where, gain=1.1)
    assert (remark.verdict, calls(gm)) == ("skipped", ATENS)
    assert remark.why.startswith("ATen's flash kernel stays: ") and "Triton's flash attention would take" in remark.why


def test_one_long_sequence_among_short_ones_may_hold_them_all() -> None:
    """What is not known while compiling must not make it slower."""
    places = ends(*range(0, 4097, 128))
    _, (remark,) = rewritten(lambda *a: causal(*a, longest=4096), *operands(4096, 8, 2, 64), places, gain=1.1)
    assert remark.verdict == "skipped"


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_sums_and_gradients(dynamic: bool) -> None:
    def f(*given: Tensor) -> tuple[Tensor, ...]:
        return causal(*(x.view(x.shape[0], n, 16) for x, n in zip(given, (4, 2, 2))), given[3])

    given = operands()
    gm, (remark,) = rewritten(f, *(x.detach().flatten(1).requires_grad_() for x in given), ends(), dynamic=dynamic)
    assert (remark.verdict, calls(gm)) == ("did", OURS)
    assert dynamic == any(
        isinstance(n.meta["val"], torch.SymInt) for n in gm.graph.nodes if "sym_size" in str(n.target)
    )
    found = gm(*(x.detach().flatten(1) for x in given), ends())
    close(found, exact(*given, ENDS, 0.25), torch.bfloat16)
    assert found[1].shape == (4, 60) and found[1].dtype == torch.float32


def test_parts_of_one_product_keep_the_strides_that_were_foretold() -> None:
    def f(qkv: Tensor, e: Tensor) -> Tensor:
        out: Tensor = varlen.varlen_attn(*qkv.unbind(1), e, e, 30, 30)
        return torch.autograd.grad(out.float().square().sum(), qkv)[0]

    qkv = torch.randn(60, 3, 4, 16).bfloat16().requires_grad_()
    gm, (remark,) = rewritten(f, qkv, ends())
    assert remark.verdict == "did"
    for n in gm.graph.nodes:
        if "varlen" in str(n.target):
            q = n.args[1 if "backward" in str(n.target) else 0].meta["val"]
            assert n.meta["val"][0].stride() == torch.empty_like(q).stride()
    assert gm(qkv, ends()).shape == qkv.shape


def flash(q: Tensor, k: Tensor, v: Tensor, e: Tensor, dropout: float = 0.0, debug: bool = False) -> tuple[Tensor, ...]:
    """As nested tensors have it."""
    out, sums, *_ = aten._flash_attention_forward(q * 2, k, v, e, e, 30, 30, dropout, True, debug, scale=0.3)
    return out, sums, *torch.autograd.grad(out.float().square().sum(), (q, k, v))


def efficient(q: Tensor, k: Tensor, v: Tensor, e: Tensor, mask: int = 1, longest: int = 30) -> tuple[Tensor, ...]:
    """As nested tensors have it, a batch of one."""
    out, *_ = aten._efficient_attention_forward(
        *(x[None] for x in (q * 2, k, v)), None, e, e, longest, longest, 0.0, mask, True
    )
    return out[0], *torch.autograd.grad(out.float().square().sum(), (q, k, v))


def test_atens_own_calls() -> None:
    given = operands()
    gm, (remark,) = rewritten(flash, *given, ends())
    assert (remark.verdict, calls(gm)) == ("did", OURS)
    close(gm(*given, ends()), exact(*given, ENDS, 0.3), torch.bfloat16)
    for mask in (0, 1):
        given = operands(kv=4, dtype=torch.float32)
        gm, (remark,) = rewritten(lambda *a, m=mask: efficient(*a, mask=m), *given, ends())
        assert (remark.verdict, calls(gm)) == ("did", OURS) and "efficient kernel" in remark.why
        out, _, *grads = exact(*given, ENDS, 0.25, causal=mask == 1)
        close(gm(*given, ends()), [out, *grads], torch.float32)


def test_without_a_gradient() -> None:
    given = [x.detach() for x in operands()]
    gm, (remark,) = rewritten(lambda q, k, v, e: varlen.varlen_attn(q, k, v, e, e, 30, 30, **SHARED), *given, ends())
    assert (remark.verdict, calls(gm)) == ("did", OURS[:1])
    assert gm(*given, ends()).shape == given[0].shape


def test_compiled_whole() -> None:
    """Forward and backward programs for an H100, run here."""
    sources: list[str] = []
    options = {
        "target": "h100", "passes": "canonicalize,attention{gain=0},recompute,fuse", "cache": False,
        "on_compile": lambda c: sources.append(c.program.source),
    }  # fmt: skip

    @torch.compile(backend="dsc", options=options)
    def f(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> Tensor:
        return varlen.varlen_attn(q * 2, k, v, e, e, 30, 30, window_size=(-1, 0), **SHARED)  # type: ignore[no-any-return]

    given = operands()
    out = f(*given, ends())
    grads = torch.autograd.grad(out.float().square().sum(), given)
    true = exact(*given, ENDS, 0.25)
    close([out.detach(), *grads], [true[0], *true[2:]], torch.bfloat16)
    assert ["varlen_attention" in s for s in sources] == [True, True], "forward and backward"


# Where it does not.


def seeded(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    out, _, state = torch.ops.torch_attn._varlen_attn(q, k, v, e, e, 30, 30)
    return out, state


def summed(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    return aten._efficient_attention_forward(*(x[None] for x in (q, k, v)), None, e, e, 30, 30, 0.0, 0, True)[:2]  # type: ignore[no-any-return]


def biased(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> Tensor:
    given = (q.detach()[None], k.detach()[None], v.detach()[None], q.new_zeros(1, 4, 60, 60))
    return aten._efficient_attention_forward(*given, e, e, 30, 30, 0.0, 0, True)[0]  # type: ignore[no-any-return]


def long_ends(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> tuple[Tensor, ...]:
    return causal(q, k, v, e.long())


def turned(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> tuple[Tensor, ...]:
    return causal(q, k.mT.contiguous().mT, v, e)


def not_square(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> Tensor:
    return varlen.varlen_attn(q, k, v, e, e[1:], 30, 30)  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Function, list[Tensor]]] = {
    "f32 operands": (causal, operands(dtype=torch.float32)),
    "f64 operands": (efficient, operands(kv=4, dtype=torch.float64)),
    "heads 264 wide": (causal, operands(width=264)),
    "heads 20 wide": (causal, operands(width=20)),
    "heads 128 wide": (efficient, operands(kv=4, width=128, dtype=torch.float32)),
    "dropout has random numbers of its own": (lambda *a: flash(*a, dropout=0.1), operands()),
    "its weights are wanted": (lambda *a: flash(*a, debug=True), operands()),
    "one query a sequence, which ATen splits by keys": (lambda *a: causal(*a, longest=1), operands()),
    "ends that are no row of int32": (long_ends, operands()),
    "rows that are not whole": (turned, operands()),
    "operands of sizes that differ": (not_square, operands(kv=4)),
    "bias is given": (biased, operands(kv=4)),
    "what it says beside its output is read": (seeded, operands(kv=4)),
    "its mask leaves rows without a number": (lambda *a: efficient(*a, mask=2), operands(kv=4)),
    "lengths that ATen compares with the rows that there are": (lambda *a: efficient(*a, longest=61), operands(kv=4)),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_it_says_why_not(why: str) -> None:
    f, given = REFUSED[why]
    gm, (remark,) = rewritten(f, *given, ends())
    assert (remark.verdict, remark.why) == ("skipped", f"stays with ATen: {why}")
    assert not any(name in OURS for name in calls(gm))


@pytest.mark.skipif("seqused_k" not in TAKES, reason="this torch has no such argument")
def test_arguments_that_it_does_not_know() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> Tensor:
        return varlen.varlen_attn(q, k, v, e, e, 30, 30, seqused_k=e[1:] - e[:-1])  # type: ignore[no-any-return]

    _, (remark,) = rewritten(f, *(x.detach() for x in operands(kv=4)), ends())
    assert (remark.verdict, remark.why) == ("skipped", "stays with ATen: seqused_k is given")


def test_sums_of_the_memory_efficient_kernel_lie_otherwise() -> None:
    gm, (remark,) = rewritten(summed, *operands(kv=4), ends())
    assert (remark.verdict, remark.why) == ("skipped", "stays with ATen: what it says beside its output is read")
    assert calls(gm) == ["aten._efficient_attention_forward.default"]


def test_flash_kernels_of_another_package_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.nn.attention.activate_flash_attention_impl``: what it is asked for is not ATen's."""
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3", raising=False)
    gm, (remark,) = rewritten(causal, *operands(), ends())
    assert (remark.verdict, remark.why) == ("skipped", "stays with ATen: FA3 is active in its place")
    assert calls(gm) == ATENS


def test_arithmetic_is_counted_alike() -> None:
    before = trace(lambda *a: causal(*a), *operands(), ends())
    after, _ = rewritten(causal, *operands(), ends())
    counted = [sum(cost.flops(n) for n in gm.graph.nodes if cost.unit(n) == "attention") for gm in (before, after)]
    assert counted[0] == counted[1] > 0


def test_a_window_beside_lengths_that_are_symbols() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> Tensor:
        q, k, v = (x.view(x.shape[0], 4, 16) for x in (q, k, v))
        return varlen.varlen_attn(q, k, v, e, e, q.shape[0], q.shape[0], window_size=(4, 0))  # type: ignore[no-any-return]

    given = [x.flatten(1) for x in operands(kv=4)]
    _, (remark,) = rewritten(f, *given, ends(), dynamic=True)
    assert (remark.verdict, remark.why) == ("skipped", "stays with ATen: a window beside lengths that are symbols")
    _, (remark,) = rewritten(f, *given, ends())
    assert remark.verdict == "did"


@pytest.mark.parametrize(
    ("window", "causal", "band"),
    [
        ((-1, -1), False, (-1, -1, True)),
        ((-1, 0), False, (-1, 0, True)),  # causal, whether it is said or not
        ((-1, -1), True, (-1, 0, True)),
        ((None, None), True, (-1, 0, True)),
        ((5, 3), True, (5, 0, True)),
        ((5, 3), False, (5, 3, True)),
        ((30, 3), False, (-1, 3, True)),  # as wide as the longest is no bound
        ((5, 30), False, (5, 30, True)),
        ((5, -1), False, (5, 30, True)),
        ((-1, 31), False, (-1, -1, True)),
    ],
)
def test_windows_are_those_of_the_flash_kernel(
    window: tuple[Any, Any], causal: bool, band: tuple[int, int, bool]
) -> None:
    names = {"window_size_left": window[0], "window_size_right": window[1], "is_causal": causal}
    assert _band(FLASH, names, 30) == band
    assert _band(EFFICIENT, {"custom_mask_type": 1}, 30) == (-1, 0, False)


@pytest.mark.parametrize("where", ["a100", "h100"])
def test_kernels_stand_around_what_stays(where: str) -> None:
    """The program calls ATen as it is."""
    gm = trace(lambda *a: causal(*a), *operands(dtype=torch.float32), ends())
    target = find_target(where)
    PassPipeline((Canonicalize(), Attention(gain=0), Fuse())).run(gm, target)
    assert calls(gm) == ATENS
    program, bound, refused = link.link(gm, Options(emit="triton"), "inference")
    assert program.source.count("varlen_attn") >= 2 and len(bound) >= 2 and not refused


def test_programs_for_cpus_stay_as_they_are() -> None:
    gm, remarks = rewritten(causal, *operands(), ends(), where="cpu")
    assert calls(gm) == ATENS and not remarks
