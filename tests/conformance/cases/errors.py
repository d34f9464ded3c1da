"""What eager refuses, the compiled program refuses with the same type: dtypes, shapes, indices out of range."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, randn

ERRORS = (IndexError, RuntimeError)


def scatter_negative_index() -> Case:
    """pytorch/pytorch#131321, #185885: index -1 is an error in index_add and scatter_reduce."""

    def fn(base: Tensor, idx: Tensor, src: Tensor) -> Tensor:
        rows = idx[:, None].expand(3, 2)
        return torch.index_add(base, 0, idx, src).clamp_max(1.0) + torch.scatter_reduce(base, 0, rows, src, "sum")

    return Case(fn, [(torch.zeros(4, 2), torch.tensor([0, 1, -1]), torch.ones(3, 2))], raises=ERRORS)


def logcumsumexp_of_integers() -> Case:
    """pytorch/pytorch#197807: no integer kernel, for 0-dim inputs neither."""
    return Case(
        lambda x: torch.logcumsumexp(x, dim=0), [(torch.tensor(3, dtype=torch.uint8),)], raises=NotImplementedError
    )


def index_out_of_range() -> Case:
    """``x[i]`` with an index past the end, of an intermediate whose value is fused."""
    return Case(lambda x, i: (x * 2)[i] + 1, [(randn(4, 3), torch.tensor([0, 4]))], raises=IndexError)


def index_below_range() -> Case:
    """``x[i]`` with an index below ``-n``."""
    return Case(lambda x, i: x[:, i].exp(), [(randn(3, 4), torch.tensor([0, -5]))], raises=IndexError)


def embedding_out_of_range() -> Case:
    """A token that the table does not have."""
    return Case(
        lambda t, w: F.embedding(t, w).tanh(), [(torch.tensor([1, 5]), randn(5, 3, grad=True))], raises=IndexError
    )


def embedding_of_negative() -> Case:
    """A negative token is an error, not the last row."""
    return Case(lambda t, w: F.embedding(t, w) * 2, [(torch.tensor([1, -1]), randn(5, 3))], raises=IndexError)


def embedding_out_of_range_unused() -> Case:
    """The error comes though nobody reads the rows."""

    def fn(t: Tensor, w: Tensor) -> Tensor:
        F.embedding(t, w)
        return w * 2

    return Case(fn, [(torch.tensor([1, 7]), randn(5, 3))], raises=IndexError)


def gather_out_of_range() -> Case:
    """``gather`` past the end, and below zero."""
    return Case(lambda x, i: x.sin().gather(1, i), [(randn(2, 3), torch.tensor([[0, 3], [1, 1]]))], raises=ERRORS)


def gather_of_negative() -> Case:
    return Case(lambda x, i: x.gather(1, i) + 1, [(randn(2, 3), torch.tensor([[0, -1], [1, 1]]))], raises=ERRORS)


def scatter_out_of_range() -> Case:
    """``scatter`` past the end, in place."""

    def fn(x: Tensor, i: Tensor) -> Tensor:
        return x.scatter_(0, i, 1.0).sum()

    return Case(fn, [(torch.zeros(3, 2), torch.tensor([[3, 0]]))], raises=ERRORS)


