"""The same seed gives eager's numbers, and leaves the generator where eager leaves it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.case import Case, rand, randn


def every_distribution() -> Case:
    """Each kind of random call, in the order of the program, in two calls after one another."""

    def fn(x: Tensor) -> Any:
        return (
            torch.rand(3), torch.randn(2, 2), torch.randint(10, (4,)), torch.randperm(5), torch.rand_like(x), torch.randn_like(x),
            torch.bernoulli(x.sigmoid()), torch.normal(0.0, 1.0, (3,)), torch.multinomial(x.softmax(-1), 2), torch.empty(3).uniform_(-1, 1),
            torch.empty(2).normal_(), torch.empty(2).exponential_(), torch.rand(2, dtype=torch.float64), torch.randint_like(x, 5),
        )  # fmt: skip

    return Case(fn, [(randn(3, 4),), (randn(3, 4),)])


def dropout_of_every_kind() -> Case:
    """dropout, dropout2d, alpha_dropout, rrelu, with gradients; p of 0 and 1; in evaluation no numbers are drawn."""

    def fn(x: Tensor) -> Any:
        return (
            F.dropout(x, 0.3), F.dropout2d(x, 0.5), F.alpha_dropout(x, 0.2), F.feature_alpha_dropout(x, 0.2), F.dropout(x, 0.0),
            F.dropout(x, 0.4, training=False), F.dropout(x + 1, 0.9), F.rrelu(x, training=True),
        )  # fmt: skip

    return Case(fn, [(randn(2, 4, 3, 3, grad=True),), (randn(2, 4, 3, 3, grad=True, seed=1),)], grad=True)


def dropout_of_everything() -> Case:
    """p = 1 gives zeros, and draws in eager nothing."""

    def fn(x: Tensor) -> Any:
        return F.dropout(x, 1.0), torch.rand(2), F.dropout(x * 2, 0.5)

    return Case(fn, [(randn(3, 4, grad=True),)], grad=True)


def dropout_bit_by_bit() -> Case:
    """Masks and scales in every dtype, bit by bit."""

    def fn(x: Tensor) -> Any:
        return F.dropout(x, 0.3), F.dropout(x.relu() * 2, 0.15)

    calls = [(randn(9, 7, dtype=d, grad=True),) for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64)]
    return Case(fn, calls, grad=True, tol=(0.0, 0.0))


def dropout_in_place_and_in_modules() -> Case:
    """nn.Dropout in place, in train mode, between layers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4, inplace=True), nn.SiLU(), nn.Linear(8, 6), nn.Dropout1d(0.5))
    return Case(net, [(randn(5, 6, grad=True),), (randn(5, 6, seed=1, grad=True),)], grad=True, tol=(1e-5, 1e-6))


def unused_random_call() -> Case:
    """A random call whose result nobody reads still draws."""

    def fn(x: Tensor) -> Any:
        torch.rand(7)
        y = torch.randn(4)
        _ = F.dropout(x, 0.5)
        return x + y, torch.rand(1)

    return Case(fn, [(randn(4),), (randn(4),)])


def seed_inside_the_program() -> Case:
    """``torch.manual_seed`` inside of the program."""

    def fn(x: Tensor) -> Any:
        a = torch.rand(3)
        torch.manual_seed(7)
        return a, torch.rand(3), x + torch.randn(3)

    return Case(fn, [(randn(3),), (randn(3),)])


def state_read_and_set_inside() -> Case:
    """The generator's state is read, moved on, and set back."""

    def fn(x: Tensor) -> Any:
        state = torch.get_rng_state()
        a = torch.rand(4)
        torch.set_rng_state(state)
        return a, torch.rand(4), F.dropout(x, 0.5)

    return Case(fn, [(randn(4),)])


def generator_of_the_user() -> Case:
    """A generator of its own draws its own numbers and leaves the global one alone."""
    generator = torch.Generator()

    def fn(x: Tensor) -> Any:
        generator.manual_seed(3)
        a = torch.rand(3, generator=generator)
        b = torch.randn(3, generator=generator)
        return a + x, b, torch.rand(2), torch.bernoulli(torch.full((3,), 0.5), generator=generator)

    return Case(fn, [(randn(3),), (randn(3),)])


