"""Which format each matrix product has, as data: saved as JSON, read back, edited, applied unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsc.errors import BadPrecisionPlan
from dsc.precision.formats import FORMATS

VERSION = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The format of one product."""

    site: str
    """Layer and role, as in ``blocks.0.mlp.up.forward``."""
    format: str
    error: float = 0.0
    """Predicted relative error of the gradient because of this choice alone."""
    seconds: float = 0.0
    """Modelled, of the product and of what it costs to round its operands."""
    shape: tuple[int, int, int] = (0, 0, 0)
    """M, N, K."""


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """The formats of a model's products on a target; products that it does not name stay as they are."""

    choices: tuple[Choice, ...]
    target: str = ""
    budget: float = 0.0
    predicted: float = 0.0
    """Relative error of the gradient: the choices' errors, added in quadrature."""
    measured: float | None = None
    """The same, measured on the batch of the calibration; None where nobody measured."""
    probes: int = 0
    """Backward passes that the calibration took beyond the first."""
    baseline: float = 0.0
    """Modelled seconds of all products in bf16."""

    @property
    def seconds(self) -> float:
        return sum(c.seconds for c in self.choices)

    @property
    def speedup(self) -> float:
        """Modelled, of the products against bf16."""
        return self.baseline / self.seconds if self.seconds else 1.0

    def formats(self) -> dict[str, str]:
        return {c.site: c.format for c in self.choices}

    def changed(self, formats: Mapping[str, str]) -> PrecisionPlan:
        """The plan with other formats for some sites; what was predicted and measured is void then."""
        named = tuple(replace(c, format=formats[c.site]) if c.site in formats else c for c in self.choices)
        return replace(self, choices=named, measured=None)

    def dump(self) -> str:
        return json.dumps({"version": VERSION, "precision": asdict(self)}, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(file.name + ".new")
        new.write_text(self.dump())
        new.replace(file)  # a reader sees the old file or the new one


def load(path: str | Path) -> PrecisionPlan:
    """The plan in a file.

    Raises:
        BadPrecisionPlan: no file, no plan, or formats that do not exist.
    """
    try:
        return parse(Path(path).read_text(), str(path))
    except OSError as why:
        raise BadPrecisionPlan(str(path), f"{why.strerror}") from why


def parse(text: str, where: str = "the text") -> PrecisionPlan:
    """What ``dump`` wrote, perhaps edited."""
    try:
        data = json.loads(text)
        if data["version"] != VERSION:
            raise BadPrecisionPlan(where, f"it is of version {data['version']}, and this dsc reads version {VERSION}")
        return _plan(data["precision"], where)
    except (ValueError, KeyError, TypeError, AttributeError) as why:
        raise BadPrecisionPlan(where, f"{type(why).__name__}: {why}") from why


def _plan(data: Mapping[str, Any], where: str) -> PrecisionPlan:
    choices = tuple(Choice(**{**c, "shape": tuple(c.get("shape", (0, 0, 0)))}) for c in data["choices"])
    if unknown := [c.format for c in choices if c.format not in FORMATS]:
        raise BadPrecisionPlan(where, f"{unknown[0]!r} is no format ({', '.join(FORMATS)})")
    return PrecisionPlan(**{**data, "choices": choices})


def add(path: Path, made: PrecisionPlan) -> None:
    """Put a plan into a file; of a model with several graphs, next to those of the others."""
    if path.exists():
        before = load(path)
        own = {c.site for c in made.choices}
        made = replace(made, choices=(*(c for c in before.choices if c.site not in own), *made.choices))
    made.save(path)
