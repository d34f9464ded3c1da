"""Gradients go where they go in eager: through custom functions, hooks, detached and unused tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.case import Case, randn


class Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        y = x * w
        y += x
        y.clamp_(min=-2)
        ctx.save_for_backward(x, w, y)
        return y, y.argmax(-1)

    @staticmethod
    def backward(ctx: Any, gy: Tensor, _: object) -> Any:
        x, w, y = ctx.saved_tensors
        gy = gy * (y > -2)
        return gy * (w + 1), (gy * x).sum(0)


def inplace_inside_function() -> Case:
    """pytorch/pytorch#180642: the forward of a custom function writes to an intermediate and returns it."""

    def fn(x: Tensor, w: Tensor) -> Any:
        y, i = Accumulate.apply(x, w)
        return y * 2, i

    return Case(fn, [(randn(5, 4, grad=True), randn(4, seed=1, grad=True))], grad=True)


def detach_in_place() -> Case:
    """pytorch/pytorch#176854: ``detach_`` cuts the gradient and flips the flag of the tensor itself."""

    def fn(x: Tensor) -> Any:
        y = x * 2
        before = y.requires_grad
        y.detach_()
        z = y + x
        return z, y, before, y.requires_grad

    return Case(fn, [(torch.arange(4.0).requires_grad_(),)], grad=True)


def straight_through() -> Case:
    """Estimators that detach a part: the value of one path, the gradient of the other."""

    def fn(x: Tensor) -> Any:
        hard = (x > 0).float()
        return hard + x - x.detach(), x.round().detach() * 2 + x.sigmoid(), (x - x.mean().detach()).square()

    return Case(fn, [(randn(3, 4, grad=True),)], grad=True)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        return (None if g is None else g * -ctx.scale), None


def gradient_reversal() -> Case:
    """A custom function that is the identity forward, with a number and without materialised gradients."""
    return Case(
        lambda x, s: Reversed.apply(x * 2, s).sin(), [(randn(4, grad=True), 0.5), (randn(4, grad=True), 2.0)], grad=True
    )


def unused_inputs_and_outputs() -> Case:
    """Gradients of unused inputs are None; outputs without gradients do not need any."""

    def fn(x: Tensor, y: Tensor, z: Tensor) -> Any:
        return x * 2, (x > 0), y.detach() + 1, x.argmax(), z.shape[0]

    return Case(fn, [(randn(3, grad=True), randn(3, seed=1, grad=True), randn(2, grad=True))], grad=True)


def one_output_needs_no_gradient() -> Case:
    """Only one of two losses is back-propagated by the caller: the other's part is zero, not garbage."""

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            h = self.a(x).relu()
            return h.sum(), self.b(h).square().sum().detach()

    return Case(Picks(), [(randn(3, 4, grad=True),)], grad=True, tol=(1e-5, 1e-6))


class Heads(nn.Module):
    """A trunk and two heads, each a result; and the trunk's own, as a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        h = self.trunk(x).tanh()
        return self.a(h), {"b": self.b(h).view(-1), "h": h.t()[1:]}


def head_that_the_loss_does_not_use() -> Case:
    """Parameters of a head without a loss have no gradient, not zeros: an optimizer leaves them alone."""
    return Case(Heads(), [(randn(5, 4, grad=True),)] * 2, grad=True, loss=(0,), tol=(1e-5, 1e-6))


def heads_through_a_view() -> Case:
    return Case(Heads(), [(randn(5, 4),)], grad=True, loss=(2,), tol=(1e-5, 1e-6))


def unused_result_beside_a_constant_gradient() -> Case:
    """The gradient of ``round`` is zeros, which eager gives; that of the result that nobody uses is none."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return x.sin(), x.round() * 1, y.exp(), y.floor()

    arguments = (randn(3, grad=True), randn(3, seed=1, grad=True))
    return Case(fn, [arguments], grad=True, loss=(1,))


def constant_gradient_of_an_unused_result() -> Case:
    """The gradient of the sign is zeros where the result is used, and none where it is not."""

    def fn(x: Tensor, y: Tensor, z: Tensor) -> Any:
        return x.sin(), torch.copysign(x, y), torch.copysign(z, z), x.cos()

    return Case(fn, [tuple(randn(3, seed=i, grad=True) for i in range(3))], grad=True, loss=(0, 3))


