"""The passes that options ask for: by name, in text or lists, or because of what they promise."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import metadata
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule

from dsc import budget, defaults, errors, manager
from dsc.defaults import GRAPH as GRAPH
from dsc.defaults import JOINT as JOINT
from dsc.errors import BadOption, BadPlugin, UnknownOption
from dsc.manager import Pass, Report
from dsc.options import Options
from dsc.passes.attention import Attention
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.chunk_loss import ChunkLoss
from dsc.passes.dropout import Dropout
from dsc.passes.embedding import Embedding
from dsc.passes.fuse import Fuse
from dsc.passes.grouped import Grouped
from dsc.passes.memory import Memory
from dsc.passes.precision import Precision
from dsc.passes.recompute import Recompute
from dsc.passes.sparse_attention import SparseAttention
from dsc.passes.sparsify import Sparsify, names
from dsc.passes.sparsify_cost import Measure
from dsc.runtime.state import State
from dsc.target import Target

KNOWN: Mapping[str, type[Pass]] = {
    p.name: p
    for p in (
        ChunkLoss,
        Canonicalize,
        Embedding,
        Attention,
        Grouped,
        SparseAttention,
        Sparsify,
        Dropout,
        Precision,
        Recompute,
        Memory,
        Fuse,
    )
}

PLUGINS = "dsc.passes"
"""The entry point group under which other packages bring passes: known by name, run only where named."""


@dataclass(frozen=True)
class Default(Pass):
    """Stands for the default pipeline in the text or list of another one."""

    name: ClassVar[str] = "default"

    def run(self, gm: GraphModule, target: Target) -> Report:
        raise NotImplementedError("it is replaced by the default pipeline")


def asked(
    options: Options, target: Target, state: State, sample: Sequence[object] | None
) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """The passes on the joint graph, and on each graph after the split, of all options that change them.

    Raises:
        UnknownPass, UnknownOption, BadOption, BadPlugin: what is asked for does not exist, or makes no sense.
    """
    joint, graph = chosen(options.passes, defaults.joint(target, options))
    if options.memory_budget is not None:
        held = budget.bytes_of(options.memory_held, target, "memory_held") if options.memory_held else 0
        limit = budget.bytes_of(options.memory_budget, target)
        fused = options.emit != "aten"
        joint = budgeted(joint, Memory(limit, held, options.memory_plan, fused, options.offload, options.compress))
    if options.sparsity is not None:
        joint = sparse(joint, options.sparsity, state, target)
    joint = tuple(replace(p, state=state) if isinstance(p, Sparsify) else p for p in joint)  # also those named as text
    warn_of_stale_masks(joint)
    if options.attention is not None:
        joint = attending(joint, options.attention)
    if options.dropout is not None:
        joint = weighed(joint, Dropout())
    if options.precision is not None:
        joint = precise(joint, precision(options, sample))
    return joint, graph


def chosen(
    passes: str | Sequence[object] | None, default: Sequence[Pass] = JOINT
) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """The passes on the joint graph, and on each graph after the split, of ``options.passes``.

    ``default``: those on the joint graph that the default pipeline has.

    Raises:
        UnknownPass, UnknownOption, BadOption, BadPlugin: of an item that is no pass.
    """
    joint: list[Pass] = []
    graph: list[Pass] = []
    for p in listed(Default.name if passes is None else passes):
        if isinstance(p, Default):
            joint += default
            graph += GRAPH
            continue
        if p.runs_on in ("joint", "both"):
            joint.append(p)
        if p.runs_on in ("graph", "both"):
            graph.append(p)
    return tuple(joint), tuple(graph)


def budgeted(joint: Sequence[Pass], memory: Memory) -> tuple[Pass, ...]:
    """The passes on the joint graph with a memory budget: it decides what ``recompute`` would."""
    if any(isinstance(p, Memory) for p in joint):
        return tuple(joint)
    kept = [memory if isinstance(p, Recompute) else p for p in joint]
    return tuple(kept) if memory in kept else (*kept, memory)


def listed(passes: str | Sequence[object]) -> tuple[Pass, ...]:
    """Every item as a pass; ``default`` as one that stands for many."""
    out: list[Pass] = []
    for item in [passes] if isinstance(passes, str) else passes:
        match item:
            case str():
                out += parse(item)
            case Pass():
                out.append(item)
            case _:
                given = "it called, as in MyPass()" if isinstance(item, type) else "a name or an instance of dsc.Pass"
                raise BadOption("passes", item, given)
    return tuple(out)


def sparse(joint: Sequence[Pass], given: str | Mapping[str, Any], state: State, target: Target) -> tuple[Pass, ...]:
    """The passes on the joint graph with ``options.sparsity``: after ``canonicalize``, before all that choose formats.

    Raises:
        UnknownOption, BadOption: what is given makes no sense.
    """
    values: dict[str, Any] = {"pattern": given} if isinstance(given, str) else _fields(Sparsify, given, "sparsity")
    if "layers" in values:
        values["layers"] = names(values["layers"])
    return _early(joint, Sparsify(**values, state=state, measure=_measure(target)))


def _measure(target: Target) -> Measure | None:
    """What times products on the GPU that is planned for, if it is here."""
    if target.kind != "cuda" or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability() != target.capability:
        return None
    from dsc.codegen.templates import sparse_time  # needs Triton

    return sparse_time.seconds


def attending(joint: Sequence[Pass], given: Mapping[str, Any]) -> tuple[Pass, ...]:
    """The passes on the joint graph with ``options.attention``.

    Raises:
        UnknownOption, BadOption: what is given makes no sense.
    """
    return _early(joint, SparseAttention(**_fields(SparseAttention, given, "attention")))


def _fields(kind: type[Pass], given: Mapping[str, Any], owner: str) -> dict[str, Any]:
    known = tuple(f.name for f in fields(kind) if f.name not in ("state", "measure"))
    if unknown := [key for key in given if key not in known]:
        raise UnknownOption(str(unknown[0]), known, owner)
    return dict(given)


def _early(joint: Sequence[Pass], new: Pass) -> tuple[Pass, ...]:
    """With a pass that changes what is computed: right after ``canonicalize``, before all that weigh costs."""
    after = max((i + 1 for i, p in enumerate(joint) if isinstance(p, Canonicalize)), default=0)
    return (*joint[:after], new, *joint[after:])


def precision(options: Options, sample: Sequence[object] | None) -> Precision:
    """The pass that the options on formats describe."""
    asked, given = options.precision, tuple(sample) if sample is not None else None
    if isinstance(asked, str):
        return Precision(
            asked, options.recipe, options.error_budget, options.precision_plan,
            sample=given, controller=options.controller,
        )  # fmt: skip
    return Precision(
        recipe=options.recipe, budget=options.error_budget, given=asked, sample=given, controller=options.controller
    )


def warn_of_stale_masks(joint: Sequence[Pass]) -> None:
    """The user asked for what is known to cost accuracy."""
    for p in joint:
        if isinstance(p, Sparsify) and p.refresh > 1:
            warnings.warn(str(errors.StaleMasks(p.refresh)), errors.DscWarning, stacklevel=4)


def precise(joint: Sequence[Pass], precision: Precision) -> tuple[Pass, ...]:
    """The passes on the joint graph with formats for products."""
    return tuple(joint) if any(isinstance(p, Precision) for p in joint) else weighed(joint, precision)


def weighed(joint: Sequence[Pass], new: Pass) -> tuple[Pass, ...]:
    """With a pass that decides before anything is saved for the backward, and after the form of attention is chosen."""
    at = next((i for i, p in enumerate(joint) if isinstance(p, (Recompute, Memory))), len(joint))
    return (*joint[:at], new, *joint[at:])


def parse(text: str) -> tuple[Pass, ...]:
    """``my-pass,default`` -> passes: ours, those of installed packages, and what stands for the default pipeline."""
    known: dict[str, type[Pass]] = {**KNOWN, Default.name: Default}
    missing = [name for name in manager.names(text) if name not in known]
    return manager.parse(text, {**known, **plugins(missing)} if missing else known)


def plugins(names: Iterable[str]) -> dict[str, type[Pass]]:
    """The passes of these names that installed packages bring.  Nothing else of them is imported.

    Raises:
        BadPlugin: what stands under the name cannot be imported, or is no pass of that name.
    """
    points = metadata.entry_points(group=PLUGINS)
    return {name: load(points[name]) for name in dict.fromkeys(names) if name in points.names}


def load(point: metadata.EntryPoint) -> type[Pass]:
    package = point.dist.name if point.dist else point.module
    try:
        found = point.load()
    except Exception as why:
        raise BadPlugin(point.name, package, f"{type(why).__name__}: {why}") from why
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise BadPlugin(point.name, package, f"{point.value} is no class of passes")
    if found.name != point.name:
        raise BadPlugin(point.name, package, f"{point.value} calls itself {found.name!r}")
    return found
