"""N:M sparse weights in training: which layers, by what masks, and whether it pays."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, get_args

import torch
from torch.fx import GraphModule

from dsc import cost, ops
from dsc.errors import BadOption
from dsc.manager import Pass, Remark, Report
from dsc.passes import linears, sparsify_apply
from dsc.passes.linears import Linear
from dsc.passes.sparsify_cost import Measure, Times, times
from dsc.runtime.state import State
from dsc.target import Target
from dsc.torch_shim import optimization_hint

Importance = Literal["magnitude", "wanda", "fisher", "taylor", "hessian"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MLP, ALL = "mlp", "all"
DECAY = 2e-4


@dataclass(frozen=True)
class Sparsify(Pass):
    """On a joint graph: ``y = x @ W.T`` -> ``y = x @ (mask * W).T``, with masks made in the graph, at every step.

    1. A layer is an ``nn.Linear`` of float32, bfloat16 or float16 whose name is chosen by ``layers``: names with ``*``,
       ``mlp`` (layers joined to another by pointwise operators that are not linear), or ``all``.
    2. The mask keeps the N largest scores of every M along the inputs.  Scores are ``|w|``; with statistics from earlier
       steps |w| times the norm of the input column (``wanda``), w^2 E[g^2] (``fisher``), |w E[g]| (``taylor``), or
       w^2 h with h from ``dsc.sparsity.estimate_hessian`` (``hessian``).  ``transposable``: 2:4 along rows and columns
       at once, the best of the 90 patterns of each 4 x 4 tile.
    3. Forward and input gradient use the masked weight; the weight's gradient is that of the masked weight, passed
       straight through, plus ``decay * (1 - mask) * W`` (SR-STE, Zhou et al. 2021, on gradients as Hu et al. 2024).
       The mask of a step is handed to its backward as a saved value: it cannot be another one.
    4. In the state, to be changed at any time without compiling again: ``sparsity.decay``, ``sparsity.gate``,
       ``sparsity.dense_from`` (a step; -1 is never), and for each layer ``keep`` (N; M is dense).  There too: each
       layer's ``mask``, ``stats`` and ``scale``, and ``sparsity.step``.
    5. On a CPU, the products of the backward skip rows of the gradient whose largest element is at most ``gate`` times
       the root mean square of those: 0 skips rows of zeros alone, which changes nothing.
    6. On a GPU target and with ``never_slower``, a layer stays dense where its products, with packing, take no less time
       sparse: by measurement where the GPU is here, by the cost model where it is not.
    7. Does not fire: weights that are frozen, tied, or shared by layers; other dtypes; shapes that M does not divide;
       layers that are not chosen.  Each leaves a Remark.

    An inference graph gets the masks of its weights, or those of the state where they are not made at every step.
    """

    name: ClassVar[str] = "sparsify"
    gives: ClassVar[frozenset[str]] = frozenset({"sparsity"})
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"
    on_inference: ClassVar[bool] = True

    pattern: str = "2:4"
    layers: tuple[str, ...] = (MLP,)
    importance: Importance = "magnitude"
    transposable: bool = False
    refresh: int = 1
    """Steps between new masks."""
    decay: float = DECAY
    dense_tail: int | None = None
    """The step from which on all layers are dense."""
    density: float | None = None
    """Share of the layers' work to keep, spread by ``dsc.sparsity.balance``; None is N over M."""
    balance_entropy: float | None = None
    """How evenly: 1 is all alike; None is 0.9."""
    gate_threshold: float = 0.0
    never_slower: bool = True
    state: State = field(default_factory=State, compare=False, repr=False)
    measure: Measure | None = field(default=None, compare=False, repr=False)
    """Times products on the GPU, if it is here; None: the model decides alone."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def nm(self) -> tuple[int, int]:
        n, m = self.pattern.split(":")
        return int(n), int(m)

    @property
    def balanced(self) -> bool:
        """Whether layers may differ in density, so that what each is worth is measured."""
        return self.density is not None or self.balance_entropy is not None

    def run(self, gm: GraphModule, target: Target) -> Report:
        found, refused = linears.find(gm)
        remarks = [Remark(r.layer, "skipped", r.why) for r in refused]
        chosen: list[tuple[Linear, Times]] = []
        for x in found:
            why = self.refuses(x) or self.slower(x, target)
            if isinstance(why, str):
                remarks.append(Remark(x.layer, "skipped", why))
            else:
                chosen.append((x, why))
        before = [cost.flops(n) for n in gm.graph.nodes if cost.unit(n) == "matmul" and n.op == "call_function"]
        for x, how in chosen:
            remarks.append(Remark(x.layer, "did", self.said(x, how, target)))
        sparse = sparsify_apply.apply(gm, self, chosen, target) if chosen else 0.0
        numbers = (
            ("linear layers", float(len(found) + len(refused))),
            ("sparse layers", float(len(chosen))),
            ("matmul flops", float(sum(before))),
            ("sparse flops", sparse),
        )
        if chosen:
            self.tell(float(sum(before)), sparse)
        return Report(bool(chosen), tuple(remarks), numbers)

    def tell(self, total: float, sparse: float) -> None:
        """Leave the operations of a step in the state, for the telemetry."""
        work = self.state.put("sparsity.flops", lambda: torch.zeros(2, dtype=torch.float64))
        sparsify_apply.fill(work, [total, sparse])

    def refuses(self, x: Linear) -> str | None:
        """Why a layer is not for this pass, in a few words."""
        m = self.nm[1]
        _, rows, columns = x.shape
        dtype = ops.tensor(x.weight).dtype
        if not self.selects(x):
            return f"it is not chosen by layers={' '.join(self.layers)}"
        if dtype not in DTYPES:
            return f"its weight is {str(dtype).removeprefix('torch.')}"
        if columns % m:
            return f"its {columns} inputs are no multiple of {m}"
        if self.transposable and rows % m:
            return f"its {rows} outputs are no multiple of {m}"
        if x.gradient is not None and x.wgrad is None:
            return "its gradient is no product"
        return None

    def selects(self, x: Linear) -> bool:
        return any(p == ALL or (p == MLP and x.hidden) or fnmatchcase(x.layer, p) for p in self.layers)

    def slower(self, x: Linear, target: Target) -> str | Times:
        """The times of a layer, or why it stays dense."""
        found = times(x, self.nm, self.transposable, target, self.measure)
        if target.kind == "cpu" or not self.never_slower or found.sparse < found.dense:
            return found
        return (
            f"dense is as fast on {target.name}: {found.dense * 1e6:.1f} us a step, sparse {found.sparse * 1e6:.1f} us"
        )

    def said(self, x: Linear, how: Times, target: Target) -> str:
        m, n, k = x.shape
        shape = f"{self.pattern} of [{n}, {k}] for {optimization_hint(m)} rows"
        if target.kind == "cpu":
            return f"{shape}: masked, products of the CPU are dense"
        known = "modelled" if self.measure is None else "measured"
        return (
            f"{shape}, {how.kernel}: {how.dense * 1e6:.1f} us a step dense, {how.sparse * 1e6:.1f} us sparse ({known})"
        )


def _check(p: Sparsify) -> None:
    """Raise BadOption for a value that makes no sense."""

    def want(name: str, right: bool, expected: str) -> None:
        if not right:
            raise BadOption(f"sparsity.{name}", getattr(p, name), expected)

    form = re.fullmatch(r"([1-9]\d?):([1-9]\d?)", p.pattern) if isinstance(p.pattern, str) else None
    want("pattern", form is not None and int(form[1]) < int(form[2]) <= 32, "N:M with N < M <= 32, such as '2:4'")
    want("layers", isinstance(p.layers, tuple) and bool(p.layers) and all(isinstance(s, str) for s in p.layers),
         "'mlp', 'all', or names of layers, which may hold *")  # fmt: skip
    want("importance", p.importance in get_args(Importance), f"one of {', '.join(map(repr, get_args(Importance)))}")
    want("transposable", isinstance(p.transposable, bool), "True or False")
    want("transposable", not p.transposable or p.pattern == "2:4", "False, since only 2:4 is searched both ways")
    want("refresh", _whole(p.refresh) and p.refresh >= 1, "a number of steps from 1 on")
    want("decay", _real(p.decay) and p.decay >= 0, "a number from 0 on")
    want("dense_tail", p.dense_tail is None or (_whole(p.dense_tail) and p.dense_tail >= 0), "a step, or None")
    for name in ("density", "balance_entropy"):
        value = getattr(p, name)
        want(name, value is None or (_real(value) and 0 < value <= 1), "a number above 0, at most 1, or None")
    want("gate_threshold", _real(p.gate_threshold) and 0 <= p.gate_threshold < 1, "a number from 0 to below 1")
    want("never_slower", isinstance(p.never_slower, bool), "True or False")


def _whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _real(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def names(given: Any) -> tuple[str, ...]:
    """``layers`` as a user may write it: a text, or a sequence of them; what is neither is refused later."""
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)
