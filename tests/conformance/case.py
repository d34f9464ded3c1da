"""A program whose compiled run must not differ from eager, and the comparison of the two runs.

Compared after every call: the structure of the result, values, dtypes, shapes, strides (of dense tensors), who shares
storage with whom, ``requires_grad``, gradients and their absence, what the inputs hold, the generator of random
numbers; at the end, parameters and buffers.  Where eager raises, the compiled program must raise the same type.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dsc.debug.fuzz.observe import random_state

Tolerance = tuple[float, float]
"""Relative, absolute."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Case:
    """One program and how to run it.  A function that makes a ``Case`` makes equal ones every time."""

    fn: Callable[..., Any]
    calls: Sequence[tuple[Any, ...]]
    """Arguments of each call, in turn."""

    grad: bool = False
    """Back-propagate fixed cotangents; compare the gradients of inputs and parameters."""

    loss: Sequence[int] | None = None
    """Which of the results that have gradients the loss is made of.  None: all."""

    tol: Tolerance | None = None
    """None: those that torch.testing gives the dtype."""

    tols: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)
    """By dtype, before ``tol``."""

    dynamic: bool | None = None
    raises: type[Exception] | tuple[type[Exception], ...] | None = None
    refuses: str | None = None
    """The compiled program may raise instead, with this text: a clear refusal."""

    random: bool = False
    """Values are random in a way that eager does not fix: shapes, dtypes and strides alone are compared."""

    check: Callable[[list[Any], list[Tensor], list[Tensor | None]], None] | None = None
    """Called with results, inputs and gradients of every call, of both runs; asserts what must hold."""

    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """A setting under which both runs go."""


@dataclass
class Call:
    """What one call did."""

    error: Exception | None = None
    structure: str = ""
    results: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    """Copies of the results, made before anything else could write to them."""

    sharing: tuple[list[list[bool]], ...] = ()
    gradients: list[Tensor | None] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    generator: Tensor | None = None


class Unfit(Exception):
    """The program does not do in eager what it says: the case is wrong, not the compiler."""


def run(make: Callable[[], Case], backend: str, dynamic: bool | None = None) -> None:
    """Run the case in eager and compiled, and compare.

    Raises:
        AssertionError: they differ; the message says where and how.
        Unfit: eager raised, or did not raise as the case says.
    """
    case = make()
    with case.around():
        expected, state = calls(case, case.fn)
    for call in expected:
        if case.raises is None and call.error is not None:
            raise Unfit("eager raised") from call.error
        if case.raises is not None and not isinstance(call.error, case.raises):
            raise Unfit(f"eager was to raise {case.raises}") from call.error
    torch._dynamo.reset()
    case = make()
    options = {"dynamic": d} if (d := dynamic if case.dynamic is None else case.dynamic) is not None else {}
    with case.around():
        got, other = calls(case, torch.compile(case.fn, backend=backend, **options))
    for i, (a, b) in enumerate(zip(expected, got)):
        compare_call(case, a, b, f"call {i}")
    for name, t in state.items():
        same(case, t, other[name], f"state {name}")


def calls(case: Case, fn: Callable[..., Any]) -> tuple[list[Call], dict[str, Tensor]]:
    """All calls, and the parameters and buffers after them."""
    done = [call(case, fn, i, arguments) for i, arguments in enumerate(case.calls)]
    if not isinstance(fn, nn.Module):
        return done, {}
    return done, {n.replace("_orig_mod.", ""): v.detach().clone() for n, v in fn.state_dict().items()}


def call(case: Case, fn: Callable[..., Any], number: int, arguments: tuple[Any, ...]) -> Call:
    torch.manual_seed(1000 + number)
    out = Call()
    inputs = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
    try:
        out.results, structure = flat(fn(*arguments))
        out.structure = str(structure)
        results = [t for t in out.results if isinstance(t, Tensor)]
        out.sharing = (
            [[shares(a, b) for b in inputs] for a in results],
            [[shares(a, b) for b in results] for a in results],
            [[a is b for b in inputs] for a in results],
        )
        out.values = [t.detach().clone() if isinstance(t, Tensor) else t for t in out.results]
        if case.grad:
            out.gradients = gradients(fn, results, inputs, number, case.loss)
        out.inputs = [t.detach().clone() for t in inputs]
        out.generator = random_state()
        if case.check is not None:
            case.check(out.results, inputs, out.gradients)
    except Exception as e:
        out.error = e
    return out


def gradients(
    fn: object, results: list[Tensor], inputs: list[Tensor], number: int, loss: Sequence[int] | None
) -> list[Tensor | None]:
    """Of leaf inputs and parameters, for fixed cotangents of the results."""
    generator = torch.Generator().manual_seed(7 + number)
    outs = [t for t in results if t.requires_grad]
    outs = outs if loss is None else [outs[i] for i in loss]
    cotangents = []
    for t in outs:
        c = torch.randn(t.shape, generator=generator, dtype=torch.float64, device="cpu")
        cotangents.append((torch.complex(c, c.flip(0) if c.dim() else c) if t.is_complex() else c).to(t))
    wanted = [t for t in inputs if t.requires_grad and t.is_leaf]
    if isinstance(fn, nn.Module):
        wanted += [p for p in fn.parameters() if p.requires_grad]
    for t in wanted:
        t.grad = None
    if outs:
        torch.autograd.backward(outs, cotangents)
    return [None if t.grad is None else t.grad.detach().clone() for t in wanted]


