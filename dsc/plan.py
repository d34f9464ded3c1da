"""What a planning pass decided, as data: saved as JSON, read back, applied unchanged, compared.

A file holds the plans of all graphs of a model, each under a fingerprint of its graph, so that it is never applied to
another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from dsc import text
from dsc.errors import BadPlan
from dsc.notes import Keep

VERSION = 3


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one value that the backward reads."""

    name: str
    nbytes: int
    keep: Keep
    format: str = ""
    """In which it is kept, if it is compressed."""
    stored: int = -1
    """Bytes of it between forward and backward where they are fewer than ``nbytes``, else -1."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a train step saves, and what its backward runs in which order, by the names of the joint graph's nodes."""

    target: str
    budget: int
    """Bytes."""
    held: int
    """Bytes of the budget that something else occupies, such as the optimizer's state."""
    peak: int
    """Planned bytes at the worst moment, ``held`` included."""
    seconds: float
    """Modelled, of forward and backward."""
    default_peak: int
    """Of the plan without a budget."""
    default_seconds: float
    origin: str
    """Which member of the portfolio it is: default, chain, checkpoint or cut."""
    saved: tuple[str, ...]
    script: tuple[str, ...]
    """Calls that the backward runs, in order; a forward one in it runs again."""
    decisions: tuple[Decision, ...]
    """Of all values of the forward that the backward reads, the largest first."""
    tier: str = ""
    """Where values are moved, if any are."""
    away: tuple[tuple[str, str, int], ...] = ()
    """Each of them: its name, the call of the forward after which it is out, the place in the script at which it returns."""
    format: str = ""
    """In which values are compressed, if any are."""
    compressed: tuple[str, ...] = ()
    """Their names."""

    @property
    def extra(self) -> float:
        """Share of time added to the plan without a budget."""
        return self.seconds / self.default_seconds - 1 if self.default_seconds else 0.0


def fingerprint(gm: GraphModule) -> str:
    """Equal for graphs with the same canonical text."""
    return hashlib.sha256(text.show(gm.graph).encode()).hexdigest()[:16]


def dump(plans: Mapping[str, MemoryPlan]) -> str:
    """Plans by fingerprint as JSON, the same text for the same plans."""
    return json.dumps({"version": VERSION, "memory": {k: asdict(p) for k, p in sorted(plans.items())}}, indent=1) + "\n"


def parse(source: str, where: str = "the text") -> dict[str, MemoryPlan]:
    """What ``dump`` wrote.

    Raises:
        BadPlan: no JSON, of another version, or with fields that do not fit.
    """
    try:
        data = json.loads(source)
        if data["version"] != VERSION:
            raise BadPlan(where, f"it is of version {data['version']}, and this dsc reads version {VERSION}")
        return {key: _plan(p) for key, p in data["memory"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as why:
        raise BadPlan(where, f"{type(why).__name__}: {why}") from why


def read(path: Path) -> dict[str, MemoryPlan]:
    """The plans in a file; none if there is no such file."""
    return parse(path.read_text(), str(path)) if path.exists() else {}


def add(path: Path, key: str, plan: MemoryPlan) -> None:
    """Put one plan into a file, and leave the others there."""
    plans = read(path)
    plans[key] = plan
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(dump(plans))
    new.replace(path)  # a reader sees the old file or the new one


def _plan(data: Mapping[str, Any]) -> MemoryPlan:
    decisions = tuple(Decision(**d) for d in data["decisions"])
    tuples = {key: tuple(data[key]) for key in ("saved", "script", "compressed")}
    away = tuple((str(name), str(lands), int(fetched)) for name, lands, fetched in data["away"])
    return MemoryPlan(**{**data, **tuples, "decisions": decisions, "away": away})
