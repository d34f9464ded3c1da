"""The options of a compilation: ``torch.compile(model, backend="dsc", options={...})``.

This is the only file that reads ``DSC_*`` variables.  What is written in ``options`` wins over them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from dsc.errors import BadOption, UnknownOption
from dsc.precision import request
from dsc.precision.controller import PrecisionController
from dsc.precision.formats import DEFAULT_RECIPE
from dsc.runtime.state import State

Numerics = Literal["eager", "fast"]
Emit = Literal["auto", "cpp", "triton", "aten"]


@dataclass(frozen=True)
class Options:
    target: str | None = None
    """A machine to compile for, by its name in ``dsc.target``; None is the device that the tensors live on."""

    numerics: Numerics = "eager"
    """eager rounds low-precision values where eager does; fast rounds at stores and explicit casts only."""

    emit: Emit = "auto"
    """Which kernels to write; aten writes none and calls PyTorch's."""

    passes: str | tuple[Any, ...] | None = None
    """The whole pipeline: text such as ``canonicalize,fuse{max_nodes=4}``, or a list of such texts and of passes.

    ``default`` in it stands for the default pipeline, which None is too.
    """

    verify: bool = True
    """Check the graph after every pass."""

    cache: bool = True
    """Keep compiled graphs on disk, so that the next process does not trace and compile again."""

    cache_dir: str | None = None
    """Where compiled kernels are kept; None is ``default_cache_dir()``."""

    cxx: str | None = None
    """The C++ compiler; None is the first one found."""

    tune: bool = False
    """On a GPU: measure the best few schedules of every kernel, and keep the fastest in ``cache_dir`` for later processes.

    Without it kernels have their default schedules, the same on every machine: no run depends on what was measured.
    """

    cuda_graphs: bool = False
    """On a GPU: record the launches of every program after the first calls, and replay them (``dsc.runtime.graphs``).

    Off unless asked for, as long as no GPU has run it.
    """

    on_compile: Callable[[object], None] | None = None
    """Called once for every compiled graph, with its report."""

    watchers: tuple[Any, ...] = ()
    """Objects that hear of every graph and pass: see ``dsc.watch.Watcher``."""

    trace: str | None = None
    """A folder that gets a record of all compilations, a file a process: see ``dsc.debug.trace``."""

    memory_budget: int | str | None = None
    """The most bytes that a train step may occupy: a number, ``40GiB``, ``80%`` of the target's memory, or ``auto``.

    None: the fastest plan.  Everything counts: parameters, inputs, gradients, saved values, temporaries, memory_held.
    """

    memory_held: int | str = 0
    """What else occupies the target's memory, in the same forms, such as the optimizer's state."""

    offload: str | None = None
    """Where saved values may be moved while the device does not need them: ``cpu``, ``nvme:FOLDER`` or ``nvme:FOLDER@6.5GB/s``.

    For a ``memory_budget``; None: they are kept or computed again.
    """

    compress: str | None = None
    """In which format saved values may be kept for the backward: ``bf16``, ``fp8`` (e4m3) or ``e5m2``.  Changes gradients.

    For a ``memory_budget``, and only as far as that asks for it; None: they are kept as they are.
    """

    memory_plan: str | None = None
    """A file with the plans for a budget: those that it has are applied unchanged, new ones are added."""

    precision: Any = None
    """Formats of matrix products: a name such as ``bf16`` or ``fp8``, ``auto``, a mapping of layer patterns, or a plan.

    None: as the model has them.  See ``dsc.precision.request``.  Under ``torch.no_grad`` products have their forward
    formats; ``auto`` needs a ``precision_plan`` for that, since there is no gradient to measure.
    """

    recipe: str = DEFAULT_RECIPE
    """How 8-bit operands are scaled: ``tensorwise``, ``rowwise`` or ``blockwise`` (1 x 128, weights 128 x 128)."""

    error_budget: float = request.DEFAULT_BUDGET
    """For ``precision="auto"``: the most that rounding may change the gradient, relative to its norm."""

    controller: PrecisionController | None = None
    """Changes formats while the model trains, without compiling again; None leaves them as they are planned."""

    precision_plan: str | None = None
    """A file with the plan of ``precision="auto"``: one that is there is applied unchanged, a new one is put there."""

    state: State | None = None
    """Where masks and whatever else lives between steps is kept; None makes one for each compiled graph."""

    sparsity: str | Mapping[str, Any] | None = None
    """N:M sparse weights in training: ``2:4``, or a mapping with the fields of ``dsc.passes.sparsify.Sparsify``.

    None: dense.
    """

    attention: Mapping[str, Any] | None = None
    """Attention over chosen blocks, which changes the model: the fields of ``dsc.passes.sparse_attention``; None: dense."""

    dropout: str | None = None
    """Where masks of dropout are drawn: ``kernel``, in the kernel that uses them, from one number of the generator a call.

    None: by ATen's own call, with eager's numbers.
    """

    mode: str | None = None
    """The ``mode`` of torch.compile: accepted and recorded, and changes nothing yet."""