def attention_dropout() -> Case:
    """Scaled dot-product attention with dropout, and its gradients."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), torch.rand(2)

    return Case(fn, [tuple(randn(1, 2, 5, 8, seed=i, grad=True) for i in range(3))], grad=True, tol=(1e-4, 1e-5))


def noise_used_twice() -> Case:
    """One draw is read by forward and backward, and by two kernels: it is one draw."""

    def fn(x: Tensor) -> Any:
        noise = torch.randn_like(x)
        y = (x * noise).exp() * noise
        return y.sum(0), (y * noise).tanh(), noise

    return Case(fn, [(rand(40, 5, grad=True),)], grad=True, tol=(1e-5, 1e-5))


def gumbel_and_sampling() -> Case:
    """gumbel_softmax, categorical sampling of logits, truncated normals."""

    def fn(x: Tensor) -> Any:
        return F.gumbel_softmax(x, tau=0.7), torch.distributions.Normal(x, 1.0).rsample(), torch.rand(2).log().neg()

    return Case(fn, [(randn(3, 5, grad=True),)], grad=True, tol=(1e-5, 1e-5))


def layouts() -> tuple[Tensor, ...]:
    """Contiguous, channels last, transposed, with gaps, a part of a larger one."""
    x = rand(2, 6, 4, 5)
    gaps, larger = rand(2, 6, 4, 10), rand(3, 7, 5, 6)
    return x, x.to(memory_format=torch.channels_last), rand(2, 6, 5, 4).mT, gaps[..., ::2], larger[1:, 1:, 1:, 1:]


def draws_in_place_by_layout() -> Case:
    """Filled in place, a tensor gets its numbers in the order of its memory; so do views and intermediates."""

    def fn(*xs: Tensor) -> Any:
        out = []
        for x in xs:
            y = x * 1
            out += [y.bernoulli_(0.5), (x * 2).mT.uniform_(), (x * 2)[:, 1:].exponential_(), (x * 2).mT.geometric_(0.3)]
            out += [(x * 3).mT.random_(100), (x * 2).bernoulli_(x), x.bernoulli_(0.4)]
        return out

    return Case(fn, [layouts(), layouts()])


def normal_numbers_by_layout() -> Case:
    """Eager fills contiguous memory in blocks, any other element by element."""

    def fn(*xs: Tensor) -> Any:
        return [(x * 2).normal_() for x in xs], [(x * 2).mT.log_normal_() for x in xs], [x.normal_(1, 2) for x in xs]

    return Case(fn, [layouts()])


def dropout_in_place_by_layout() -> Case:
    def fn(*xs: Tensor) -> Any:
        out = [F.dropout(x * 1, 0.3, inplace=True) for x in xs] + [F.dropout((x * 1).mT, 0.3, True, True) for x in xs]
        return out + [F.alpha_dropout(x * 1, 0.3, True, True) for x in xs] + [torch.dropout_(x, 0.5, True) for x in xs]

    return Case(fn, [layouts(), layouts()])


def dropout_in_place_with_gradients() -> Case:
    """The same masks forward and backward, through views."""

    def fn(x: Tensor, y: Tensor) -> Any:
        h = (x * 2).mT
        F.dropout(h, 0.4, inplace=True)
        return h * y.mT, F.dropout((y * 2).to(memory_format=torch.channels_last), 0.4, inplace=True).sin()

    return Case(fn, [(randn(2, 3, 4, 5, grad=True), randn(2, 3, 4, 5, seed=1, grad=True))], grad=True)


def dropout_of_other_kinds_by_layout() -> Case:
    def fn(*xs: Tensor) -> Any:
        return [
            f(x)
            for x in xs
            for f in (
                lambda x: F.alpha_dropout(x, 0.3, True),
                lambda x: F.rrelu(x - 0.5, training=True),
                lambda x: F.feature_alpha_dropout(x, 0.3, True),
                lambda x: F.dropout2d(x, 0.3, True, True),
            )
        ]

    return Case(fn, [layouts()])


def unread_draws_of_operators() -> Case:
    """Draws called as operators, by overload, or of several results, of which nothing is read, or the dtype alone."""
    aten = torch.ops.aten

    def fn(x: Tensor) -> Any:
        pattern = aten.native_dropout(x, 0.4, True)[0]
        aten.native_dropout.default(x, 0.4, True)
        aten.bernoulli.p(x, 0.3)
        aten.rand_like.default(x)
        aten.rrelu_with_noise(x, torch.empty_like(x), 0.1, 0.3, True)
        lone = x[:, None]
        F.multi_head_attention_forward(
            lone, lone, lone, 4, 2, x.new_ones(12, 4), None, None, None, False, 0.5, x.new_ones(4, 4), None
        )
        return x.sin().type_as(pattern), torch.rand(3)

    return Case(fn, [(randn(6, 4, seed=i, grad=bool(i)),) for i in range(2)], grad=True)


CASES = (
    draws_in_place_by_layout,
    normal_numbers_by_layout,
    dropout_in_place_by_layout,
    dropout_in_place_with_gradients,
    dropout_of_other_kinds_by_layout,
    every_distribution,
    dropout_of_every_kind,
    dropout_of_everything,
    dropout_bit_by_bit,
    dropout_in_place_and_in_modules,
    unused_random_call,
    seed_inside_the_program,
    state_read_and_set_inside,
    generator_of_the_user,
    attention_dropout,
    noise_used_twice,
    gumbel_and_sampling,
    unread_draws_of_operators,
)
