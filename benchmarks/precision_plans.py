"""Plans of formats: predicted against measured errors, plans for budgets on the batch of the calibration and on others."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from common import table
from precision_models import MODELS, SCALE, joint, measured, text_batches, trained, with_outliers

import dsc
from dsc import target as targets
from dsc.passes.precision_calibrate import Calibration, calibrate
from dsc.passes.precision_measure import Measured
from dsc.passes.precision_plan import choose, plan
from dsc.passes.precision_sites import extract
from dsc.passes.precision_time import BANDWIDTH_SHARE, PEAK_SHARE, SCALED_SHARE, seconds
from dsc.precision.formats import FORMATS

BUDGETS = (0.01, 0.02)


def plans(settings: argparse.Namespace) -> dict[str, Any]:
    print(
        f"modelled: {PEAK_SHARE:.0%} of the peak of products, {SCALED_SHARE:.0%} of that where they scale, "
        f"{BANDWIDTH_SHARE:.0%} of the bandwidth; sides times {SCALE:.0f}\n"
    )
    out: dict[str, Any] = {}
    for outliers, name in itertools.product((False, True), MODELS):
        rows = []
        title = f"{name}{', outliers' if outliers else ''}"
        if settings.only and title not in settings.only:
            continue
        model = trained(name, settings.train)
        model = with_outliers(model) if outliers else model
        drawn = text_batches(seed=5)
        inputs = next(drawn)
        ear = joint(model, inputs)
        sites = extract(ear.graph[0])
        found = calibrate(measured(ear, sites, inputs, inputs), sites, targets.find("h100"), scale=SCALE)
        probes = found.measured.backwards - 1
        others = [measured(ear, sites, inputs, next(drawn)) for _ in range(3)]
        pearson, ratio, spread = additivity(found, settings.random)
        out[title] = {"products": len(sites), "probes": probes, "pearson": pearson, "measured / predicted": ratio}
        print(f"{title}: {len(sites)} products, {probes} probes; {settings.random} random plans: Pearson {pearson:.3f}, "
              f"measured / predicted {ratio:.3f} +- {spread:.3f}")  # fmt: skip
        for target in ("h100", "a100"):
            for budget in BUDGETS:
                rows.append(budget_row(title, found, target, budget, others))
                out[title][f"{target} {budget}"] = dict(zip(HEAD[1:], rows[-1][1:]))
        out[title]["equal time"] = equal_time(title, found)
        print(table(HEAD, rows), flush=True)
        print()
    return out


HEAD = (
    "model",
    "target",
    "budget",
    "speed-up",
    "predicted",
    "measured",
    "of budget",
    "held-out, worst",
    "probes",
    "formats",
)


def additivity(found: Calibration, count: int) -> tuple[float, float, float]:
    """Random plans, each of a palette of its own: correlation of predicted with measured errors; mean and spread of ratios.

    With one palette for all, plans of many products would err alike, and there would be nothing to correlate.
    """
    draw = random.Random(0)
    pairs = []
    for _ in range(count):
        palette = draw.sample(found.candidates, draw.randint(1, 4))
        formats = {
            s.name: draw.choice([f for f in palette if f in found.legal(s)] or found.legal(s)) for s in found.sites
        }
        pairs.append((found.predicted(formats), found.measured.error(formats)))
    predicted, seen = zip(*pairs)
    ratios = [b / a for a, b in pairs]
    return statistics.correlation(predicted, seen), statistics.mean(ratios), statistics.stdev(ratios)


def budget_row(
    title: str, found: Calibration, target: str, budget: float, others: Sequence[Measured]
) -> tuple[object, ...]:
    own = Calibration(
        found.measured,
        found.sites,
        targets.find(target),
        candidates(found, target),
        SCALE,
        dict(found.errors),
        found.growth,
    )
    try:
        made = plan(own, budget)
    except dsc.DscError:
        return (title, target, budget, None, None, None, None, None, None, "none fits")
    formats = {c.site: FORMATS[c.format] for c in made.choices}
    held = max(o.error(formats) for o in others)
    counts = ", ".join(f"{n} {f}" for f, n in Counter(c.format for c in made.choices).most_common())
    error = made.measured or 0.0
    return (
        title, target, budget, f"{made.speedup:.3f}x", f"{made.predicted:.4f}", f"{error:.4f}",
        f"{error / budget:.2f}", f"{held / budget:.2f}", made.probes, counts,
    )  # fmt: skip


def candidates(found: Calibration, target: str) -> tuple[Any, ...]:
    peak = targets.find(target).peak
    return tuple(f for f in found.candidates if f.rate in peak)


def equal_time(title: str, found: Calibration) -> dict[str, float]:
    """The least error that a plan has in the time of uniform e4m3 by rows, against that one's error."""
    h100 = targets.find("h100")
    uniform = {s.name: FORMATS["bf16" if s.last else "fp8-rowwise"] for s in found.sites}
    limit, error = seconds(found.sites, uniform, h100, SCALE), found.measured.error(uniform)
    low, high = 0.0, error
    for _ in range(12):
        middle = (low + high) / 2
        try:
            fits = seconds(found.sites, choose(found, middle), h100, SCALE) <= limit
        except dsc.DscError:
            fits = False
        low, high = (low, middle) if fits else (middle, high)
    chosen = choose(found, high)
    ours, mine = found.measured.error(chosen), seconds(found.sites, chosen, h100, SCALE)
    bf16 = seconds(found.sites, {}, h100, SCALE)
    print(f"  uniform e4m3 by rows: {bf16 / limit:.3f}x, error {error:.4f}; a plan in no more time: "
          f"{bf16 / mine:.3f}x, error {ours:.4f}, {ours / error:.2f} of it")  # fmt: skip
    return {"uniform error": error, "plan error": ours, "ratio": ours / error, "uniform speed-up": bf16 / limit}