def compare_call(case: Case, want: Call, got: Call, where: str) -> None:
    if case.raises is not None:
        assert got.error is not None, f"{where}: eager raises {brief(want.error)}, compiled does not"
        kinds = case.raises if isinstance(case.raises, tuple) else (case.raises,)
        right = isinstance(got.error, kinds) or type(got.error).__name__ in [k.__name__ for k in kinds]
        assert right, f"{where}: eager raises {brief(want.error)}, compiled {brief(got.error)}"
        return
    if got.error is not None:
        if case.refuses is not None and case.refuses in str(got.error):
            return
        raise AssertionError(f"{where}: {brief(got.error)}") from got.error
    assert got.structure == want.structure, f"{where}: structure {want.structure}, compiled {got.structure}"
    for i, (a, b) in enumerate(zip(want.results, got.results)):
        compare_result(case, a, b, (want.values[i], got.values[i]), f"{where}, result {i}")
    for kind, a, b in zip(("inputs", "each other", "inputs, as objects"), want.sharing, got.sharing):
        assert a == b, f"{where}: results share with {kind} {a}, compiled {b}"
    for i, (x, y) in enumerate(zip(want.inputs, got.inputs)):
        same(case, x, y, f"{where}, input {i} afterwards")
    for i, (g, h) in enumerate(zip(want.gradients, got.gradients)):
        assert (g is None) == (h is None), f"{where}, gradient {i}: eager {missing(g)}, compiled {missing(h)}"
        if g is not None and h is not None:
            same(case, g, h, f"{where}, gradient {i}")
    assert want.generator is not None and got.generator is not None
    assert torch.equal(want.generator, got.generator), f"{where}: the generator is in another state than eager's"


def compare_result(case: Case, want: Any, got: Any, values: tuple[Any, Any], where: str) -> None:
    if not isinstance(want, Tensor):
        assert type(want) is type(got) and (want == got or want != want), f"{where}: {want!r}, compiled {got!r}"
        return
    same(case, *values, where)
    if dense(want):
        pairs = [(p, q) for p, q, n in zip(want.stride(), got.stride(), want.shape) if n > 1]
        assert all(p == q for p, q in pairs), f"{where}: stride {want.stride()}, compiled {got.stride()}"
    for flag in ("requires_grad", "is_leaf"):
        a, b = getattr(want, flag), getattr(got, flag)
        assert a == b, f"{where}: {flag} {a}, compiled {b}"
    assert want.is_inference() == got.is_inference(), f"{where}: one is an inference tensor, the other is not"


def same(case: Case, want: Tensor, got: Tensor, where: str) -> None:
    """Dtype, shape and, unless they are random, values."""
    assert want.dtype == got.dtype, f"{where}: {want.dtype}, compiled {got.dtype}"
    assert want.shape == got.shape, f"{where}: {tuple(want.shape)}, compiled {tuple(got.shape)}"
    if case.random:
        return
    if want.dtype in FLOAT8:
        want, got = want.float(), got.float()
    tolerance = case.tols.get(want.dtype, case.tol)
    options = {} if tolerance is None else {"rtol": tolerance[0], "atol": tolerance[1]}
    try:
        torch.testing.assert_close(got, want, equal_nan=True, check_stride=False, **options)  # type: ignore[arg-type]
    except AssertionError as e:
        some = f"eager {want.flatten()[:6].tolist()}, compiled {got.flatten()[:6].tolist()}"
        raise AssertionError(f"{where}: {' '.join(str(e).split())[:200]} {some}") from None


def flat(out: object) -> tuple[list[Any], object]:
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        out = {f.name: getattr(out, f.name) for f in dataclasses.fields(out)}
    return pytree.tree_flatten(out)


def shares(a: Tensor, b: Tensor) -> bool:
    """The storage of both is one, and has bytes."""
    x, y = a.untyped_storage(), b.untyped_storage()
    return x.nbytes() > 0 and y.nbytes() > 0 and x.data_ptr() == y.data_ptr()


def dense(t: Tensor) -> bool:
    """Its elements fill one block without gaps or overlaps, in any order of dimensions."""
    n = 1
    for stride, size in sorted((s, d) for s, d in zip(t.stride(), t.shape) if d > 1):
        if stride != n:
            return False
        n *= size
    return t.numel() > 0


def randn(*shape: int, seed: int = 0, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same for the same seed."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    return x.to(torch.get_default_device(), dtype).requires_grad_(grad)


def rand(*shape: int, seed: int = 0, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of [0, 1), the same for the same seed."""
    x = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    return x.to(torch.get_default_device(), dtype).requires_grad_(grad)


def brief(e: BaseException | None) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"


def missing(t: Tensor | None) -> str:
    return "None" if t is None else "one"
