"""Writes happen in the order of the program: copies keep old values, later reads see new ones.

A compiler that makes writes functional must put each back at its place, also those whose result nobody uses.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from conformance.case import Case, randn


def read_then_inplace_log() -> Case:
    """pytorch/pytorch#176857: a value is read, then its buffer is overwritten; the copy must hold the old one."""

    def fn(x: Tensor) -> Any:
        y = x.clone()
        x.log_()
        z = y + x
        x.add_(1)
        return z, y

    return Case(fn, [(torch.tensor([1.0, 2.0, 4.0]),), (torch.linspace(0.5, 3, 33),)])


def slice_copy_then_mutate_source() -> Case:
    """pytorch/pytorch#198131: a copy through a full-range slice, then a write to its source."""

    def fn(dst: Tensor, src: Tensor) -> Tensor:
        dst[:, 0:] = src[:, 0:]
        src.sub_(10.0)
        return src * 2

    return Case(fn, [(torch.full((3, 5), -1.0), torch.arange(15.0).reshape(3, 5))])


def copy_back_must_not_alias_output() -> Case:
    """pytorch/pytorch#195451: a clone is scattered into, copied back into the argument and returned."""

    def fn(param: Tensor, idx: Tensor, val: Tensor) -> Tensor:
        new = param.clone()
        new[idx] = val
        param.copy_(new)
        return new

    def check(outs: list[Any], ins: list[Tensor], _: object) -> None:
        old = ins[0].clone()
        outs[0].zero_()
        assert torch.equal(ins[0], old), "the result aliases the argument"

    arguments = (torch.arange(12.0).reshape(4, 3), torch.tensor([1, 3]), torch.tensor([[5.0], [6.0]]))
    return Case(fn, [arguments], check=check)


def unused_inplace_results_survive() -> Case:
    """pytorch/pytorch#68301: in-place calls through views, whose return value nobody reads."""

    def fn(x: Tensor, m: Tensor) -> Any:
        x.view(-1).mul_(2)
        buf = torch.full((3, 4), 1.0)
        buf.masked_fill_(m, 0.0)
        buf.t()[0].add_(5)
        x.diagonal().fill_(-1)
        return buf.to(torch.bfloat16), x[:2] + 0

    return Case(fn, [(torch.arange(12.0).reshape(3, 4), torch.eye(3, 4).bool())])


def swap_through_copies() -> Case:
    """Two arguments exchange their values; each copy reads what the other was."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        old = a.clone()
        a.copy_(b)
        b.copy_(old)
        return a - b

    return Case(fn, [(randn(4, 3), randn(4, 3, seed=1))])


def overlapping_shift() -> Case:
    """``x[1:] = x[:-1].clone()`` and a running update through slices of one buffer."""

    def fn(x: Tensor) -> Tensor:
        x[1:] = x[:-1].clone()
        for i in range(1, 4):
            x[i] += x[i - 1]
        return x.sum(0)

    return Case(fn, [(torch.arange(15.0).reshape(5, 3),)])


def write_between_two_reads() -> Case:
    """The same expression is computed before and after a write: not one common subexpression."""

    def fn(x: Tensor, y: Tensor) -> Any:
        a = x.exp() * y
        x.add_(1)
        b = x.exp() * y
        y[0].zero_()
        return a, b, x.exp() * y

    return Case(fn, [(randn(3, 4), randn(3, 4, seed=1))])


def write_to_one_of_two_views() -> Case:
    """Two arguments are views of one storage: a write to one is seen through the other."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return b + 1

    base = torch.arange(6.0)
    return Case(fn, [(base[:4], base[2:])])


