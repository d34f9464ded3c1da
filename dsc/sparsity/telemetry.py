"""What the masks do: density, flips, retained magnitude, entropy, and the share of the work that is sparse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dsc.errors import NoSparsity
from dsc.nm import FORM, STATS
from dsc.runtime.state import State

PREFIX, MASK = "sparsity.", ".mask"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, as of its last step."""

    name: str
    density: float
    """Share of the weights that its mask keeps."""
    flip_rate: float
    """Share of the mask's entries that changed at the last step."""
    retained: float
    """Sum of |w| that the mask keeps, over that of all."""
    work: float
    """Operations of its forward product, when it is dense."""
    gated: float
    """Share of the rows of its gradient that were skipped: on a CPU."""
    steps: int
    form: Mapping[str, int]
    """How its masks are made: see ``dsc.nm.FORM``."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """All sparse layers of a state."""

    layers: tuple[Layer, ...]
    coverage: float
    """Share of the operations of all matrix products of a step that have a sparse weight, layers that are dense aside."""

    @property
    def density(self) -> float:
        """Of all layers, by work."""
        return sum(x.density * x.work for x in self.layers) / sum(x.work for x in self.layers)

    @property
    def flip_rate(self) -> float:
        return sum(x.flip_rate * x.work for x in self.layers) / sum(x.work for x in self.layers)

    @property
    def retained(self) -> float:
        return sum(x.retained * x.work for x in self.layers) / sum(x.work for x in self.layers)

    @property
    def gated(self) -> float:
        return sum(x.gated * x.work for x in self.layers) / sum(x.work for x in self.layers)

    @property
    def entropy(self) -> float:
        """Of the layers' shares of the kept work, over that of equal shares: 1 is all alike."""
        kept = [x.density * x.work for x in self.layers]
        if len(kept) < 2 or not sum(kept):
            return 1.0
        shares = [k / sum(kept) for k in kept]
        return -sum(p * math.log(p) for p in shares if p) / math.log(len(shares))

    def numbers(self) -> dict[str, float]:
        """Name -> number, for a logger: ``sparsity/density`` of all, ``blocks.0.up/flip_rate`` of a layer, ..."""
        out = {
            f"sparsity/{n}": float(getattr(self, n))
            for n in ("density", "flip_rate", "retained", "entropy", "coverage", "gated")
        }
        for x in self.layers:
            out |= {f"{x.name}/{n}": float(getattr(x, n)) for n in ("density", "flip_rate", "retained")}
        return out


def tell(state: State, callback: Callable[[int, Mapping[str, float]], None]) -> None:
    """Hand step and numbers to a callback, of the kind that ``dsc.PrecisionController`` has: one can serve both.

    Raises:
        NoSparsity: the state has no sparse layers.
    """
    callback(int(state[f"{PREFIX}step"]), read(state).numbers())


def layers(state: State) -> tuple[str, ...]:
    """The names of the sparse layers.

    Raises:
        NoSparsity: there is none.
    """
    found = tuple(n[len(PREFIX) : -len(MASK)] for n in state if n.startswith(PREFIX) and n.endswith(MASK))
    if not found:
        raise NoSparsity
    return found


def form(state: State, layer: str) -> dict[str, int]:
    """How a layer's masks are made."""
    return dict(zip(FORM, (int(x) for x in state[f"{PREFIX}{layer}.form"])))


def read(state: State) -> Telemetry:
    """The telemetry of the last step.  On a GPU this waits for it.

    Raises:
        NoSparsity: the state has no sparse layers.
    """
    found = tuple(_layer(state, name) for name in layers(state))
    total, sparse = state[f"{PREFIX}flops"].tolist()
    all_work = sum(x.work for x in found)
    share = sum(x.work for x in found if x.density < 1) / all_work if all_work else 0.0
    return Telemetry(found, sparse / total * share if total else 0.0)


def _layer(state: State, name: str) -> Layer:
    stats = state.get(f"{PREFIX}{name}.stats", torch.zeros(len(STATS)))
    values = dict(zip(STATS, stats.tolist()))
    count = state[f"{PREFIX}{name}{MASK}"].numel()
    magnitude = values["magnitude"]
    return Layer(
        name,
        values["kept"] / count,
        values["flips"] / count,
        values["kept_magnitude"] / magnitude if magnitude else 1.0,
        float(state[f"{PREFIX}{name}.work"]),
        1.0 - float(state.get(f"{PREFIX}{name}.alive", torch.ones(()))),
        int(values["refreshes"]),
        form(state, name),
    )