def index_put_out_of_range() -> Case:
    """``index_put`` with accumulation past the end."""

    def fn(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        return x.index_put((i,), v, accumulate=True)

    return Case(fn, [(torch.zeros(3), torch.tensor([0, 3]), torch.ones(2))], raises=IndexError)


def class_out_of_range() -> Case:
    """A target that is no class."""
    return Case(lambda x, t: F.cross_entropy(x, t), [(randn(3, 4, grad=True), torch.tensor([0, 4, 1]))], raises=ERRORS)


def class_negative() -> Case:
    """A negative target that is not ``ignore_index``."""
    return Case(lambda x, t: F.nll_loss(x, t), [(randn(3, 4), torch.tensor([0, -2, 1]))], raises=ERRORS)


def one_hot_out_of_range() -> Case:
    return Case(lambda t: F.one_hot(t, 3).float() * 2, [(torch.tensor([0, 3]),)], raises=RuntimeError)


def integer_division_by_zero() -> Case:
    """``//`` of integers by zero raises; the process lives."""
    return Case(lambda x, y: x // y + 1, [(torch.arange(4), torch.tensor([1, 0, 2, 3]))], raises=RuntimeError)


def integer_remainder_by_zero() -> Case:
    return Case(lambda x, y: (x % y) * 2, [(torch.arange(4), torch.tensor([1, 0, 2, 3]))], raises=RuntimeError)


def negative_integer_power() -> Case:
    """Integers to negative integer powers."""
    return Case(lambda x: x**-1, [(torch.arange(1, 4),)], raises=RuntimeError)


def shapes_that_do_not_fit() -> Case:
    return Case(lambda x, y: (x * 2) @ y, [(randn(3, 4), randn(3, 4))], raises=RuntimeError)


def broadcast_that_does_not_fit() -> Case:
    return Case(lambda x, y: x.exp() + y, [(randn(3, 4), randn(3))], raises=RuntimeError)


def subtraction_of_bools() -> Case:
    return Case(lambda x: x - ~x, [(torch.tensor([True, False]),)], raises=RuntimeError)


def mean_of_integers() -> Case:
    return Case(lambda x: (x + 1).mean(), [(torch.arange(3),)], raises=RuntimeError)


def in_place_on_a_leaf() -> Case:
    """A leaf that needs gradients is written to."""

    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum()

    return Case(fn, [(randn(3, grad=True),)], raises=RuntimeError)


def in_place_result_too_wide() -> Case:
    """An integer tensor cannot hold a float sum."""

    def fn(x: Tensor) -> Tensor:
        x += 1.5
        return x

    return Case(fn, [(torch.arange(3),)], raises=RuntimeError)


def write_into_expanded() -> Case:
    """One place of memory written from several."""

    def fn(x: Tensor) -> Tensor:
        return x.expand(3, 4).add_(1)

    return Case(fn, [(torch.ones(1, 4),)], raises=RuntimeError)


def write_over_what_is_read() -> Case:
    """A block is written while a shifted part of it is read."""

    def fn(x: Tensor) -> Tensor:
        x[1:].add_(x[:-1])
        return x

    return Case(fn, [(torch.arange(5.0),)], raises=RuntimeError)


def assignment_over_what_is_read() -> Case:
    """The same by an assignment to a slice."""

    def fn(x: Tensor) -> Tensor:
        x[1:] = x[:-1]
        return x

    return Case(fn, [(torch.arange(5.0),)], raises=RuntimeError)


def view_of_what_is_not_dense() -> Case:
    return Case(lambda x: x.t().view(-1) * 2, [(randn(3, 4),)], raises=RuntimeError)


def division_by_zero_in_python() -> Case:
    """Errors of plain Python inside of the program."""
    return Case(lambda x, n: x * (1 // n), [(randn(3), 0)], raises=ZeroDivisionError)


def error_of_the_user() -> Case:
    """An exception that the program raises by itself."""

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        if y.dim() == 1:
            raise KeyError("a name of the user's own")
        return y

    return Case(fn, [(randn(3),)], raises=KeyError)


def multinomial_of_negative() -> Case:
    """Checks of values inside an operator."""
    return Case(lambda x: torch.multinomial(x * 2, 1), [(torch.tensor([0.5, -1.0]),)], raises=RuntimeError)


def binary_cross_entropy_out_of_range() -> Case:
    return Case(
        lambda x, t: F.binary_cross_entropy(x * 2, t), [(torch.tensor([0.2, 0.9]), torch.ones(2))], raises=RuntimeError
    )


def repeat_interleave_of_negative() -> Case:
    return Case(lambda x, n: x.repeat_interleave(n), [(randn(2), torch.tensor([1, -1]))], raises=RuntimeError)


def cholesky_of_indefinite() -> Case:
    """Linear algebra that fails on values."""
    return Case(
        lambda x: torch.linalg.cholesky(x * 2) + 1, [(torch.tensor([[0.0, 1.0], [1.0, 0.0]]),)], raises=RuntimeError
    )


def item_of_several() -> Case:
    return Case(lambda x: x * (x + 1).item(), [(randn(3),)], raises=RuntimeError)


CASES: tuple[Any, ...] = (
    scatter_negative_index,
    logcumsumexp_of_integers,
    index_out_of_range,
    index_below_range,
    embedding_out_of_range,
    embedding_of_negative,
    embedding_out_of_range_unused,
    gather_out_of_range,
    gather_of_negative,
    scatter_out_of_range,
    index_put_out_of_range,
    class_out_of_range,
    class_negative,
    one_hot_out_of_range,
    integer_division_by_zero,
    integer_remainder_by_zero,
    negative_integer_power,
    shapes_that_do_not_fit,
    broadcast_that_does_not_fit,
    subtraction_of_bools,
    mean_of_integers,
    in_place_on_a_leaf,
    in_place_result_too_wide,
    write_into_expanded,
    write_over_what_is_read,
    assignment_over_what_is_read,
    view_of_what_is_not_dense,
    division_by_zero_in_python,
    error_of_the_user,
    multinomial_of_negative,
    binary_cross_entropy_out_of_range,
    repeat_interleave_of_negative,
    cholesky_of_indefinite,
    item_of_several,
)