def constant_gradient_of_a_used_result() -> Case:
    return Case(
        lambda x, y: (x.sin(), torch.copysign(x, y)),
        [(randn(3, grad=True), randn(3, seed=1, grad=True))],
        grad=True,
        loss=(1,),
    )


def infinite_constants_of_an_unused_result() -> Case:
    """The variance of one number, whose derivative is made of constants."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return F.l1_loss(x[..., :-1], x), x.var(), y.softmax(0), (y > 0) * y

    return Case(fn, [(randn(1, 1, grad=True), randn(3, seed=1, grad=True))], grad=True, loss=(0, 2, 3))


def unused_result_that_is_written_in_place() -> Case:
    """An input is written behind autograd's back, and nothing that has a gradient reads it."""

    def fn(x: Tensor, y: Tensor, z: Tensor) -> Any:
        x.detach().mT.mul_(0.5)
        z.data[0].zero_()
        return y.sin()

    return Case(fn, [(randn(3, 4, grad=True), randn(3, grad=True), randn(2, 2, grad=True))], grad=True)


def halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


class Hooked(nn.Module):
    """Tensor hooks inside the program, forward hooks of modules, pre-hooks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)
        self.a.register_forward_hook(lambda m, i, o: o * 2)
        self.b.register_forward_pre_hook(lambda m, i: (i[0] + 1,))
        self.a.weight.register_hook(lambda g: g * 3)
        self.b.bias.register_post_accumulate_grad_hook(halve)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())  # type: ignore[no-any-return]


def unused_result_whose_derivative_adds_what_the_forward_knew() -> Case:
    """The derivative of ``logcumsumexp`` adds its operand to something: that sum is none of gradients."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return y.amax(), x.logcumsumexp(0), F.kl_div(x, y, reduction="none", log_target=True)

    return Case(fn, [(randn(5, grad=True), randn(5, seed=1, grad=True))], grad=True, loss=(0,))


def results_that_overlap_in_a_part() -> Case:
    """``unfold`` of one of several parts, of what the program computes and of what it is given."""

    def fn(x: Tensor) -> Any:
        y = x * 3
        turned = x.mul(2).transpose_(0, -1).unfold(0, 2, 1)
        return (
            y.split(2, 2)[-1].unfold(0, 2, 1),
            x.unbind(1)[0].unfold(1, 2, 1),
            y.chunk(2, 1)[0].mT.unfold(0, 2, 1),
            turned,
        )

    return Case(fn, [(randn(3, 3, 3, grad=True),)], grad=True)


def hooks() -> Case:
    return Case(Hooked(), [(randn(3, 4, grad=True),), (randn(3, 4, seed=1),)], grad=True, tol=(1e-5, 1e-6))


def hooks_on_intermediates() -> Case:
    """A hook registered inside the program scales the gradient of an intermediate."""

    def fn(x: Tensor) -> Any:
        y = x.exp()
        y.register_hook(lambda g: g * 2 + 1)
        return (y * x).sum(0), y

    return Case(fn, [(randn(4, 3, grad=True),)], grad=True)


def retained_gradients_of_inputs() -> Case:
    """Inputs that are not leaves, and leaves with a gradient hook."""

    def fn(x: Tensor) -> Tensor:
        return (x * x).sin().sum(0)

    def arguments() -> tuple[Tensor]:
        leaf = randn(3, 4, grad=True)
        leaf.register_hook(lambda g: g / 2)
        return (leaf,)

    return Case(fn, [arguments()], grad=True)


def gradients_inside_the_program() -> Case:
    """The program itself takes gradients: of an inner function by ``torch.func``, and Jacobians."""

    def fn(x: Tensor, w: Tensor) -> Any:
        inner = lambda v: ((v @ w).tanh() ** 2).sum()  # noqa: E731
        return (
            torch.func.grad(inner)(x),
            torch.func.vmap(lambda r: (r * 2).softmax(0))(x),
            torch.func.jvp(torch.sin, (x,), (x,))[1],
        )

    return Case(fn, [(randn(3, 4), randn(4, 2, seed=1))], tol=(1e-5, 1e-6))


