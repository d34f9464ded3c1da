"""From calibrated errors to a plan: a knapsack under a budget, then a check that it is as predicted.

The plan is measured.  Where it errs more than predicted, halves of its 8-bit products are measured down to the one that
does, and the plan is made anew with what was found.  Where it errs less, the rest of the budget is spent too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from dsc.errors import ErrorBudgetTooSmall
from dsc.passes.precision_calibrate import Calibration
from dsc.passes.precision_halves import halves
from dsc.passes.precision_measure import Measured
from dsc.passes.precision_sites import by_instance
from dsc.passes.precision_time import seconds
from dsc.passes.solve import error_growth
from dsc.passes.solve.precision import Option, solve
from dsc.precision.formats import Format
from dsc.precision.plan import Choice, PrecisionPlan

AIM = 1.0
"""Share of the budget that a plan may use on the batch and on each of its halves, of which the worse one errs more than
most other batches do."""
SPENT = 0.95
"""Share from which on the rest is not worth another try."""
SUSPECT = 1.15
"""A product, or half of a plan, that errs by this much more than predicted is looked into."""
EXTRA = 20
"""Backward passes that checking and repairing a plan may take."""
LOOSER = 3
"""How often a plan may be made anew because it errs less than it may."""


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
            options.append(Option(cost, sum(found.errors[n, f.name] ** 2 for n, f in given.items())))
            formats.append(given)
        groups.append(options)
        choices.append(formats)
    places = solve(groups, error_growth.quadrature(budget, found.growth) ** 2)
    if places is None:
        least = error_growth.total((math.sqrt(min(o.weight for o in g)) for g in groups), found.growth)
        raise ErrorBudgetTooSmall(budget, least)
    return {name: f for k, options in zip(places, choices) for name, f in options[k].items()}


def plan(found: Calibration, budget: float) -> PrecisionPlan:
    """The plan for a budget, measured, and repaired or loosened with at most ``EXTRA`` backward passes.

    Raises:
        ErrorBudgetTooSmall: no choice of the candidates keeps it.
    """
    check, limit, aim, again = Check(found), AIM * budget, AIM * budget, 0
    try:
        formats = choose(found, limit)
    except ErrorBudgetTooSmall:
        formats = choose(found, budget)
    best: tuple[dict[str, Format], float] | None = None
    """The fastest that keeps the budget, and the limit that it was chosen for."""
    while True:
        error = check.worst(formats, aim)
        if error <= aim and (best is None or _time(found, formats) <= _time(found, best[0])):
            best = formats, limit
        if check.left <= check.price or again == LOOSER or SPENT * budget <= error <= aim:
            break
        if best is not None:
            again += 1
            limit = limit * aim / error if error <= aim else (limit + best[1]) / 2
        elif not check.looks_into(formats):
            limit *= min(aim / error, 0.99)  # nothing stands out: everything is a little worse than predicted
        if (other := _other(found, limit, formats, best is None)) is None:
            break
        formats = other
    if best is None and error > aim:  # out of passes: what should err less still
        formats = _other(found, limit * min(aim / error, 0.99), formats, True) or formats
    chosen = best[0] if best is not None else formats
    return described(found, chosen, budget, check.error(chosen), check.probes)


class Check:
    """Measures plans on a batch and on its halves, and counts the backward passes that it takes."""

    def __init__(self, found: Calibration) -> None:
        self.found, self.before = found, found.measured.backwards
        self.halves: tuple[Measured, ...] | None = None
        self.known: dict[tuple[tuple[str, str], ...], float] = {}
        self.looked = False

    @property
    def probes(self) -> int:
        return self.found.measured.backwards - self.before + sum(h.backwards for h in self.halves or ())

    @property
    def left(self) -> int:
        return EXTRA - self.probes

    def error(self, formats: Mapping[str, Format]) -> float:
        """On the batch; measured once."""
        key = tuple(sorted((n, f.name) for n, f in formats.items()))
        if key not in self.known:
            self.known[key] = self.found.measured.error(formats)
        return self.known[key]

    @property
    def price(self) -> int:
        """Passes that a whole check takes."""
        return 1 + len(self.halves or ())

    def worst(self, formats: Mapping[str, Format], limit: float) -> float:
        """The largest on the batch and on its halves; what is above the limit on the batch is not measured on those."""
        error = self.error(formats)
        if error > limit:
            return error
        if self.halves is None:
            self.halves = halves(self.found.measured)
        return max(error, *(h.error(formats) for h in self.halves), 0.0)

    def looks_into(self, formats: Mapping[str, Format]) -> bool:
        """Find the product that errs more than predicted, once, if all together do.  False: it was not found."""
        left = self.left - 2 * self.price
        if self.looked or left < 4 or self.error(formats) <= SUSPECT * self.found.predicted(formats):
            return False
        self.looked = True
        return _look_into(self.found, formats, self.error(formats), left)


def _time(found: Calibration, formats: Mapping[str, Format]) -> float:
    return seconds(found.sites, formats, found.target, found.scale)


def _other(found: Calibration, limit: float, formats: dict[str, Format], tighter: bool) -> dict[str, Format] | None:
    """What is chosen for another limit, and for still tighter ones if that changes nothing; None if there is nothing."""
    while True:
        try:
            other = choose(found, limit)
        except ErrorBudgetTooSmall:
            return None
        if other != formats:
            return other
        if not tighter:
            return None
        limit *= 0.95


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
