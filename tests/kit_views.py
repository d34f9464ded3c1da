"""Captured models for the tests of pictures and reports, each captured once in a process."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from dsc.debug.capture import Session, capture
from dsc.debug.source import Model
from dsc.models import gpt, zoo

EVIL = "<script>alert(1)</script>"
"""A name for a module, which user code may choose."""


class Evil(nn.Module):
    """A model whose parts are called what no page may run."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(EVIL, nn.Linear(8, 8))
        self.add_module('"><img src=x onerror=alert(1)>', nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


@cache
def session(name: str, target: str = "cpu") -> Session:
    """The train step of a model of the zoo, or of ``evil``."""
    if name == "evil":
        return capture(Model(EVIL, Evil(), (torch.ones(2, 8),)), target)
    entry = zoo.load(name)
    return capture(Model(name, entry.build(), entry.inputs()), target)


@cache
def deep(layers: int) -> Session:
    """The train step of a narrow GPT of so many layers."""
    config = gpt.Config(vocab=64, max_length=16, layers=layers, heads=2, width=32)
    entry = zoo.gpt_entry(f"gpt of {layers} layers", "", config, batch=2)
    return capture(Model(entry.name, entry.build(), entry.inputs()), "cpu")
