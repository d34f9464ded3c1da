"""Training under a controller that switches formats: compilations, losses against bf16, a run that stops and goes on."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import table
from precision_models import text_batches
from torch import nn

import dsc
from dsc.models import gpt

SMALL = gpt.Config(128, 32, 2, 2, 32)
"""Trained for many steps."""


def control(settings: argparse.Namespace) -> dict[str, Any]:
    """Train under a controller whose formats are switched all the time."""

    def run(precision: Any, seed: int, steps: int, switches: int = 0, stop: bool = False) -> tuple[Any, ...]:
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model = gpt.GPT(SMALL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        control, seen = dsc.PrecisionController(), []
        drawn, losses = text_batches(4, 32, seed), []
        for part in (steps // 2, steps - steps // 2) if stop else (steps,):
            if stop and losses:
                control, optimizer, model = resumed(control, optimizer, model)
            options = {"precision": precision, "controller": control, "on_compile": seen.append}
            call = torch.compile(model, backend="dsc", fullgraph=True, options=options)
            for _ in range(part):
                i = len(losses)
                loss = call(*next(drawn))
                optimizer.zero_grad()
                control.scale(loss).backward()
                control.step(optimizer)
                losses.append(loss.detach())
                if switches and i % (steps // switches) == steps // switches - 1:
                    switch(control, i)
        return [float(x) for x in losses], seen, control

    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses, seen, controller = run({"*": "int8"}, 0, settings.steps, switches=25)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    bf16 = {seed: end_of(plain_bf16(seed, settings.steps)) for seed in (0, 1, 2)}
    noise = max(bf16.values()) - min(bf16.values())
    short = min(settings.steps, 60)
    whole, parts = run({"*": "int8"}, 0, short, 6)[0], run({"*": "int8"}, 0, short, 6, stop=True)[0]
    numbers = {
        "steps": len(losses),
        "switches of a product's format": int(controller.metrics()["switches"]),
        "compiled graphs (forward, backward)": len(seen),
        "graph breaks": breaks,
        "loss at the end": end_of(losses),
        "the same in bf16": bf16[0],
        "difference": abs(end_of(losses) - bf16[0]),
        "range over seeds in bf16": noise,
        "a resumed run is identical": whole == parts,
    }
    print(table(("control", ""), [(k, v if not isinstance(v, float) else f"{v:.4f}") for k, v in numbers.items()]))
    return numbers


def plain_bf16(seed: int, steps: int) -> list[float]:
    """The same training with all products in bf16, and nobody who switches."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = gpt.GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    call = torch.compile(model, backend="dsc", options={"precision": "bf16"})
    losses = []
    for inputs in itertools.islice(text_batches(4, 32, seed), steps):
        loss = call(*inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def end_of(losses: Sequence[float]) -> float:
    return statistics.mean(losses[-max(len(losses) // 10, 1) :])


def switch(controller: dsc.PrecisionController, i: int) -> None:
    """Another set of products in another format, all roles of some layers at a time."""
    draw = random.Random(i)
    for site, product in controller.products.items():
        if draw.random() < 0.3:
            controller.switch(site, draw.choice(product.formats))


def resumed(controller: dsc.PrecisionController, optimizer: Any, model: nn.Module) -> tuple[Any, Any, nn.Module]:
    """Everything saved to a file, and made anew from it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "saved")
        torch.save([model.state_dict(), optimizer.state_dict(), controller.state_dict()], file)
        saved = torch.load(file)
    torch._dynamo.reset()
    model = gpt.GPT(SMALL)
    model.load_state_dict(saved[0])
    new = torch.optim.AdamW(model.parameters(), lr=2e-3)
    new.load_state_dict(saved[1])
    control = dsc.PrecisionController()
    control.load_state_dict(saved[2])
    return control, new, model
