"""What the pipeline planner decided, as data: saved as JSON, read back, run unchanged, compared.

The words: a *stage* is a run of nodes of the model's forward graph; a *rank* is a member of the pipeline and owns one or
more stages; a *micro-batch* is a slice of the batch that passes through all stages; an *action* is one unit of work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dsc.distributed.cluster import Cluster
from dsc.errors import BadPlan
from dsc.manager import Remark

VERSION = 1

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward as a whole; input gradients alone (dgrad); weight gradients alone (wgrad)."""
Action = tuple[int, Kind, int]
"""Stage, kind, micro-batch."""
Placement = Literal["loop", "v"]


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many ways each kind of parallelism divides the work.  ``sequence`` shares the devices of ``tensor``."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1
    """Shares the devices of ``data``: experts are spread over replicas."""
    zero: int = 0
    """Level of ZeRO over the replicas: 1 spreads optimizer state, 2 gradients too, 3 parameters too."""
    near: Literal["stages", "replicas"] = "stages"
    """Which stand side by side, next to the cards of tensor-parallel groups."""

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage.  Names are those of nodes of the traced forward graph, and of the model's own parameters."""

    index: int
    rank: int
    nodes: tuple[str, ...]
    """Calls, in order."""
    copied: tuple[str, ...]
    """Calls on parameters, buffers and constants alone (tables, masks, views of weights): every stage that reads one runs its own."""
    state: tuple[str, ...]
    """Parameters and buffers that it reads, by the model's first name for each."""
    inputs: tuple[str, ...]
    """Inputs of the model that it is given from outside: the first stage most, the last what only it reads (the targets)."""
    receives: tuple[str, ...]
    """Values that come from the stage before, in order; those that a later stage needs are passed on."""
    sends: tuple[str, ...]
    """Values that go to the next stage, in order; of the last stage: the results of the model."""
    forward: float
    """Seconds of one micro-batch."""
    dgrad: float
    """With the forward again, where ``recompute``."""
    wgrad: float
    send: float
    """Seconds until the next stage has what this one sends; its gradients take as long on their way back."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Held from the forward of one micro-batch until its backward."""
    kept_bytes: int
    """Of those, held from dgrad until wgrad."""
    boundary_bytes: int
    """That arrive from the stage before."""
    work_bytes: int
    """Beyond ``activation_bytes`` while a backward runs: what ``recompute`` computes again."""
    recompute: bool

    @property
    def backward(self) -> float:
        return self.dgrad + self.wgrad

    @property
    def static_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class Rival:
    """Another plan that was considered: a split, a known schedule, and how it would have done."""

    split: str
    schedule: str
    seconds: float
    bubble: float
    peak: int
    """Bytes of the fullest rank."""
    fits: bool


