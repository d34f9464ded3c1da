"""What a controller of formats knows of products, what its rules see, and the names under which products keep their state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dsc.precision.formats import FORMATS, Role
from dsc.precision.plan import PrecisionPlan

Callback = Callable[[int, Mapping[str, float]], None]
"""Takes the step and named numbers."""
FALLBACKS = ("bf16", "fp32")
HISTORY = 16
"""Steps whose largest magnitudes are kept."""
SHARE = 32
"""One product in so many measures its noise in a step, in turn."""
NOISY = 1 / math.sqrt(3)
"""A gradient with more noise than this does not point downhill any more (arXiv 2505.19115)."""
LOST = 0.05
"""Share of a product's values that may be rounded to zero."""
ABOVE, PATIENCE = 1.25, 3
"""A product is promoted when the estimated error stays above this much of the budget for so many steps."""
BELOW, CALM = 0.7, 500
"""One is demoted after so many calm steps, if the estimate stays below this much of the budget then."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What a rule sees of one layer at the last step that was read; NaN where nothing was measured yet."""

    name: str
    formats: Mapping[Role, str]
    gradient_norm: float
    """Of the weight's gradient."""
    noise: float
    """The largest relative error of its products."""
    largest: float
    """The largest magnitude that was rounded in the last steps."""
    lost: float
    """The largest share of values that were rounded to zero."""
    finite: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """Switch roles of a layer to a format when something holds, and back to what was planned when it has not for a while."""

    holds: Callable[[Layer], bool]
    format: str
    roles: tuple[Role, ...]
    name: str


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a compiled graph."""

    site: str
    layer: str
    role: Role
    formats: tuple[str, ...]
    """What it can switch between, the planned one first."""
    error: float
    """Gradient error that the plan predicted."""
    seconds: float


def choices(format: str) -> tuple[str, ...]:
    """What a product planned in a format can switch between."""
    if FORMATS[format].nbytes == 4:
        return tuple(dict.fromkeys((format, "fp32")))
    return tuple(dict.fromkeys((format, *FALLBACKS)))


def planned_error(plan: PrecisionPlan | None, site: str) -> tuple[float, float]:
    """Error and seconds that a plan predicts of a product."""
    found = next((c for c in plan.choices if c.site == site), None) if plan is not None else None
    return (found.error, found.seconds) if found is not None else (0.0, 0.0)


def slot_name(site: str) -> str:
    return f"precision.{site}.slot"


def seen_name(site: str) -> str:
    return f"precision.{site}.seen"
