"""Forward and backward copied out of a joint graph: node for node what torch's partitioner makes, or left to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from dsc import compiler, defaults
from dsc.extract import extract
from dsc.manager import PassPipeline
from dsc.models import zoo
from dsc.partition import drop_leftovers, partition
from dsc.target import find
from dsc.torch_shim import aot_autograd, default_partition, make_boxed_func

PLAIN = ("gpt-tiny", "llama-tiny", "vit-tiny", "encdec-tiny", "moe-tiny", "resnet-tiny")


def nodes(gm: GraphModule) -> list[tuple[object, ...]]:
    """All that tells two graphs apart but the fake values, which are the same objects."""
    told = [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs), sorted(map(str, n.meta))) for n in gm.graph.nodes]
    output = gm.graph.output_node().meta
    return [*told, (str(output["desc"]), output["output_stack_traces"])]


def splits(fn: Callable[..., Any], inputs: Sequence[Any], dynamic: bool | None = None) -> list[bool]:
    """Whether each joint graph of ``fn``, before and after our passes, was plain; those that were are compared."""
    found: list[bool] = []

    def compared(joint: GraphModule, given: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        mine = extract(joint, kwargs["num_fwd_outputs"])
        theirs = default_partition(joint, given, **kwargs)
        drop_leftovers(*theirs)
        found.append(mine is not None)
        if mine is not None:
            assert [nodes(g) for g in mine] == [nodes(g) for g in theirs]
        return theirs

    def split(joint: GraphModule, given: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        compared(compiler.copied(joint), given, **kwargs)
        PassPipeline(defaults.JOINT).run(joint, find("cpu"))
        return compared(joint, given, **kwargs)

    def boxed(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=boxed, partition_fn=split)
    out = torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    sum(o.sum() for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad).backward()
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_models_of_the_zoo(name: str) -> None:
    entry = zoo.load(name)
    assert splits(entry.build(), entry.inputs()) == [True, True]


def pieces(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a, b, c = (x @ w).split(2, dim=1)
    return a * b.sigmoid(), c, x.topk(2)[0]


def dropped(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.dropout(x @ w, 0.5).relu()


def returned_and_saved(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = (x @ w).exp()
    return y, (y * w).tanh()


@pytest.mark.parametrize("fn", [pieces, dropped, returned_and_saved])
def test_small_graphs(fn: Callable[..., Any]) -> None:
    inputs = [torch.randn(6, 6, requires_grad=True) for _ in range(2)]
    assert all(splits(fn, inputs))


OPS: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    torch.add, torch.mul, torch.matmul, lambda a, b: a.softmax(1) + b, lambda a, b: torch.cat([a, b])[2:8],
    lambda a, b: a.chunk(2, 1)[0].sum(1, keepdim=True) * b, lambda a, b: a.detach() * b, lambda a, b: a.max(1)[0][:, None] - b,
)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_random_graphs(steps: list[tuple[int, int, int]]) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y]
        for op, i, j in steps:
            values.append(OPS[op](values[i % len(values)], values[j % len(values)]))
        return values[-1] + x, values[len(values) // 2] * 2

    assert all(splits(fn, [torch.randn(6, 6, requires_grad=True) for _ in range(2)]))


def policies(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    return checkpoint(lambda a: (a @ w).relu().exp(), x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["of a result", "that the backward reads", "of an input"])
def test_writes_of_the_forward(kind: str) -> None:
    def fn(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
        y = x @ w
        buffer.mul_(0.9).add_((x if kind == "of an input" else y).detach())
        return (y * buffer).exp() if kind == "that the backward reads" else y * 2

    inputs = [torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True), torch.zeros(6, 6)]
    assert all(splits(fn, inputs))


def written_in_the_backward(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, into: Tensor) -> Tensor:
            ctx.save_for_backward(into)
            return a * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            (into,) = ctx.saved_tensors
            into.add_(g)
            return g * 2, None

    return Counted.apply(x @ w, buffer)  # type: ignore[no-any-return,no-untyped-call]


def test_what_asks_for_more_is_left_to_torch() -> None:
    inputs = [torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True), torch.zeros(6, 6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not any(splits(policies, inputs))
        assert not any(splits(written_in_the_backward, inputs))
    assert not any(splits(lambda x, w, _: x @ w * x.shape[0], inputs, dynamic=True))


def test_a_setting_of_torch_is_heard() -> None:
    import torch._functorch.config as config

    inputs = [torch.randn(6, 6, requires_grad=True) for _ in range(2)]
    with config.patch(_sync_decision_cross_ranks=True):
        found: list[Any] = []

        def split(joint: GraphModule, given: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
            found.append(extract(joint, kwargs["num_fwd_outputs"]))
            with config.patch(_sync_decision_cross_ranks=False):
                return partition(joint, given, **kwargs)

        torch._dynamo.reset()
        compile_ = aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=split)
        torch.compile(dropped, backend=compile_)(*inputs).sum().backward()
    assert found == [None]