@dataclass(frozen=True)
class PipelinePlan:
    model: str
    graph: str
    """Fingerprint of the traced forward graph; node names are only good for that graph."""
    torch: str
    cluster: Cluster
    degrees: Degrees
    devices: tuple[int, ...]
    """Device of each rank of the first replica: index in the cluster, nodes one after the other."""
    placement: Placement
    """loop: stage ``s`` on rank ``s % ranks``; v: there and back again."""
    split: str
    """Where the cuts come from."""
    schedule: str
    stages: tuple[StagePlan, ...]
    orders: tuple[tuple[Action, ...], ...]
    """Of each rank, what it does one after the other; micro-batches of one stage and kind are in order."""
    microbatches: int
    microbatch_size: int
    """Samples."""
    shared: Mapping[str, tuple[int, ...]]
    """Parameters that several stages read (tied weights) -> those stages; their gradients must be added up."""
    seconds: float
    """Modelled, of one step without the optimizer's."""
    bubble: float
    """Share of the ranks' time that is not work on stages: idle time and imbalance."""
    bound: float
    """Seconds that no order of these stages can beat."""
    peaks: tuple[int, ...]
    """Modelled bytes of each rank at its worst moment."""
    limit: int
    """Bytes that a rank may use."""
    rivals: tuple[Rival, ...]
    """Every other split with every known schedule, fastest first."""
    remarks: tuple[Remark, ...]

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @cached_property
    def _homes(self) -> dict[str, int]:
        return {name: s.index for s in self.stages for name in s.nodes}

    def stage_of(self, node: str) -> int:
        """The stage that runs a node.  A node that stages copy has none: ``KeyError``."""
        return self._homes[node]

    def stages_of(self, rank: int) -> tuple[StagePlan, ...]:
        """The stages of a rank, the earliest first."""
        return tuple(s for s in self.stages if s.rank == rank)

    @property
    def key(self) -> str:
        """Equal for equal plans: ranks compare it before they start."""
        return hashlib.sha256(dump(self).encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; a reader sees the old file or the new one."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_text(dump(self))
        new.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> PipelinePlan:
        """Read what ``save`` wrote.

        Raises:
            BadPlan: it is no such file.
        """
        try:
            source = Path(path).read_text()
        except OSError as why:
            raise BadPlan(str(path), why.strerror or str(why)) from why
        return parse(source, str(path))

    def diff(self, other: PipelinePlan) -> list[str]:
        """What differs in ``other``, a line each; none if both are equal."""
        return list(_differences(to_data(self), to_data(other), ""))


def to_data(plan: PipelinePlan) -> dict[str, Any]:
    """Plain lists, dicts, numbers and texts."""
    data: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    data["orders"] = [" ".join(f"{s}{kind}{m}" for s, kind, m in order) for order in plan.orders]
    return data


def dump(plan: PipelinePlan) -> str:
    """The plan as JSON, the same text for the same plan; actions as ``0F3``: stage, kind, micro-batch."""
    return json.dumps({"version": VERSION, "pipeline": to_data(plan)}, indent=1) + "\n"


def parse(source: str, where: str = "the text") -> PipelinePlan:
    """What ``dump`` wrote.

    Raises:
        BadPlan: no JSON, of another version, with fields that do not fit, or with actions that cannot all run.
    """
    try:
        data = json.loads(source)
        if data["version"] != VERSION:
            raise BadPlan(where, f"it is of version {data['version']}, and this dsc reads version {VERSION}")
        plan = _plan(data["pipeline"])
    except (ValueError, KeyError, TypeError, AttributeError) as why:
        raise BadPlan(where, f"{type(why).__name__}: {why}") from why
    problem = why_not(plan)
    if problem:
        raise BadPlan(where, problem)
    return plan


def why_not(plan: PipelinePlan) -> str | None:
    """Why a plan cannot run: a stage on no rank, an action missing, twice, on another rank, or out of order."""
    if [s.index for s in plan.stages] != list(range(len(plan.stages))):
        return "its stages are not numbered from 0 up"
    for rank, order in enumerate(plan.orders):
        mine = {s.index for s in plan.stages_of(rank)}
        if not mine:
            return f"rank {rank} has no stage"
        done: dict[tuple[int, str], int] = {}
        for stage, kind, batch in order:
            if stage not in mine:
                return f"rank {rank} runs {stage}{kind}{batch}, whose stage is not its own"
            parts = ("I", "W") if kind == "B" else (kind,)
            for part in parts:
                if part not in ("F", "I", "W"):
                    return f"{stage}{kind}{batch} is no action: kinds are F, B, I and W"
                if done.get((stage, part), 0) != batch:
                    return (
                        f"rank {rank} runs {stage}{kind}{batch} where micro-batch {done.get((stage, part), 0)} is next"
                    )
                done[stage, part] = batch + 1
            if kind != "F" and done.get((stage, "F"), 0) <= batch:
                return f"rank {rank} runs {stage}{kind}{batch} before its forward"
            if kind == "W" and done.get((stage, "I"), 0) <= batch:
                return f"rank {rank} runs {stage}{kind}{batch} before {stage}I{batch}"
        for stage in sorted(mine):
            for part in "FIW":
                if done.get((stage, part), 0) != plan.microbatches:
                    return f"stage {stage} runs {part} for {done.get((stage, part), 0)} of {plan.microbatches} micro-batches"
    return None


def parse_action(text: str) -> Action:
    """``12F3`` -> (12, "F", 3)."""
    for kind in ("F", "B", "I", "W"):
        stage, found, batch = text.partition(kind)
        if found:
            return int(stage), kind, int(batch)
    raise ValueError(f"{text!r} is no action such as 0F3")


def _plan(data: Mapping[str, Any]) -> PipelinePlan:
    given = dict(data)
    names = {f.name for f in fields(PipelinePlan)}
    if given.keys() != names:
        raise ValueError(f"fields {sorted(given.keys() ^ names)} are missing or too many")
    given["cluster"] = Cluster.from_data(given["cluster"])
    given["degrees"] = Degrees(**given["degrees"])
    given["stages"] = tuple(StagePlan(**{k: _tuples(v) for k, v in s.items()}) for s in given["stages"])
    given["orders"] = tuple(tuple(map(parse_action, order.split())) for order in given["orders"])
    given["shared"] = {k: tuple(v) for k, v in given["shared"].items()}
    given["rivals"] = tuple(Rival(**r) for r in given["rivals"])
    given["remarks"] = tuple(Remark(**r) for r in given["remarks"])
    for name in ("devices", "peaks"):
        given[name] = tuple(given[name])
    return PipelinePlan(**given)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _differences(old: Any, new: Any, where: str) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new)):
            yield from _differences(a, b, f"{where}[{i}]")
    elif old != new:
        yield f"{where}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}"
