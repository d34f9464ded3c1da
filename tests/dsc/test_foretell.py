"""Strides of pointwise results, as eager gives them: the rule against ATen, and through whole programs."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from dsc import ops
from dsc.ops import layout

LAYOUTS = ("plain", "reversed", "shuffled", "sliced", "stepped", "expanded")


def laid_out(shape: list[int], kind: str, draw: random.Random) -> Tensor:
    n = len(shape)
    if n == 0 or kind == "plain":
        return torch.rand(shape)
    if kind in ("reversed", "shuffled"):
        order = list(reversed(range(n)))
        if kind == "shuffled":
            draw.shuffle(order)
        return torch.rand([shape[d] for d in order]).permute([order.index(d) for d in range(n)])
    if kind == "sliced":
        return torch.rand([s + 1 for s in shape])[(slice(1, None),) * n]
    if kind == "stepped":
        return torch.rand([*shape[:-1], 2 * shape[-1]])[..., ::2]
    one = draw.randrange(n)
    return torch.rand([1 if d == one else s for d, s in enumerate(shape)]).expand(shape)


def whole_numbers(name: str) -> bool:
    return any(word in name for word in ("bitwise", "shift", "gcd", "lcm", "__"))


def arguments(name: str, schema: torch.FunctionSchema, draw: random.Random) -> list[object]:
    """Some that the operator takes: tensors that broadcast, unless it is a backward."""
    whole = [draw.choice([1, 2, 3, 5]) for _ in range(draw.choice([2, 3, 4]))]
    found: list[object] = []
    for a in schema.arguments:
        if a.kwarg_only:
            break
        kind = str(a.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            shape = whole
            if "backward" not in name and (found or draw.random() < 0.3):
                shape = [1 if draw.random() < 0.3 else n for n in whole][draw.choice([0, 0, 0, 1]) :]
            t = laid_out(shape, draw.choice(LAYOUTS), draw)
            found.append(t > 0.5 if a.name in ("condition", "mask") else (t * 9).int() if whole_numbers(name) else t)
        elif kind in ("number", "Scalar", "float"):
            found.append(1 if whole_numbers(name) else 0.5)
        elif a.has_default_value():
            found.append(a.default_value)
        else:
            found.append({"int": 1, "bool": False, "str": "none"}.get(kind))
    return found


def tagged() -> set[str]:
    """Operators that PyTorch tags as pointwise and that give a new tensor."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():  # all there are: ``dir`` lists those that somebody has used
        if not schema.name.startswith("aten::") or "Tensor[]" in str(schema) or "loss" in schema.name:
            continue
        name, overload = schema.name.removeprefix("aten::"), schema.overload_name or "default"
        call = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if layout.is_pointwise(call):
            found.add(f"{name}.{overload}")
    return found


POINTWISE = sorted({name for name, known in ops.table().items() if known.kind == "pointwise"} | tagged())


@pytest.mark.parametrize("name", POINTWISE)
def test_the_rule_gives_the_strides_of_eager(name: str) -> None:
    base, _, overload = name.partition(".")
    call = getattr(getattr(torch.ops.aten, base, None), overload, None)
    if call is None:
        pytest.skip("this version of torch has no such operator")
    draw = random.Random(name)
    checked = 0
    for _ in range(8):
        given = arguments(name, call._schema, draw)
        try:
            real = call(*given)
        except (RuntimeError, TypeError, IndexError):
            continue  # arguments that it does not take
        if not isinstance(real, Tensor):
            continue
        graph = Graph()
        nodes: list[object] = []
        for g in given:
            nodes.append(graph.placeholder("x") if isinstance(g, Tensor) else g)
            if isinstance(g, Tensor):
                nodes[-1].meta["val"] = g  # type: ignore[attr-defined]
        node = graph.call_function(call, tuple(nodes))  # type: ignore[arg-type]
        found = layout.foretold(node, real)
        if found is not None:
            assert found == real.stride(), [(t.shape, t.stride()) for t in given if isinstance(t, Tensor)]
            checked += 1
    if not checked:
        pytest.skip("not laid out by this rule, or takes other arguments")


def transposed(*shape: int) -> Tensor:
    return torch.randn(*reversed(shape)).permute(*reversed(range(len(shape))))


