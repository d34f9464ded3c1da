"""Every private import of torch, with what differs by version (2.11 to 2.15).  No other file may import ``torch._*``.

Names of the compiler stack are imported when first used, since they cost seconds and a printer of graphs needs none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx import GraphModule
from torch.utils._sympy import functions
from torch.utils._sympy.printers import PythonPrinter

FloorDiv = functions.FloorDiv
ModularIndexing = functions.ModularIndexing  # (x // divisor) % modulus
Mod = functions.Mod
PythonMod = functions.PythonMod
CleanDiv = functions.CleanDiv  # a FloorDiv known to leave no rest
CeilDiv = functions.CeilDiv
Where = functions.Where
Max = functions.Max  # what sizes are made of: not sympy.Max
Min = functions.Min

# Taken from torch when first used: see _HOMES.
aot_autograd: Callable[..., Any]
make_boxed_func: Callable[[Callable[..., Any]], Callable[..., Any]]
default_partition: Callable[..., tuple[GraphModule, GraphModule]]
min_cut_rematerialization_partition: Callable[..., tuple[GraphModule, GraphModule]]
has_recomputable_ops: Callable[[GraphModule], bool]
detect_fake_mode: Callable[[Any], FakeTensorMode | None]
TorchDynamoException: type[Exception]

RNG_CALLS = {"run_and_save_rng_state": "saves", "run_with_rng_state": "restores"}
"""Higher-order calls by which the partitioner repeats random numbers, and what they do with the generator's state."""

_HOMES: dict[str, tuple[str, ...]] = {
    "aot_autograd": ("torch._dynamo.backends.common",),
    "make_boxed_func": ("torch._functorch.aot_autograd", "functorch.compile"),
    "default_partition": ("torch._functorch.partitioners", "functorch.compile"),
    "min_cut_rematerialization_partition": ("torch._functorch.partitioners", "functorch.compile"),
    "has_recomputable_ops": ("torch._functorch.partitioners",),
    "detect_fake_mode": ("torch._guards", "torch._dynamo.utils"),
    "TorchDynamoException": ("torch._dynamo.exc",),
}
"""Name -> modules that may hold it, the one of torch 2.13 first."""

if not TYPE_CHECKING:  # or a checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import one name of the compiler stack, from wherever this version of torch keeps it."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for home in _HOMES[name]:
            try:
                return getattr(importlib.import_module(home), name)
            except (ImportError, AttributeError):
                continue
        raise ImportError(f"torch {torch.__version__} has no {name!r}; install a torch from 2.11 to 2.15.")


def sym_expr(x: int | torch.SymInt) -> int | sympy.Expr:
    """A size as a number or a sympy expression of size symbols.  Adds no guard."""
    if isinstance(x, int):
        return x
    known = x.node.maybe_as_int()
    if known is not None:
        return int(known)
    expr = x.node.expr
    return int(expr) if expr.is_Integer else expr


def python_expr(e: int | sympy.Expr) -> str:
    """A size expression as Python source over integers named as its symbols (mentions ``math`` at most)."""
    if isinstance(e, int):
        return str(e)
    return str(PythonPrinter().doprint(e))


def optimization_hint(x: int | torch.SymInt | sympy.Expr, shape_env: Any = None, fallback: int = 8192) -> int:
    """A likely value of a size, to weigh costs by.  Adds no guard.

    1. A number is itself.
    2. A SymInt, or an expression with its ``shape_env``, is what it was while tracing.
    3. A symbol that had no value then, or an expression with no ``shape_env``, counts as ``fallback``.
    """
    if isinstance(x, torch.SymInt):
        shape_env = x.node.shape_env
        x = sym_expr(x)
    if isinstance(x, int):
        return x
    if x.is_number:
        return int(x)
    if hasattr(shape_env, "optimization_hint"):  # from 2.12 on
        return int(shape_env.optimization_hint(x, fallback=fallback))
    known = shape_env.size_hint(x, allow_none=True) if shape_env is not None else None
    return int(x.subs(dict.fromkeys(x.free_symbols, fallback)) if known is None else known)
