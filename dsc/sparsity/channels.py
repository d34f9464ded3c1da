"""Whole channels and heads taken out of a model: gates first, step by step, then smaller shapes at an explicit call.

Channels are the hidden ones of an MLP: outputs of its first linear layers and inputs of its last.  Heads are those of an
attention module with linear layers ``qkv`` or ``q``, ``k``, ``v``, and ``out``, and an attribute ``heads``.  A gate is
a buffer of zeros and ones on the last layer, which multiplies its input: gated and compact models compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dsc.errors import CannotPrune

GATE = "_dsc_gate"
SMOOTH = 0.9
"""How much of a running mean of scores stays at each observation."""


@dataclass(frozen=True)
class Site:
    """Channels or heads that can go."""

    name: str
    """Of the layer that reads them."""
    kind: Literal["mlp", "heads"]
    owner: nn.Module
    producers: tuple[str, ...]
    """Children of ``owner`` that make them, with ``qkv`` for three at once."""
    consumer: nn.Linear
    count: int
    score: Tensor
    """[count] float32: what each is worth, a running mean of squares."""

    @property
    def gate(self) -> Tensor:
        """[count]: 1 where it stays."""
        found: Tensor = getattr(self.consumer, GATE)
        return found


@dataclass(frozen=True)
class Channels:
    """All gates of a model."""

    sites: tuple[Site, ...]

    def observe(self) -> None:
        """After a backward: what each channel or head is worth, the square of its gradient times its value.

        The derivative of the loss by the gate at 1 is the sum over the weights that read it of weight times gradient
        (Molchanov et al., "Importance Estimation for Neural Network Pruning", 2019).
        """
        for site in self.sites:
            weight = site.consumer.weight
            if weight.grad is None:
                continue
            with torch.no_grad():
                each = (weight * weight.grad).sum(0).view(site.count, -1).sum(1)
                site.score.mul_(SMOOTH).add_(each.square().to(site.score), alpha=1 - SMOOTH)

    def prune(self, share: float, kind: Literal["mlp", "heads"]) -> int:
        """Close the gates of the least ``share`` of all channels or heads of a kind; the number that is closed.

        At least one of each layer stays.  Closed gates open again where others are worth less by now.
        """
        sites = [s for s in self.sites if s.kind == kind]
        every = torch.cat([s.score / s.score.sum().clamp_min(1e-30) for s in sites]) if sites else torch.empty(0)
        limit = (
            every.sort().values[int(share * len(every))] if int(share * len(every)) < len(every) else every.max() + 1
        )
        for site in sites:
            keep = site.score / site.score.sum().clamp_min(1e-30) >= limit
            keep[site.score.argmax()] = True
            site.gate.copy_(keep)
        return sum(int((s.gate == 0).sum()) for s in sites)

    def progress(self, step: int, steps: int, share: float) -> None:
        """At step ``step`` of ``steps``: MLP channels in the first half, heads in the second, at a cubic pace.

        The pace is Zhu and Gupta's, "To prune, or not to prune", 2017.
        """
        half = steps / 2
        for kind, done in (("mlp", step / half), ("heads", (step - half) / half)):
            if done > 0:
                self.prune(share * (1 - (1 - min(done, 1.0)) ** 3), kind)  # type: ignore[arg-type]


def gate(model: nn.Module) -> Channels:
    """Put gates, all open, on every MLP and attention of the model that can be compacted.  Before it is compiled.

    Raises:
        CannotPrune: there is none.
    """
    sites = tuple(_sites(model))
    if not sites:
        raise CannotPrune(type(model).__name__, "no MLP and no attention of a known form is in it")
    for site in sites:
        weight = site.consumer.weight
        site.consumer.register_buffer(GATE, torch.ones(site.count, device=weight.device), persistent=False)
        site.consumer.register_forward_pre_hook(_gated)
    return Channels(sites)


def _gated(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, found = inputs[0], getattr(module, GATE)
    return (x * found.repeat_interleave(x.shape[-1] // found.shape[0]).to(x.dtype), *inputs[1:])


def _sites(model: nn.Module) -> Iterator[Site]:
    for name, module in model.named_modules():
        children = {n: c for n, c in module.named_children() if type(c) is nn.Linear}
        prefix = f"{name}." if name else ""
        if "heads" in vars(module):
            yield from _heads(prefix, module, children)
            children = {n: c for n, c in children.items() if n not in ("qkv", "q", "k", "v", "out")}
        yield from _mlp(prefix, module, children)


def _heads(prefix: str, module: nn.Module, children: dict[str, nn.Linear]) -> Iterator[Site]:
    makers = ("qkv",) if "qkv" in children else ("q", "k", "v")
    out, count = children.get("out"), int(vars(module)["heads"])
    if out is None or any(n not in children for n in makers) or count < 2 or out.in_features % count:
        return
    if sum(children[n].out_features for n in makers) == 3 * out.in_features:  # as many heads of keys as of queries
        yield Site(f"{prefix}out", "heads", module, makers, out, count, torch.zeros(count, device=out.weight.device))


def _mlp(prefix: str, module: nn.Module, children: dict[str, nn.Linear]) -> Iterator[Site]:
    before: list[tuple[str, nn.Linear]] = []
    for name, last in children.items():
        sizes = (last.out_features, last.in_features)
        makers = tuple(n for n, c in before if (c.in_features, c.out_features) == sizes and sizes[0] != sizes[1])
        before.append((name, last))
        if makers:
            count = last.in_features
            yield Site(
                f"{prefix}{name}", "mlp", module, makers, last, count, torch.zeros(count, device=last.weight.device)
            )


def compact(channels: Channels) -> int:
    """Cut what closed gates hold back out of the model, in place, and take the gates off; the parameters that are gone.

    Parameters are new tensors afterwards: make optimizers anew.  Compiled models are compiled again at the next call.
    """
    gone = 0
    for site in channels.sites:
        keep = site.gate.nonzero().squeeze(1)
        for name in site.producers:
            linear = getattr(site.owner, name)
            parts = 3 if name == "qkv" else 1
            rows = _wide(keep, site.count, linear.out_features // parts)
            rows = torch.cat([rows + i * (linear.out_features // parts) for i in range(parts)])
            gone += _cut(linear, rows, 0)
        gone += _cut(site.consumer, _wide(keep, site.count, site.consumer.in_features), 1)
        if site.kind == "heads":
            vars(site.owner)["heads"] = len(keep)
        delattr(site.consumer, GATE)
        for key, hook in list(site.consumer._forward_pre_hooks.items()):
            if hook is _gated:
                del site.consumer._forward_pre_hooks[key]
    return gone


def _wide(keep: Tensor, count: int, width: int) -> Tensor:
    """Places of all features of the channels or heads that stay."""
    size = width // count
    return (keep[:, None] * size + torch.arange(size, device=keep.device)).flatten()


def _cut(linear: nn.Linear, keep: Tensor, dim: int) -> int:
    before = sum(p.numel() for p in linear.parameters())
    linear.weight = nn.Parameter(linear.weight.detach().index_select(dim, keep), linear.weight.requires_grad)
    if dim == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach().index_select(0, keep), linear.bias.requires_grad)
    linear.out_features, linear.in_features = linear.weight.shape
    return before - sum(p.numel() for p in linear.parameters())
