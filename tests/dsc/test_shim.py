import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dsc import torch_shim
from dsc.torch_shim import FakeTensorMode, optimization_hint, sym_expr


@pytest.mark.parametrize("name", list(torch_shim._HOMES))
def test_compiler_names_are_found(name: str) -> None:
    found = getattr(torch_shim, name)
    assert callable(found) or isinstance(found, dict)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torch_shim.nothing  # noqa: B018


def test_moved_name_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_shim._HOMES, "aot_autograd", ("torch.nowhere", "torch.nn"))
    with pytest.raises(ImportError, match=r"has no 'aot_autograd'; install a torch from 2\.11 to 2\.15"):
        torch_shim.aot_autograd  # noqa: B018


def sizes() -> tuple[torch.SymInt, torch.SymInt]:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows, columns = mode.from_tensor(torch.empty(6, 10)).shape
    return rows, columns


def test_sym_expr() -> None:
    rows, columns = sizes()
    assert sym_expr(3) == 3
    e = sym_expr(rows * columns + 1)
    assert isinstance(e, sympy.Expr)
    assert len(e.free_symbols) == 2
    assert sym_expr(rows - rows) == 0
    assert isinstance(sym_expr(rows - rows), int)


def test_optimization_hint_adds_no_guard() -> None:
    rows, columns = sizes()
    env = rows.node.shape_env
    both = rows * columns
    assert (optimization_hint(4), optimization_hint(rows), optimization_hint(both)) == (4, 6, 60)
    assert optimization_hint(sym_expr(both), env) == 60
    assert optimization_hint(sympy.Integer(5)) == 5
    assert optimization_hint(sym_expr(both), fallback=2) == 4
    assert optimization_hint(env.create_unbacked_symint() + 1, fallback=9) == 10
    assert not env.guards


def test_optimization_hint_of_older_torch() -> None:
    rows, _ = sizes()

    class Older:
        def size_hint(self, e: sympy.Expr, *, allow_none: bool) -> sympy.Expr | None:
            return e.subs(sym_expr(rows), 6) if e.has(sym_expr(rows)) else None

    assert optimization_hint(sym_expr(rows) + 1, Older()) == 7
    assert optimization_hint(sympy.Symbol("u0"), Older(), fallback=3) == 3


def test_numbers_drawn_by_python_are_told_from_arrays() -> None:
    def fn(x: torch.Tensor, y: Any) -> torch.Tensor:
        return x * random.uniform(0, 1) + random.randint(1, 3) + torch.from_numpy(y)

    found = []

    def backend(gm: GraphModule, _: object) -> Callable[..., Any]:  # afterwards Dynamo forgets where inputs came from
        found.extend(map(torch_shim.is_drawn_by_python, gm.graph.find_nodes(op="placeholder")))
        return gm.forward

    torch.compile(fn, backend=backend)(torch.ones(2), np.ones(2, np.float32))
    assert sorted(found) == [False, False, True, True]
