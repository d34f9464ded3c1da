"""How much the gradient changes when products of a joint graph are rounded: measured, on real numbers.

The graph runs once in its own precision; every value is kept.  A question then runs only what depends on the products
that it rounds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsc import ops
from dsc.errors import BadCalibration
from dsc.passes.precision_apply import DTYPES
from dsc.passes.precision_sites import Operand, Site, dependent
from dsc.passes.precision_time import grain
from dsc.precision import emulate
from dsc.precision.formats import Format, dtype_of
from dsc.torch_shim import optimization_hint, unset_fake_temporarily

ROWS = 256
"""Rows of a result on which the noise of a format is measured."""


class Measured:
    """A joint graph and what it computes on one batch.

    ``inputs`` are what the graph takes, tangents aside.  A loss (one number) gets a tangent of 1, other results get
    normal ones, since what stands behind them is not known here.

    Raises:
        BadCalibration: inputs that do not fit, a gradient that is not finite, or none at all.
    """

    def __init__(self, gm: GraphModule, sites: Sequence[Site], inputs: Sequence[object]) -> None:
        self.gm, self.sites = gm, {s.name: s for s in sites}
        self.by_node = {s.node: s for s in sites}
        self.behind = dependent(gm)
        self.gradients_of = {s.instance: o.base for s in sites for o in (s.left, s.right) if o.gradient}
        """Of the results of layers, by the layer's call: what its products of the backward read."""
        self._largest: dict[str, float] = {}
        self.backwards = 0
        """How often the backward ran, the first time included."""
        self.values: dict[Node, Any] = {}
        self.data: list[Node] = []
        """Inputs that are not trained."""
        with reality():
            self._bind(inputs)
            self._run({}, self.values)
            self.gradient = self._gradients(self.values)
            self.norm = float(norm(self.gradient))
        if not math.isfinite(self.norm):
            raise BadCalibration("the gradient is not finite", "give a batch whose loss and gradient are finite")
        if self.norm == 0:
            raise BadCalibration("the gradient is zero", "give a batch that the model can learn from")

    def error(self, formats: Mapping[str, Format]) -> float:
        """Relative change of the gradient of all parameters, if products have these formats."""
        with reality():
            changed: dict[Node, Any] = {}
            self._run(formats, changed)
            differences = [a.float() - b.float() for a, b in zip(self._gradients(changed), self.gradient)]
            return float(norm(differences)) / self.norm

    def noise(self, site: Site, f: Format) -> float:
        """Relative change of one product's own result, on some of its rows.

        Of a layer's forward it is the geometric mean of that and of the same weighted, element by element, by the
        gradient of the result: noise where the loss does not look does little harm, but the loss may look there then.
        """
        with reality():
            a, b = (self._side(o) for o in (site.left, site.right))
            if a.dim() == 3:
                exact, got = a.float() @ b.float(), self._product(site, f, self.values)
            else:
                step = max(1, a.shape[0] // ROWS)
                exact = a[::step].float() @ b.float().t()
                got = rounded_product(a, b, site, f, step)
            difference = got.float() - exact
            plain = float(difference.norm() / exact.norm().clamp_min(1e-30))
            behind = self.values.get(self.gradients_of[site.instance]) if site.instance in self.gradients_of else None
            if site.role != "forward" or behind is None or behind.shape != (a.shape[0], b.shape[0]) or a.dim() == 3:
                return plain
            weight = behind[::step].float()
            return math.sqrt(plain * float((difference * weight).norm() / (exact * weight).norm().clamp_min(1e-30)))

    def largest(self, site: Site) -> float:
        """The largest magnitude among a product's operands and results."""
        if site.name not in self._largest:
            with reality():
                own = (self._side(site.left), self._side(site.right), self.values[site.node])
                self._largest[site.name] = max(float(x.abs().max()) if x.numel() else 0.0 for x in own)
        return self._largest[site.name]

    def share(self, site: Site) -> float:
        """Norm of a product's result as a part of the gradient's."""
        with reality():
            value: Tensor = self.values[site.node]
            return float(value.float().norm()) / self.norm

    def _bind(self, inputs: Sequence[object]) -> None:
        places = self.gm.graph.find_nodes(op="placeholder")
        given = iter(inputs)
        generator = torch.Generator().manual_seed(0)
        for n in places:
            if ops.is_tangent(n):
                self.values[n] = tangent(n, generator)
                continue
            value, want = next(given, None), n.meta.get("val")
            if isinstance(want, Tensor) and not _fits(value, want):
                raise BadCalibration(f"input {n.name} is not what the graph takes", "name the formats by layer instead")
            self.values[n] = value.detach() if isinstance(value, Tensor) else value
            if not (isinstance(value, Tensor) and value.requires_grad):
                self.data.append(n)

    def _run(self, formats: Mapping[str, Format], values: dict[Node, Any]) -> None:
        """Run what depends on products with a format; into an empty dict of all values: everything."""
        whole = values is self.values
        self.backwards += 1
        for n in self.gm.graph.nodes:
            if n.op == "get_attr" and whole:
                values[n] = operator.attrgetter(str(n.target))(self.gm)
            if n.op != "call_function":
                continue
            site = self.by_node.get(n)
            f = formats.get(site.name) if site is not None else None
            if f is None and not whole and (not any(a in values for a in n.all_input_nodes) or keeps(n)):
                continue
            if f is not None and site is not None:
                values[n] = self._product(site, f, values)
                continue
            known = {a: values[a] if a in values else self.values[a] for a in n.all_input_nodes}
            args, kwargs = torch.fx.map_arg((n.args, n.kwargs), known.__getitem__)
            values[n] = n.target(*args, **kwargs)

    def _product(self, site: Site, f: Format, values: Mapping[Node, Any]) -> Tensor:
        a, b = (self._side(o, values) for o in (site.left, site.right))
        out = ops.tensor(site.node).dtype
        if a.dim() == 3:
            result = batched(a, b, f).to(out)
        else:
            result = rounded_product(a, b, site, f).to(out)
        if site.bias is not None:
            bias = site.bias
            result = result + (values[bias] if bias in values else self.values[bias])
        return result

    def _side(self, o: Operand, values: Mapping[Node, Any] | None = None) -> Tensor:
        """One side of a product as a matrix whose rows run along the contraction."""
        x: Tensor = values[o.base] if values is not None and o.base in values else self.values[o.base]
        return x.t() if o.turned else x

    def _gradients(self, values: Mapping[Node, Any]) -> list[Tensor]:
        results = self.gm.graph.output_node().args[0]
        assert isinstance(results, (list, tuple))
        wanted = [n for n in results if isinstance(n, Node) and n in self.behind and isinstance(ops.value(n), Tensor)]
        return [values[n] if n in values else self.values[n] for n in wanted]


def rounded_product(a: Tensor, b: Tensor, site: Site, f: Format, step: int = 1) -> Tensor:
    """``a`` [M, K] times the transpose of ``b`` [N, K] in a format; with ``step`` every so many rows of it."""
    if not f.scaled:
        return _cast(a, b.t(), f, step)
    (qa, sa), (qb, sb) = (
        emulate.quantise(x, dtype_of(f, o.gradient), grain(o, f)) for x, o in ((a, site.left), (b, site.right))
    )
    if step > 1:
        whole = (emulate.spread(sa, qa.shape, grain(site.left, f)) if sa.dim() else sa).expand(qa.shape)[::step]
        return ((qa[::step].float() * whole) @ emulate.dequantise(qb, sb).t()).to(_wide(site))
    return emulate.mm8(qa, sa, qb, sb, _wide(site))


def batched(a: Tensor, b: Tensor, f: Format) -> Tensor:
    return _cast(a, b, f, 1)


def _cast(a: Tensor, b: Tensor, f: Format, step: int) -> Tensor:
    a = a[::step]
    if f.name == "tf32":
        return emulate.round_tf32(a.float()) @ emulate.round_tf32(b.float())
    dtype = DTYPES[f.name]
    return a.to(dtype) @ b.to(dtype)


def _wide(site: Site) -> torch.dtype:
    return torch.float16 if ops.tensor(site.node).dtype == torch.float16 else torch.bfloat16


def keeps(n: Node) -> bool:
    """Calls that give what they gave: random numbers do not change because a value did, and writes are not repeated."""
    return ops.info(n).kind == "random" or bool(ops.mutated(n))


def tangent(n: Node, generator: torch.Generator) -> Tensor:
    shown = ops.tensor(n)
    if shown.dim() == 0:
        return torch.ones((), dtype=shown.dtype, device=shown.device)
    drawn = torch.randn([int(optimization_hint(s)) for s in shown.shape], generator=generator)
    return drawn.to(shown.device, shown.dtype)


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Of all of them as one vector."""
    return torch.stack([t.float().pow(2).sum() for t in tensors] or [torch.zeros(())]).sum().sqrt()


@contextmanager
def reality() -> Iterator[None]:
    """Real numbers, though a compiler is at work around us: no fake tensors, no gradients, no autocast."""
    with unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _fits(value: object, want: Tensor) -> bool:
    if (
        not isinstance(value, Tensor)
        or value.device.type != want.device.type
        or value.dtype != want.dtype
        or value.dim() != want.dim()
    ):
        return False
    return all(not isinstance(w, int) or v == w for v, w in zip(value.shape, want.shape))