PROGRAMS: dict[str, tuple[Callable[..., object], Callable[[], tuple[Tensor, ...]]]] = {
    "after an operand that repeats": (
        lambda x, y: torch.copysign(x, y).isinf(),
        lambda: (transposed(1, 17, 1, 3), torch.randn(3, 3)),
    ),
    "after strides of size-1 dimensions": (
        lambda x, y: x / (y.abs() + 1),
        lambda: (torch.randn(17, 1), transposed(17, 1, 1, 1)),
    ),
    "through a view": (
        lambda x, y: ((x.logical_and(y) * 2).transpose(0, 1) + 1).exp(),
        lambda: (transposed(3, 5, 2), torch.randn(5, 2)),
    ),
    "through a reshape that copies": (
        lambda x, y: torch.copysign(x, y).reshape(-1)[:100].view(10, 10).t() + 1,
        lambda: (transposed(1, 17, 1, 3), torch.randn(3, 3)),
    ),
    "beside a reshape that copies": (
        lambda x, y: (torch.copysign(x, y).reshape(-1).sum() + torch.copysign(x, y)).isinf(),
        lambda: (transposed(1, 17, 1, 3), torch.randn(3, 3)),
    ),
    "through a reduction": (
        lambda x, y: (x.logical_xor(y).float() * 2).sum(0, keepdim=True) * x,
        lambda: (transposed(3, 5, 2), torch.randn(5, 2)),
    ),
    "filled where it is masked": (
        lambda x, y: x.masked_fill(y > 0, 0.5).sin() + 1,
        lambda: (transposed(1, 5, 3), torch.randn(5, 3)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_the_strides_of_eager(name: str) -> None:
    f, make = PROGRAMS[name]
    given = make()
    expected, found = f(*given), torch.compile(f, backend="dsc")(*given)
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


def test_gradients_too() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (torch.copysign(x, y) * 2).exp()

    y = torch.randn(3, 3)
    results = []
    for run in (f, torch.compile(f, backend="dsc")):
        torch.manual_seed(0)
        x = transposed(1, 17, 1, 3).requires_grad_()
        out = run(x, y)
        (grad,) = torch.autograd.grad(out.sum(), x)
        results.append((out, grad))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def steps(t: Tensor) -> list[int]:
    """Strides of dimensions longer than 1."""
    return [s for s, n in zip(t.stride(), t.shape) if n > 1]


LAID_OUT = {
    "matrix, transposed": lambda: torch.randn(3, 5).t(),
    "rows last": lambda: torch.randn(4, 3, 5).permute(1, 0, 2),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "images, turned": lambda: torch.randn(4, 2, 5, 3).permute(1, 3, 0, 2),
    "contiguous": lambda: torch.randn(2, 3, 4, 5),
    "one channel": lambda: torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", list(LAID_OUT))
@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_and_what_follows_are_laid_out_as_in_eager(layout: str, training: bool) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]), training=training)
        return y, y != 1, y.exp() + 1, (y * 2).flatten(1)

    x = LAID_OUT[layout]().requires_grad_()
    torch.compiler.reset()
    want, got = fn(x), torch.compile(fn, backend="dsc", options={"cache": False})(x)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a)
        assert steps(b) == steps(a)
    (g,) = torch.autograd.grad(want[2].sum(), x, retain_graph=True)
    (h,) = torch.autograd.grad(got[2].sum(), x, retain_graph=True)
    torch.testing.assert_close(h, g)
    assert steps(h) == steps(g)


def test_elements_by_tensors_are_laid_out_as_their_indices_and_what_is_left() -> None:
    draw, tried = random.Random(0), 0
    while tried < 400:
        rank = draw.choice((1, 2, 3, 4))
        x = laid_out([draw.choice((1, 2, 3, 4)) for _ in range(rank)], draw.choice(LAYOUTS), draw)
        sizes = [draw.choice((1, 2, 3)) for _ in range(draw.choice((0, 1, 2, 3)))]
        index: list[Tensor | None] = [None] * rank
        for d in draw.sample(range(rank), draw.choice((1, min(2, rank)))):
            mine = laid_out([n if draw.random() < 0.8 else 1 for n in sizes], draw.choice(LAYOUTS), draw)
            index[d] = (mine * 100).long() % x.shape[d]
        graph = Graph()
        source, *nodes = (graph.placeholder("t") if t is not None else None for t in (x, *index))
        for node, t in zip((source, *nodes), (x, *index)):
            if node is not None:
                node.meta["val"] = t
        y = torch.ops.aten.index.Tensor(x, index)
        assert layout.indexed(x, nodes, y.shape) == y.stride(), (x.shape, x.stride(), index)
        tried += 1
