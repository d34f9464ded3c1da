"""Give every matrix product a number format: as told by layer and role, or found under a budget of gradient error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from torch.fx import GraphModule, Node

from dsc.errors import BadCalibration, BadPrecisionPlan, NoSuchLayer, NotOnTarget
from dsc.manager import Pass, Remark, Report
from dsc.passes.precision_apply import apply
from dsc.passes.precision_calibrate import calibrate
from dsc.passes.precision_control import apply_switched
from dsc.passes.precision_maxima import find_maxima
from dsc.passes.precision_measure import Measured
from dsc.passes.precision_plan import plan
from dsc.passes.precision_produce import fuse_producers
from dsc.passes.precision_sites import Site, dependent, extract
from dsc.passes.precision_time import available, planned_for, refusal, seconds
from dsc.precision import plan as plans
from dsc.precision.controller import PrecisionController
from dsc.precision.formats import DEFAULT_RECIPE, FORMATS, Format
from dsc.precision.plan import PrecisionPlan
from dsc.precision.request import DEFAULT_BUDGET, Request, matches, parse
from dsc.runtime.state import State
from dsc.target import Target

INSTEAD: Mapping[str, str] = {"fp8": "int8 or bf16", "int8": "bf16", "tf32": "fp32", "bf16": "fp32", "fp16": "fp32"}
UNMEASURED = "an inference graph has no gradient to measure: give formats by layer, or the plan of a training graph"


@dataclass(frozen=True)
class Precision(Pass):
    """On a joint graph: products of matrices, and only they, compute in other formats.

    1. ``format`` is one format for all products; ``given`` a mapping of layer patterns and roles, of which the first
       pattern that matches a layer decides; or a plan.  Products that nothing names stay as they are.
    2. ``auto`` calibrates on ``sample``, the first batch, and takes the fastest formats whose relative gradient error is
       within ``budget``.  ``file``: a plan that lies there is applied unchanged, else the new one is put there.
    3. 16-bit formats and tf32 round the operands; 8-bit ones scale them too, as ``dsc.precision.emulate`` says.  Operands
       are shared between products, 8-bit ones are saved for the backward in place of what they round.
       On a GPU the kernel that rounds also computes the activation or sum before it, if nothing else reads that; the maxima of
       rows and whole matrices are nodes of their own, for the kernel that makes the values (``precision_maxima``).
    4. It must not fire: a product that is in the format already, of another dtype, of batches in 8 bits, or whose shape
       makes 8 bits slower on the target; in 8 bits the layer that feeds the loss, unless it is named.
    5. With a ``controller`` every product that can change its format looks it up when it runs, in the state, and reports
       what it saw there; operands are not shared then.
    6. In inference graphs products are all ``forward``.  A plan is applied there; ``auto`` without one leaves them as
       they are, since there is no gradient to measure.  Under a controller they follow its formats, and report nothing.
    7. Softmax, norms, losses, reductions, attention kernels, convolutions and the optimizer stay as they are.

    Raises:
        NoSuchLayer, NotOnTarget, BadPrecisionPlan, BadCalibration, ErrorBudgetTooSmall: it cannot be done.
    """

    name: ClassVar[str] = "precision"
    gives: ClassVar[frozenset[str]] = frozenset({"precision"})
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"
    on_inference: ClassVar[bool] = True

    format: str = "bf16"
    recipe: str = DEFAULT_RECIPE
    budget: float = DEFAULT_BUDGET
    file: str | None = None
    given: object = None
    sample: tuple[object, ...] | None = field(default=None, repr=False, compare=False)
    controller: PrecisionController | None = field(default=None, repr=False, compare=False)

    def run(self, gm: GraphModule, target: Target) -> Report:
        sites = extract(gm)
        if not sites:
            return Report(False, (Remark("", "skipped", "there is no matrix product"),))
        known = self.known(sites)
        learns = bool(dependent(gm))
        if known is not None:
            formats, remarks = planned(known, sites, target)
        elif self.given is None and self.format == "auto":
            if not learns:
                return Report(False, (Remark("", "skipped", UNMEASURED),))
            known = self.found(gm, sites, target)
            formats, remarks = planned(known, sites, target)
        else:
            formats, remarks = asked(parse(self.given or self.format, self.recipe), sites, target)
        fused: list[Node] = []
        maxima: list[Node] = []
        if self.controller is None:
            apply(gm, sites, formats)
            fused = fuse_producers(gm) if target.kind == "cuda" else []
            maxima = find_maxima(gm, target) if target.kind == "cuda" else []
        else:
            apply_switched(gm, sites, formats, self.controller, known, reports=learns)
        if known is not None and known.measured is not None and known.measured > 1.05 * known.budget > 0:
            above = (
                f"the plan errs by {known.measured:.3g}, above its budget of {known.budget:g}: nothing better was found"
            )
            remarks = (*remarks, Remark("", "skipped", above))
        did = [Remark(s.name, "did", why(s, formats[s.name], known)) for s in sites if s.name in formats]
        did += [
            Remark(n.name, "did", f"rounded where {n.args[1]} computes it, never in 16 bits in memory") for n in fused
        ]
        did += [
            Remark(n.name, "did", f"its scales' maxima are found where {n.args[0]} is made, or in one read of it")
            for n in maxima
        ]
        return Report(bool(formats), (*did, *remarks), numbers(sites, formats, target, known))

    @property
    def state(self) -> State | None:
        """What graphs of this pass read and write between steps."""
        return self.controller.state if self.controller is not None else None

    def known(self, sites: Sequence[Site]) -> PrecisionPlan | None:
        """A plan that was given, or lies in the file and is for these products."""
        if isinstance(self.given, PrecisionPlan):
            return self.given
        if self.file is None or not Path(self.file).exists():
            return None
        found = plans.load(self.file)
        return found if {s.name for s in sites} & set(found.formats()) else None

    def found(self, gm: GraphModule, sites: Sequence[Site], target: Target) -> PrecisionPlan:
        if self.sample is None:
            raise BadCalibration("there is no batch to measure on", "compile a model that is called, or give a plan")
        made = plan(calibrate(Measured(gm, sites, self.sample), sites, target), self.budget)
        if self.file is not None:
            plans.add(Path(self.file), made)
        return made


def asked(request: Request, sites: Sequence[Site], target: Target) -> tuple[dict[str, Format], tuple[Remark, ...]]:
    """Formats by the rules of a request, and a remark for each product that cannot follow its rule."""
    layers = tuple(dict.fromkeys(s.layer for s in sites))
    for rule in request.rules:
        if not any(matches(rule.pattern, layer) for layer in layers):
            raise NoSuchLayer(rule.pattern, layers)
        for f in rule.formats.values():
            check_available(f, target)
    formats, remarks = {}, []
    for s in sites:
        deciding = request.rule(s.layer)
        wanted = deciding.formats.get(s.role) if deciding is not None else None
        if wanted is None:
            continue
        reason = refusal(s, wanted, target)
        if reason is None and wanted.scaled and s.last and request.uniform:
            reason = "it feeds the loss: name the layer to have it in 8 bits"
        if reason is None:
            formats[s.name] = wanted
        else:
            remarks.append(Remark(s.name, "skipped", f"not in {wanted.name}: {reason}"))
    return formats, tuple(remarks)


def planned(plan: PrecisionPlan, sites: Sequence[Site], target: Target) -> tuple[dict[str, Format], tuple[Remark, ...]]:
    """Formats by a plan, which may be that of a model of which this graph is a part."""
    wanted = plan.formats()
    if not {s.name for s in sites} & set(wanted):
        raise BadPrecisionPlan("the option", f"it has none of the products of this graph, such as {sites[0].name!r}")
    formats, remarks = {}, []
    for s in sites:
        if s.name not in wanted:
            remarks.append(Remark(s.name, "skipped", "the plan does not name it"))
            continue
        f = FORMATS[wanted[s.name]]
        check_available(f, target)
        reason = refusal(s, f, target)
        if reason is None:
            formats[s.name] = f
        else:
            remarks.append(Remark(s.name, "skipped", f"not in {f.name}: {reason}"))
    return formats, tuple(remarks)


def check_available(f: Format, target: Target) -> None:
    if not available(f, target):
        raise NotOnTarget(f.name, target.name, INSTEAD[f.rate])


def why(s: Site, f: Format, known: PrecisionPlan | None) -> str:
    """``fp8-blockwise, 8192 x 4096 x 4096: error 0.0021, 41.2 us``."""
    text = f"{f.name}, {f'{s.batch} x ' if s.batch > 1 else ''}{s.m} x {s.n} x {s.k}"
    choice = next((c for c in known.choices if c.site == s.name), None) if known is not None else None
    if choice is None or not choice.seconds:
        return text
    return f"{text}: gradient error {choice.error:.2g}, modelled {choice.seconds * 1e6:.1f} us"


def numbers(
    sites: Sequence[Site], formats: Mapping[str, Format], target: Target, known: PrecisionPlan | None
) -> tuple[tuple[str, float], ...]:
    planned = planned_for(target)
    found = [(f"products in {name}", float(n)) for name, n in sorted(Counter(f.name for f in formats.values()).items())]
    found.append(("products left", float(len(sites) - len(formats))))
    found.append(("modelled seconds in bf16", seconds(sites, {}, planned)))
    found.append(("modelled seconds", seconds(sites, formats, planned)))
    if known is not None:
        found.append(("predicted error", known.predicted))
        found += [("measured error", known.measured)] if known.measured is not None else []
    return tuple(found)