def gradients_of_shared_subexpressions() -> Case:
    """One tensor used many times: sums of gradients in eager's order of magnitude, not twice, not once."""

    def fn(x: Tensor) -> Any:
        y = x.sigmoid()
        for _ in range(5):
            y = y * x + y.mean() - y.amax(0)
        return y, y[0] + y[0], torch.stack([y, y, x]).sum(0)

    return Case(fn, [(randn(4, 3, grad=True),)], grad=True, tol=(1e-4, 1e-5))


def loss_with_saved_and_recomputed_parts() -> Case:
    """Norms, softmax and activations whose backward may be recomputed: the same gradients."""

    def fn(x: Tensor, w: Tensor) -> Any:
        h = F.layer_norm(x, (8,))
        g, u = (h @ w).chunk(2, -1)
        y = F.silu(g) * u
        return (
            (y.softmax(-1) * y).sum(-1),
            F.rms_norm(y, (8,)),
            F.gelu(h, approximate="tanh"),
            F.softplus(h),
            F.mish(h),
            F.elu(h),
        )

    return Case(fn, [(randn(5, 8, grad=True), randn(8, 16, seed=1, grad=True))], grad=True, tol=(1e-4, 1e-5))


def infinite_result_that_the_loss_does_not_use() -> Case:
    """Eager does not go back through it: zero times infinity reaches no gradient."""

    def fn(x: Tensor, w: Tensor) -> Any:
        h = x * w.mT
        q, k = (h @ w).chunk(2)
        return h.sin(), (h - h).log(), q.exp(), (k - k).sqrt(), torch.stack([h[0] / 0, h[1]])

    return Case(fn, [(randn(4, 3, grad=True), randn(3, 1, seed=1, grad=True))] * 2, grad=True, loss=(0, 2))


def heads_used_in_turn() -> Case:
    """The same compiled backward under other losses."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.heads = Heads()

        def forward(self, x: Tensor) -> Any:
            a, rest = self.heads(x)
            return a, (rest["b"] - rest["b"]).log(), rest["h"]

    return Case(Turns(), [(randn(5, 4),)] * 2, grad=True, loss=(0, 2), tol=(1e-5, 1e-6))


def results_that_overlap_themselves() -> Case:
    """Windows over what the program computes: each element has the gradients of all windows that it is in."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return (
            (x * 2).unfold(1, 2, 1),
            (y.exp())[1:].unfold(0, 2, 1).mT,
            x.sin().as_strided((4, 3), (1, 1)),
            x.sum().expand(3, 4).unfold(1, 2, 1),
            x.cos().unsqueeze(0).expand(2, 3, 5),
        )

    return Case(fn, [(randn(3, 5, grad=True), randn(5, 4, seed=1, grad=True))], grad=True)


def windows_of_changing_lengths() -> Case:
    def fn(x: Tensor) -> Any:
        return (x * 2).unfold(0, 3, 1), (x * 2).unfold(0, 3, 4)

    return Case(fn, [(randn(n, 2, grad=True),) for n in (8, 11, 5)], grad=True)


CASES = (
    infinite_result_that_the_loss_does_not_use,
    heads_used_in_turn,
    results_that_overlap_themselves,
    windows_of_changing_lengths,
    inplace_inside_function,
    detach_in_place,
    straight_through,
    gradient_reversal,
    unused_inputs_and_outputs,
    one_output_needs_no_gradient,
    head_that_the_loss_does_not_use,
    heads_through_a_view,
    unused_result_beside_a_constant_gradient,
    constant_gradient_of_an_unused_result,
    constant_gradient_of_a_used_result,
    infinite_constants_of_an_unused_result,
    unused_result_that_is_written_in_place,
    hooks,
    hooks_on_intermediates,
    retained_gradients_of_inputs,
    gradients_inside_the_program,
    gradients_of_shared_subexpressions,
    loss_with_saved_and_recomputed_parts,
    unused_result_whose_derivative_adds_what_the_forward_knew,
    results_that_overlap_in_a_part,
)
