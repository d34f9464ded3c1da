"""The models of the benchmarks of formats, trained a little, with outlier channels or without, and their joint graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dsc import compiler
from dsc.debug.demo import batches, stdlib_text
from dsc.manager import Pass, Report
from dsc.models import gpt, llama
from dsc.passes.precision_measure import Measured
from dsc.passes.precision_sites import Site
from dsc.watch import Watcher

SCALE = 32.0
"""Of every side of a product, when its time is modelled."""
LENGTH, BATCH = 64, 8
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: gpt.GPT(gpt.Config(128, LENGTH, 2, 4, 128)),
    "LLaMA": lambda: llama.Llama(llama.Config(128, LENGTH, 2, 4, 2, 128, 384)),
}


@dataclass
class Ear(Watcher):
    """Keeps the joint graph, after canonicalize, and what it is called with."""

    graph: list[GraphModule] = field(default_factory=list)
    inputs: list[object] = field(default_factory=list)

    def captured(self, gm: GraphModule, inputs: Sequence[object]) -> Watcher:
        self.inputs = list(inputs)
        return self

    def after(self, stage: str, p: Pass, gm: GraphModule, report: Report, seconds: float) -> None:
        if stage == "joint" and p.name == "canonicalize":
            self.graph.append(compiler.copied(gm))


def text_batches(batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    return batches(stdlib_text(2_000_000), batch, length, seed)


def trained(name: str, steps: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for inputs in itertools.islice(text_batches(seed=seed), steps):
        optimizer.zero_grad()
        model(*inputs).backward()
        optimizer.step()
    return model


def with_outliers(model: nn.Module, factor: float = 40.0, count: int = 3) -> nn.Module:
    """The same function with large channels between norms and the layers that read them, as large models have."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in model.blocks:  # type: ignore[union-attr]
            attention, feedforward = block.attention, block.feedforward
            readers = [getattr(attention, n) for n in ("qkv", "q", "k", "v") if hasattr(attention, n)]
            others = [getattr(feedforward, n) for n in ("gate", "up") if hasattr(feedforward, n)]
            for norm, layers in ((block.norm1, readers), (block.norm2, others)):
                channels = torch.randperm(norm.weight.numel(), generator=generator)[:count]
                norm.weight[channels] *= factor
                if getattr(norm, "bias", None) is not None:
                    norm.bias[channels] *= factor
                for layer in layers:
                    layer.weight[:, channels] /= factor
    return model


def joint(model: nn.Module, inputs: tuple[Tensor, ...]) -> Ear:
    torch._dynamo.reset()
    ear = Ear()
    torch.compile(model, backend="dsc", options={"watchers": [ear], "emit": "aten"})(*inputs)
    return ear


def measured(ear: Ear, sites: Sequence[Site], old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> Measured:
    """The graph on another batch."""
    swap = {id(a): b for a, b in zip(old, new)}
    return Measured(ear.graph[0], sites, [swap.get(id(x), x) for x in ear.inputs])
