"""Programs by kind: a module a kind, whose first line says what may go wrong, a function a program, ``CASES`` in order."""

from collections.abc import Callable
from types import ModuleType

from conformance.case import Case
from conformance.cases import (
    aliasing,
    attention,
    autocast,
    autograd,
    checkpointing,
    complex_double,
    determinism,
    dtypes,
    empty,
    errors,
    float8,
    graph_modes,
    indexing,
    integers,
    losses,
    modules,
    mutation,
    nonfinite,
    pooling,
    random_numbers,
    recurrent,
    rounding,
    scalars,
    sizes,
    strides,
    structures,
    tracing,
)

KINDS: tuple[ModuleType, ...] = (
    mutation,
    aliasing,
    strides,
    integers,
    nonfinite,
    empty,
    rounding,
    float8,
    dtypes,
    errors,
    indexing,
    random_numbers,
    checkpointing,
    determinism,
    complex_double,
    scalars,
    sizes,
    autograd,
    graph_modes,
    autocast,
    modules,
    recurrent,
    losses,
    attention,
    pooling,
    structures,
    tracing,
)

Maker = Callable[[], Case]

PROGRAMS: dict[str, Maker] = {
    f"{kind.__name__.rpartition('.')[2]}/{make.__name__}": make for kind in KINDS for make in kind.CASES
}


def describe(kind: str) -> str:
    """The first line of a kind's docstring."""
    module = next(k for k in KINDS if k.__name__.rpartition(".")[2] == kind)
    return (module.__doc__ or "").strip().split("\n")[0].rstrip(".")