VALUES: Mapping[str, tuple[str | None, ...]] = {
    "numerics": ("eager", "fast"),
    "emit": ("auto", "cpp", "triton", "aten"),
    "dropout": (None, "kernel"),
}
CHECKS: Mapping[str, Callable[[object], object]] = {
    "precision": request.check,
    "recipe": request.check_recipe,
    "error_budget": request.check_budget,
}
MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
ENVIRONMENT: Mapping[str, str] = {
    "DSC_CACHE": "cache",
    "DSC_CACHE_DIR": "cache_dir",
    "DSC_CXX": "cxx",
    "DSC_EMIT": "emit",
    "DSC_VERIFY": "verify",
    "DSC_NUMERICS": "numerics",
    "DSC_PASSES": "passes",
    "DSC_TRACE": "trace",
    "DSC_TUNE": "tune",
    "DSC_CUDA_GRAPHS": "cuda_graphs",
    "DSC_MEMORY_BUDGET": "memory_budget",
    "DSC_OFFLOAD": "offload",
}
SWITCHES = ("verify", "cache", "tune", "cuda_graphs")
SWITCH: Mapping[str, bool] = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
KEYS = tuple(f.name for f in fields(Options) if f.name != "mode")


def parse(options: Mapping[str, object] | None, mode: str | None, environ: Mapping[str, str]) -> Options:
    """The options of one call of torch.compile, checked.

    1. A key of ``options`` wins over its variable in ``environ``; an empty variable counts as unset.
    2. An unknown key, a wrong type or a wrong value raises.
    3. An unknown ``DSC_*`` variable is left alone: it may be for another version.
    """
    if mode not in MODES:
        raise BadOption("mode", mode, f"one of {', '.join(repr(m) for m in MODES if m)}, or leave it out")
    values: dict[str, object] = {"mode": mode}
    for variable, name in ENVIRONMENT.items():
        if text := environ.get(variable):
            values[name] = checked(name, switch(variable, text) if name in SWITCHES else text, variable)
    for name, value in (options or {}).items():
        if name not in KEYS:
            raise UnknownOption(name, KEYS)
        values[name] = checked(name, value, name)
    for name in ("offload", "compress"):
        if values.get(name) is not None and values.get("memory_budget") is None:
            raise BadOption(name, values[name], "None where there is no memory_budget that asks for it")
    return Options(**values)  # type: ignore[arg-type]  # checked one by one


def checked(name: str, value: object, shown: str) -> object:
    """``value`` if option ``name`` may have it.  ``shown`` is what the user wrote: the key or the variable."""
    if name in VALUES:
        if value not in VALUES[name]:
            raise BadOption(shown, value, f"one of {', '.join(map(repr, VALUES[name]))}")
    elif name in SWITCHES:
        if not isinstance(value, bool):
            raise BadOption(shown, value, "True or False")
    elif name in ("memory_budget", "memory_held"):
        if isinstance(value, bool) or not isinstance(value, (int, str, type(None))):
            raise BadOption(shown, value, "bytes, a size such as '40GiB', a share such as '80%', or 'auto'")
    elif name == "on_compile":
        if value is not None and not callable(value):
            raise BadOption(shown, value, "a function of one argument, or None")
    elif name == "passes" and isinstance(value, (list, tuple)):
        value = tuple(value)
    elif name == "controller":
        if value is not None and not isinstance(value, PrecisionController):
            raise BadOption(shown, value, "a dsc.PrecisionController, or None")
    elif name in CHECKS:
        value = CHECKS[name](value)
    elif name == "state":
        if value is not None and not isinstance(value, State):
            raise BadOption(shown, value, "a dsc.State, or None")
    elif name == "sparsity":
        if not isinstance(value, (str, Mapping, type(None))):
            raise BadOption(shown, value, "a pattern such as '2:4', a mapping such as {'pattern': '2:4'}, or None")
        value = dict(value) if isinstance(value, Mapping) else value
    elif name == "attention":
        if not isinstance(value, (Mapping, type(None))):
            raise BadOption(shown, value, "a mapping such as {'pattern': 'block_sparse', 'window': 256}, or None")
        value = dict(value) if isinstance(value, Mapping) else value
    elif name == "watchers":
        if not isinstance(value, (list, tuple)):
            raise BadOption(shown, value, "a list of dsc.watch.Watcher")
        value = tuple(value)
    elif value is not None and not isinstance(value, str):
        raise BadOption(shown, value, "a string, a list, or None" if name == "passes" else "a string, or None")
    return value


def switch(variable: str, text: str) -> bool:
    """``1``, ``true`` and ``on``; ``0``, ``false`` and ``off``."""
    try:
        return SWITCH[text.lower()]
    except KeyError:
        raise BadOption(variable, text, "1 or 0") from None


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/dsc``, or ``~/.cache/dsc``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dsc"
