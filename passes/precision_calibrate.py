"""From one batch to a plan: the error of every format at every product, a knapsack, and a check that it is as predicted.

1. Errors of products add in quadrature, since roundings of different products have nothing to do with each other.
2. A product's error in a format is its own noise there, times how much the gradient amplifies noise at that place.  The
   noise is computed for every format; the amplification is measured once for each product, by a backward pass with that
   product alone rounded.  The product that makes a weight's gradient needs none: its result is the gradient.
3. The plan is measured.  Where it errs more than predicted, halves of its 8-bit products are measured down to the one
   that does, and the plan is made anew with what was found.

Sensitivity by single probes after AMPT (arXiv 2505.13060), which does so for inference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsc.errors import BadCalibration, ErrorBudgetTooSmall
from dsc.passes.precision_measure import Measured
from dsc.passes.precision_sites import Site, by_instance
from dsc.passes.precision_time import available, planned_for, refusal, seconds
from dsc.passes.solve.precision import Option, solve
from dsc.precision.formats import FORMATS, Format
from dsc.precision.plan import Choice, PrecisionPlan
from dsc.target import Target

CANDIDATES = ("tf32", "bf16", *(f for f in FORMATS if FORMATS[f].scaled))
PROBE = FORMATS["int8-blockwise"]
"""The format in which amplification is measured: the one chosen most, and the one whose errors vary most by channel."""
SLACK = 1.05
"""Share of the budget up to which a measured plan is as good as predicted."""
SUSPECT = 1.15
"""A product, or half of a plan, that errs by this much more than predicted is looked into."""
EXTRA = 20
"""Backward passes that checking and repairing a plan may take."""

Errors = dict[tuple[str, str], float]
"""Site and format -> relative error of the gradient."""


@dataclass
class Calibration:
    """What is known of a model on one batch."""

    measured: Measured
    sites: tuple[Site, ...]
    target: Target
    candidates: tuple[Format, ...]
    scale: float = 1.0
    """Of the sides of every product, when times are modelled for larger layers than those that are measured."""
    errors: Errors = field(default_factory=dict)

    def legal(self, site: Site) -> list[Format]:
        """What it may have; of the layer that feeds the loss no 8 bits, whose errors there are not those of noise."""
        formats = [f for f in self.candidates if not (f.scaled and site.last)]
        return [f for f in formats if self.scale != 1.0 or refusal(site, f, self.target) is None] or [FORMATS["bf16"]]

    def predicted(self, formats: Mapping[str, Format]) -> float:
        return math.sqrt(sum(self.errors[name, f.name] ** 2 for name, f in formats.items()))


def calibrate(
    measured: Measured,
    sites: Sequence[Site],
    target: Target,
    candidates: Sequence[str] = CANDIDATES,
    scale: float = 1.0,
) -> Calibration:
    """The error of every candidate at every product.

    Raises:
        BadCalibration: an error that is not finite.
    """
    target = planned_for(target)
    formats = tuple(FORMATS[c] for c in candidates if available(FORMATS[c], target))
    found = Calibration(measured, tuple(sites), target, formats, scale)
    for site in sites:
        legal = found.legal(site)
        probe = PROBE if measured.values[site.node].dim() == 2 else legal[0]
        noise = {f.name: measured.noise(site, f) for f in {*legal, probe}}
        if site.role == "wgrad":
            amplification = measured.share(site)
        else:
            amplification = measured.error({site.name: probe}) / max(noise[probe.name], 1e-30)
        for f in legal:
            found.errors[site.name, f.name] = amplification * noise[f.name]
    if bad := [key for key, e in found.errors.items() if not math.isfinite(e)]:
        raise BadCalibration(f"the error of {bad[0][1]} at {bad[0][0]} is not finite", "give another batch")
    return found


def choose(found: Calibration, budget: float) -> dict[str, Format]:
    """The fastest formats whose predicted error is within the budget.

    Raises:
        ErrorBudgetTooSmall: no choice of the candidates is.
    """
    groups: list[list[Option]] = []
    choices: list[list[dict[str, Format]]] = []
    for _, sites in by_instance(found.sites):
        options, formats = [], []
        for combination in itertools.product(*(found.legal(s) for s in sites)):
            given = {s.name: f for s, f in zip(sites, combination)}
            cost = seconds(sites, given, found.target, found.scale)
            options.append(Option(cost, found.predicted(given) ** 2))
            formats.append(given)
        groups.append(options)
        choices.append(formats)
    places = solve(groups, budget**2)
    if places is None:
        least = math.sqrt(sum(min(o.weight for o in g) for g in groups))
        raise ErrorBudgetTooSmall(budget, least)
    return {name: f for k, options in zip(places, choices) for name, f in options[k].items()}


def plan(found: Calibration, budget: float, verify: bool = True) -> PrecisionPlan:
    """The plan for a budget, measured and repaired."""
    before, limit = found.measured.backwards, budget
    formats = choose(found, limit)
    error: float | None = None
    while verify:
        error = found.measured.error(formats)
        left = EXTRA - (found.measured.backwards - before)
        if error <= SLACK * budget or left <= 0:
            break
        if left < 4 or not _look_into(found, formats, error, left - 2):
            limit *= min(budget / error, 0.99)  # nothing stands out: everything is a little worse than predicted
        formats = choose(found, limit)
    return described(found, formats, budget, error, found.measured.backwards - before)


def _look_into(found: Calibration, formats: Mapping[str, Format], error: float, left: int) -> bool:
    """Halve what errs more than predicted, down to one product, and remember what that one does.  False: none stands out."""
    names = sorted((n for n in formats), key=lambda n: -found.errors[n, formats[n].name])
    while len(names) > 1:
        halves = [names[0::2], names[1::2]]
        worst, excess = None, SUSPECT
        for half in halves:
            if left <= 0:
                return False
            left -= 1
            given = {n: formats[n] for n in half}
            seen = found.measured.error(given)
            if seen / max(found.predicted(given), 1e-30) > excess:
                worst, excess, error = half, seen / max(found.predicted(given), 1e-30), seen
        if worst is None:
            return False
        names = worst
    key = names[0], formats[names[0]].name
    found.errors[key] = max(error, found.errors[key])
    return True


def described(
    found: Calibration, formats: Mapping[str, Format], budget: float, error: float | None, probes: int
) -> PrecisionPlan:
    """Formats as a plan.  What a shared operand costs is counted with the first product that reads it."""
    times, known = {}, 0.0
    for i, site in enumerate(found.sites):
        total = seconds(found.sites[: i + 1], formats, found.target, found.scale)
        times[site.name], known = total - known, total
    choices = tuple(
        Choice(s.name, formats[s.name].name, found.errors[s.name, formats[s.name].name], times[s.name], (s.m, s.n, s.k))
        for s in found.sites
    )
    bf16 = seconds(found.sites, {}, found.target, found.scale)
    return PrecisionPlan(choices, found.target.name, budget, found.predicted(formats), error, probes, bf16)
