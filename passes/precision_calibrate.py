"""From one batch to what every format costs at every product: errors of the gradient, and how they add up.

1. A product's error in a format is its own noise there, times how much the gradient amplifies noise at that place.  The
   noise is computed for every format (``Measured.noise``).  The amplification is measured once for each product, by a
   backward pass with that product alone rounded.  The product that makes a weight's gradient needs none: its result is
   the gradient.
2. Errors of products add in quadrature, since roundings of different products have little to do with each other; large
   ones grow faster (``dsc.passes.solve.error_growth``).
3. Products of one role that read the same values are a little alike, and noise in one format does not hit what noise in
   another hits: two more passes for each format, with all forward products in it and with all ``dgrad`` ones, correct
   the errors of that role and format by one factor.

Sensitivity by single probes after AMPT (arXiv 2505.13060), which does so for inference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsc.errors import BadCalibration
from dsc.passes.precision_measure import Measured
from dsc.passes.precision_sites import Site
from dsc.passes.precision_time import available, dtype_refusal, own, planned_for, refusal
from dsc.passes.solve import error_growth
from dsc.precision.formats import FORMATS, Format, Role
from dsc.target import Target

CANDIDATES = ("tf32", "bf16", "fp16", *(f for f in FORMATS if FORMATS[f].scaled))
PROBE = FORMATS["int8-blockwise"]
"""The format in which amplification is measured: the one chosen most, and the one whose errors vary most by channel."""
CORRECTED: tuple[Role, ...] = ("forward", "dgrad")
"""Roles whose errors are not known exactly from the start."""
HALF_MOST = 65504.0 / 16
"""The largest magnitude that fp16 is trusted with: values grow while a model trains."""

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
    growth: float = 0.0
    """How much faster than in quadrature errors add up."""

    def legal(self, site: Site) -> list[Format]:
        """What it may have.

        1. What it is in: then it stays as it is.
        2. No 8 bits for the layer that feeds the loss, whose errors there are not those of noise.
        3. fp16 where bf16 is less exact and all values are far from its end: in the forward of fp32 models, whose
           gradients may be too small for it.
        """
        formats = [f for f in self.candidates if not (f.scaled and site.last) and self._fits(site, f)]
        return formats or [FORMATS["bf16"]]

    def _fits(self, site: Site, f: Format) -> bool:
        if f.name == own(site):
            return True
        if f.name == "fp16" and (site.role != "forward" or own(site) != "fp32"):
            return False
        if (refusal(site, f, self.target) if self.scale == 1.0 else dtype_refusal(site, f)) is not None:
            return False
        return f.name != "fp16" or self.measured.largest(site) <= HALF_MOST

    def predicted(self, formats: Mapping[str, Format]) -> float:
        """Relative error of the gradient, all products together."""
        return error_growth.total((self.errors[name, f.name] for name, f in formats.items()), self.growth)


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
    correct(found)
    return found


def correct(found: Calibration) -> None:
    """Measure all products of a role in one format, for every format, and scale their errors to fit."""
    uniform: dict[tuple[Role, str], tuple[float, float]] = {}
    for role in CORRECTED:
        for f in found.candidates:
            given = {s.name: f for s in found.sites if s.role == role and (s.name, f.name) in found.errors}
            added = error_growth.total(found.errors[n, f.name] for n in given)
            if len(given) > 1 and added > 0:
                uniform[role, f.name] = added, found.measured.error(given)
    found.growth = error_growth.fitted([pair for (role, _), pair in uniform.items() if role == "forward"])
    roles = {s.name: s.role for s in found.sites}
    for (name, format), error in found.errors.items():
        added, seen = uniform.get((roles[name], format), (0.0, 0.0))
        if added > 0 and math.isfinite(seen) and seen > 0:
            found.errors[name, format] = error * error_growth.quadrature(seen, found.growth) / added
