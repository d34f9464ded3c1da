"""Views stay views, copies stay copies, and an input that is returned is that input.

Who shares storage with whom is part of the answer: writing to one result must change what it changes in eager.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, randn


def views_and_detached_alias_outputs() -> Case:
    """pytorch/pytorch#194479: views of one intermediate beside a detached alias of it."""

    def fn(x: Tensor) -> Any:
        y = torch.sin(x) * 2
        return y[:3], y[3:], y.detach(), y.view(2, 3)

    return Case(fn, [(torch.linspace(0.1, 1.2, 6).requires_grad_(),)], grad=True)


def equal_outputs_do_not_share() -> Case:
    """pytorch/pytorch#114338: two equal calls give two tensors, though their values are the same."""

    def fn(x: Tensor) -> Any:
        a, i = torch.max(x, 1)
        b, _ = torch.max(x, 1)
        return a, b, i, F.layer_norm(x, (3,)), F.layer_norm(x, (3,)), x.relu(), x.relu(), x * 2 + 1, x * 2 + 1

    def check(outs: list[Any], ins: list[Tensor], _: object) -> None:
        for p, q in ((0, 1), (3, 4), (5, 6), (7, 8)):
            keep = outs[q].detach().clone()
            outs[p].detach().zero_()
            assert torch.equal(outs[q].detach(), keep), f"results {p} and {q} share storage"

    x = torch.arange(1.0, 7.0).reshape(2, 3)
    return Case(fn, [(x.sin(),), (x.cos().requires_grad_(),)], check=check)


def inputs_returned() -> Case:
    """An input comes back as itself, as a view, and unchanged through calls that are views of it in eager."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return x, x.view(-1), x.contiguous(), x.to(torch.float32), x.reshape(3, 4), y.contiguous(), x.expand(1, 4, 3), y

    return Case(fn, [(torch.arange(12.0).reshape(4, 3), torch.arange(6.0).reshape(2, 3).t())])


def no_op_calls_that_copy() -> Case:
    """Calls that change nothing and copy in eager: clone, ``+ 0``, ``* 1``, ``flatten`` of what is not dense."""

    def fn(x: Tensor) -> Any:
        return x.clone(), x + 0, x * 1, x.t().flatten(), x.to(torch.float32, copy=True), torch.cat([x]), x[[0, 1, 2]]

    return Case(fn, [(torch.arange(12.0).reshape(3, 4),)])


def views_of_inputs_with_gradients() -> Case:
    """Views of an input that needs gradients, of the same input twice, and of a view."""

    def fn(x: Tensor) -> Any:
        return x[0], x.t()[1:], x.view(2, 6)[:, ::2], x.unbind(1)[2], x.diagonal(), x.unsqueeze(0).squeeze()

    return Case(fn, [(randn(4, 3, grad=True),)], grad=True)


def views_of_written_inputs() -> Case:
    """An input is written, then returned, with a view of it: both are the input's storage."""

    def fn(x: Tensor) -> Any:
        x.mul_(2)
        return x, x[1:], x.t(), x + 1

    return Case(fn, [(torch.arange(6.0).reshape(3, 2),)])


def splits_and_chunks() -> Case:
    """Pieces of an intermediate share its storage; pieces that were changed by arithmetic do not."""

    def fn(x: Tensor) -> Any:
        y = x.relu()
        a, b = y.chunk(2, -1)
        c, d = y.split([1, 3], -1)
        return a, b * 1, c, d, y.narrow(1, 1, 2), y.unfold(1, 2, 1)

    return Case(fn, [(randn(3, 4),)])


def expanded_results() -> Case:
    """Broadcast results keep stride 0, and a write through the base shows in all of them."""

    def fn(x: Tensor) -> Any:
        y = x * 3
        return y.expand(4, 3), y.broadcast_to(2, 2, 3), y

    return Case(fn, [(torch.arange(3.0),)])


def dtype_views() -> Case:
    """The same bytes read as another dtype, of an intermediate and of an input."""

    def fn(x: Tensor) -> Any:
        y = x + 1
        return y.view(torch.int32), x.view(torch.int16), (y.view(torch.int32) & 0x7FFFFFFF).view(torch.float32)

    return Case(fn, [(randn(2, 4),)])