def same_tensor_twice() -> Case:
    """One tensor is passed as both arguments, and written through one of them."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.add_(b)
        return a * b

    def arguments() -> tuple[Tensor, Tensor]:
        x = torch.arange(4.0)
        return x, x

    return Case(fn, [arguments(), (torch.arange(4.0), torch.ones(4)), arguments()])


def out_arguments() -> Case:
    """``out=`` of several calls writes to arguments, also to a part of one."""

    def fn(x: Tensor, out: Tensor) -> Tensor:
        torch.add(x, 1, out=out[0])
        torch.mul(out[0], x, out=out[1])
        return out.sum()

    return Case(fn, [(randn(5), torch.zeros(2, 5))])


def integer_in_place_keeps_its_dtype() -> Case:
    """``x += 1.5`` is an error on integers, ``x *= 3`` wraps in place, a copy casts."""

    def fn(x: Tensor, f: Tensor) -> Any:
        x *= 100
        x[1:] = f[1:] * 2.9
        return x // 7, x

    return Case(fn, [(torch.tensor([1, 2, 3], dtype=torch.int8), torch.tensor([1.5, -2.5, 3.5]))])


def leaf_updated_without_gradients() -> Case:
    """An optimiser's own step: parameters are written under ``no_grad``, then used with gradients."""

    def fn(w: Tensor, g: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            w.sub_(g, alpha=0.1)
        return (x @ w).tanh().sum()

    return Case(fn, [(randn(4, 2, grad=True), randn(4, 2, seed=1), randn(3, 4, seed=2))], grad=True)


def index_and_mask_assignment() -> Case:
    """Assignment by mask, by list and by tensor; each later one sees the earlier."""

    def fn(x: Tensor, m: Tensor) -> Tensor:
        x[m] = 7.0
        x[[0, 2]] = x[[2, 0]]
        x[:, torch.tensor([1, 1])] = torch.tensor([[1.0, 1.0]])
        x[..., -1] *= 2
        return x.cumsum(0)

    return Case(fn, [(torch.arange(12.0).reshape(3, 4), torch.arange(12).reshape(3, 4) % 5 == 0)])


def resize_and_fill_of_results() -> Case:
    """A result of the program is written to by a later part of it, through a view of a view."""

    def fn(x: Tensor) -> Any:
        y = x * 2
        z = y.view(2, 6).t()[1:4]
        z.fill_(0)
        y[0, 0] = -5
        return y, z, y.sum(1)

    return Case(fn, [(torch.arange(12.0).reshape(3, 4),)])


def two_written_inputs_one_with_gradients() -> Case:
    """One write needs autograd, the other does not; the second written input is a result too, before another one."""

    def fn(x: Tensor, scale: Tensor, p: Tensor, w: Tensor) -> Any:
        a = x.mul_(scale)
        b = p + w
        return a, b, w.masked_fill_(w > 0, 0.25), p.sin()

    return Case(
        fn, [(randn(n, 4), randn(1, grad=True), randn(2, 4, seed=1), randn(4, seed=2)) for n in (3, 0)], grad=True
    )


def written_input_is_the_first_result() -> Case:
    """The same, where nothing that is given out has a gradient but the other written input."""

    def fn(x: Tensor, scale: Tensor, w: Tensor, p: Tensor) -> Any:
        x.mul_(scale)
        return w.mul_(2), p.sin(), w.add_(1)

    return Case(fn, [(randn(3, 4), randn(1, grad=True), randn(4, seed=2), randn(5, seed=3))])


def written_input_beside_another_layout() -> Case:
    """One input gets another shape, another is written and given out."""

    def fn(x: Tensor, w: Tensor, p: Tensor) -> Any:
        x.t_()
        return p.cos(), w.mul_(2), p.sin()

    return Case(fn, [(randn(3, 4), randn(4, seed=2), randn(5, seed=3))])


def numpy_arrays_written_in_place() -> Case:
    """Dynamo's stand-ins for NumPy's operators write without a name that says so; each may run once."""

    def fn(t: Tensor, u: Tensor) -> Any:
        x, y = t.numpy(), u.numpy()
        x += 1
        part = x[1:]
        part *= 2
        y[0] = 7
        y -= x
        y.sort()
        return (
            torch.from_numpy(part.copy()),
            torch.from_numpy(x),
            torch.from_numpy(y[::2].copy()),
            float(x.sum()),
            torch.from_numpy(y),
        )

    return Case(fn, [(randn(4, seed=i), randn(4, seed=i + 9)) for i in range(2)])


def writes_spelled_as_methods() -> Case:
    """``x.__iadd__(y)`` writes as ``x += y`` does, once, whatever views of it are given out."""

    def fn(x: Tensor, y: Tensor) -> Any:
        a, b = x.__iadd__(1)[0], x.__imul__(2).t()
        y.__setitem__(0, 3.0)
        y.t().__isub__(x.sum())
        return a, b, x.__getitem__(1), y.__itruediv__(2)[1:], x

    return Case(fn, [(randn(3, 4, seed=i), randn(2, 3, seed=i + 5)) for i in range(2)])


def writes_inside_of_transforms() -> Case:
    """Views made under ``torch.func``, whose calls mean something inside of the transform alone, beside writes."""

    def fn(x: Tensor, y: Tensor) -> Any:
        x.mul_(2)
        rows = torch.vmap(lambda v: v[1:])(x)
        columns = torch.vmap(lambda v: v.view(-1, 1), in_dims=1, out_dims=1)(y)
        slope, part = torch.func.grad(lambda v: ((v * v).sum(), v[1:]), has_aux=True)(y)
        return rows, columns, slope, part, x.t()

    return Case(fn, [(randn(3, 4), randn(4, 2, seed=1))])


@functools.cache
def aliasing() -> Any:
    """Old operators of users, whose schemas alias; they live as long as their library."""
    lib = torch.library.Library("conformance_aliases", "DEF")
    lib.define("bump(Tensor(a!) x) -> Tensor(a!)")
    lib.impl("bump", lambda x: x.add_(1), "CompositeExplicitAutograd")
    lib.define("lower(Tensor(a) x) -> Tensor(a)")
    lib.impl("lower", lambda x: x[1:], "CompositeExplicitAutograd")
    return lib, torch.ops.conformance_aliases


def operators_that_write_and_give_views() -> Case:
    """``bump(Tensor(a!) x) -> Tensor(a!)`` writes and has no name that says so."""
    ops = aliasing()[1]

    def fn(x: Tensor) -> Any:
        y = ops.bump(x)
        return y, y[1:], ops.lower(x)

    return Case(fn, [(randn(3),)])


CASES = (
    read_then_inplace_log,
    slice_copy_then_mutate_source,
    copy_back_must_not_alias_output,
    unused_inplace_results_survive,
    swap_through_copies,
    overlapping_shift,
    write_between_two_reads,
    write_to_one_of_two_views,
    same_tensor_twice,
    out_arguments,
    integer_in_place_keeps_its_dtype,
    leaf_updated_without_gradients,
    index_and_mask_assignment,
    resize_and_fill_of_results,
    two_written_inputs_one_with_gradients,
    written_input_is_the_first_result,
    written_input_beside_another_layout,
    numpy_arrays_written_in_place,
    operators_that_write_and_give_views,
    writes_spelled_as_methods,
    writes_inside_of_transforms,
)