def detach_of_input_written_later() -> Case:
    """``detach`` shares storage: a later write to it is seen by the original."""

    def fn(x: Tensor) -> Any:
        y = x * 2
        z = y.detach()
        z += 1
        return y + 0, z

    return Case(fn, [(torch.arange(4.0),)])


def idle_dropout() -> Case:
    """Dropout that drops nothing is its input: a write to the one is a write to the other."""

    def fn(x: Tensor) -> Any:
        y = F.dropout(x, 0.5, training=False)
        y.mul_(2)
        z = F.dropout(x, 0.0)
        z.add_(1)
        return x.sum(), y, z

    return Case(fn, [(torch.arange(4.0),)])


def views_of_a_value_written_beside_gradients() -> Case:
    """AOTAutograd traces such views anew, behind the backward: they are the forward's all the same."""

    def fn(x: Tensor, y: Tensor) -> Any:
        z = torch.kron(y, torch.ones(2))
        w = F.silu(z, inplace=True)
        a = (y * 2).view(1, 1)
        b = a.mul_(3)
        return torch.minimum(x, y), w, z.view(-1, 1), z[1:], a.view(1), b

    return Case(fn, [(randn(4, 4).requires_grad_(), torch.tensor(0.3))], grad=True)


def views_of_written_parts() -> Case:
    """Inputs that are parts of something larger are written; views of them are given out, of sizes that may change."""

    def fn(x: Tensor) -> Any:
        x.mul_(0.5)
        return x.unsqueeze(0).expand(2, *x.shape), x.t(), x[1:], x.view(1, *x.shape)

    parts = (randn(7, 15)[1:, 1:], randn(6, 28)[:, ::2], randn(9, 4)[2:], randn(6, 5).t(), randn(4, 8)[::2].t())
    return Case(fn, [(p,) for p in parts], dynamic=True)


def views_that_are_written() -> Case:
    """The write goes through a view that keeps the gaps: flattened, turned, detached."""

    def fn(x: Tensor) -> Any:
        flat, turned = x.reshape(x.numel()).detach().mul_(0.5), x.mT
        turned.add_(1)
        return flat, turned, flat[1:], turned * 2

    return Case(fn, [(randn(n, 28)[:, ::2],) for n in (6, 9)], dynamic=True)


def views_of_inputs_of_changing_sizes() -> Case:
    """Under ``no_grad`` and not, by numbers that are sizes, one of several, and through a copy that is none."""

    def fn(x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            quiet = x[1:]
        parts = x.split(x.shape[0] // 2, 0)
        return quiet, parts[-1], x.contiguous().view(-1), x.view_as(x), y.expand_as(x), x.diagonal(), x.reshape(-1) * 2

    calls = [(randn(n, 6, grad=True), randn(1, 6, grad=True)) for n in (4, 7, 10)]
    return Case(fn, calls, grad=True, loss=range(1, 7), dynamic=True)


def views_of_expanded_inputs() -> Case:
    """Elements share memory, and each still has a gradient of its own."""

    def fn(x: Tensor) -> Any:
        return x.unfold(2, 2, 2), x[1:], x.mT

    return Case(fn, [(randn(1, 3, 6).expand(4, 3, 6).detach().requires_grad_(),)], grad=True)


def places_around_a_written_part() -> Case:
    """``as_strided`` counts from the start of the memory: places around a part of it, before and after writes to the part."""

    def fn(x: Tensor, y: Tensor) -> Any:
        before = x.as_strided((2, 2), (1, 2), 1)
        x.add_(1)
        after = x.as_strided((3, 2), (10, 3))
        y.T.mul_(2)
        return before * 2, after + 1, y.as_strided((2, 3), (1, 2), 1) * 3, y.as_strided((2,), (1,), 2)

    def inputs() -> tuple[Tensor, Tensor]:
        return randn(6, 10)[1:5, 2:7], randn(4, 10, seed=1)[:, ::2]

    return Case(fn, [inputs(), inputs()])


CASES = (
    views_and_detached_alias_outputs,
    equal_outputs_do_not_share,
    inputs_returned,
    no_op_calls_that_copy,
    views_of_inputs_with_gradients,
    views_of_written_inputs,
    splits_and_chunks,
    expanded_results,
    dtype_views,
    detach_of_input_written_later,
    idle_dropout,
    views_of_a_value_written_beside_gradients,
    views_of_written_parts,
    views_that_are_written,
    views_of_inputs_of_changing_sizes,
    views_of_expanded_inputs,
    places_around_a_written_part,
)
