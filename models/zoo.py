"""The models by name, each with its inputs: ``loss = entry.build()(*entry.inputs())``.

Names ending in ``-tiny`` are for tests; the others have the proportions of real models at a size that a CPU can train.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from dsc.models import bert, convnet, encdec, gpt, llama, mlp, moe, resnet, uvit, vit


class UnknownModel(KeyError):
    """No model of the zoo has this name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        super().__init__(f"no model is named {name!r}; {hint}known: {', '.join(known)}")

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Entry:
    name: str
    description: str
    make: Callable[[], nn.Module]
    draw: Callable[[int, Generator], tuple[Tensor, ...]]  # batch size, random numbers -> inputs
    batch: int

    def build(self, seed: int = 0) -> nn.Module:
        """The module on the CPU, in training mode; equal seeds give equal weights, global random state is kept."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            return self.make()

    def inputs(self, batch: int | None = None, seed: int = 0) -> tuple[Tensor, ...]:
        """All arguments of ``forward``, targets included, on the CPU; ``batch`` defaults to the entry's own."""
        with torch.device("cpu"):
            return self.draw(self.batch if batch is None else batch, Generator().manual_seed(seed))


def load(name: str) -> Entry:
    """The entry of that name; an unknown name raises ``UnknownModel``, which suggests the nearest one."""
    if name not in ZOO:
        raise UnknownModel(name, tuple(ZOO))
    return ZOO[name]


def next_tokens(vocab: int, length: int) -> Callable[[int, Generator], tuple[Tensor, ...]]:
    """Draws (idx, targets), both [batch, length] int64, the targets one token ahead."""

    def draw(batch: int, generator: Generator) -> tuple[Tensor, ...]:
        tokens = torch.randint(vocab, (batch, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return draw


def masked_tokens(vocab: int, length: int) -> Callable[[int, Generator], tuple[Tensor, ...]]:
    """Draws (idx, mask, targets), all [batch, length]: rows half to fully long, token 0 where a word is hidden.

    About 15 % of the real tokens are hidden, the first of each row always, so that every row has a loss.
    """

    def draw(batch: int, generator: Generator) -> tuple[Tensor, ...]:
        tokens = torch.randint(1, vocab, (batch, length), generator=generator)
        lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
        positions = torch.arange(length)
        mask = positions < lengths
        hidden = mask & ((torch.rand(batch, length, generator=generator) < 0.15) | (positions == 0))
        return tokens.masked_fill(hidden | ~mask, 0), mask, tokens.masked_fill(~hidden, bert.IGNORED)

    return draw


def images(size: int, classes: int) -> Callable[[int, Generator], tuple[Tensor, ...]]:
    """Draws (images [batch, 3, size, size] float32, classes [batch] int64)."""

    def draw(batch: int, generator: Generator) -> tuple[Tensor, ...]:
        pixels = torch.randn(batch, 3, size, size, generator=generator)
        return pixels, torch.randint(classes, (batch,), generator=generator)

    return draw


def translations(vocab: int, length: int) -> Callable[[int, Generator], tuple[Tensor, ...]]:
    """Draws (source, idx, targets), all [batch, length] int64, the targets one token ahead of idx."""

    def draw(batch: int, generator: Generator) -> tuple[Tensor, ...]:
        source = torch.randint(vocab, (batch, length), generator=generator)
        return source, *next_tokens(vocab, length)(batch, generator)

    return draw


def noisy_images(size: int, channels: int) -> Callable[[int, Generator], tuple[Tensor, ...]]:
    """Draws (images [batch, channels, size, size], times [batch] in [0, 1], noise as images), all float32."""

    def draw(batch: int, generator: Generator) -> tuple[Tensor, ...]:
        pixels = torch.randn(batch, channels, size, size, generator=generator)
        return pixels, torch.rand(batch, generator=generator), torch.randn(pixels.shape, generator=generator)

    return draw


def vectors(features: int, classes: int) -> Callable[[int, Generator], tuple[Tensor, ...]]:
    """Draws (vectors [batch, features] float32, classes [batch] int64)."""

    def draw(batch: int, generator: Generator) -> tuple[Tensor, ...]:
        x = torch.randn(batch, features, generator=generator)
        return x, torch.randint(classes, (batch,), generator=generator)

    return draw


def mlp_entry(name: str, description: str, config: mlp.Config, batch: int) -> Entry:
    return Entry(name, description, lambda: mlp.MLP(config), vectors(config.features, config.classes), batch)


def convnet_entry(name: str, description: str, config: convnet.Config, size: int, batch: int) -> Entry:
    return Entry(name, description, lambda: convnet.ConvNet(config), images(size, config.classes), batch)


def gpt_entry(name: str, description: str, config: gpt.Config, batch: int) -> Entry:
    return Entry(name, description, lambda: gpt.GPT(config), next_tokens(config.vocab, config.max_length), batch)


def llama_entry(name: str, description: str, config: llama.Config, batch: int) -> Entry:
    return Entry(name, description, lambda: llama.Llama(config), next_tokens(config.vocab, config.max_length), batch)


def bert_entry(name: str, description: str, config: bert.Config, batch: int) -> Entry:
    return Entry(name, description, lambda: bert.BERT(config), masked_tokens(config.vocab, config.max_length), batch)


def vit_entry(name: str, description: str, config: vit.Config, batch: int) -> Entry:
    return Entry(name, description, lambda: vit.ViT(config), images(config.size, config.classes), batch)


def resnet_entry(name: str, description: str, config: resnet.Config, size: int, batch: int) -> Entry:
    return Entry(name, description, lambda: resnet.ResNet(config), images(size, config.classes), batch)


def moe_entry(name: str, description: str, config: moe.Config, batch: int) -> Entry:
    return Entry(name, description, lambda: moe.MoE(config), next_tokens(config.vocab, config.max_length), batch)


def encdec_entry(name: str, description: str, config: encdec.Config, batch: int) -> Entry:
    draw = translations(config.vocab, config.max_length)
    return Entry(name, description, lambda: encdec.EncoderDecoder(config), draw, batch)


def uvit_entry(name: str, description: str, config: uvit.Config, batch: int) -> Entry:
    return Entry(name, description, lambda: uvit.UViT(config), noisy_images(config.size, config.channels), batch)


ENTRIES = (
    mlp_entry("mlp", "3 hidden layers of 1024", mlp.Config(), batch=64),
    mlp_entry("mlp-tiny", "2 hidden layers of 32", mlp.Config(features=20, hidden=(32, 32)), batch=8),
    convnet_entry("convnet", "3 convolutions, 64 pixels", convnet.Config(), size=64, batch=16),
    convnet_entry("convnet-tiny", "2 convolutions, 16 pixels", convnet.Config(widths=(8, 16)), size=16, batch=4),
    gpt_entry("gpt", "GPT-2 style, 6 layers of 384, 256 tokens", gpt.Config(), batch=4),
    gpt_entry(
        "gpt-tiny",
        "GPT-2 style, 2 layers of 32, 16 tokens",
        gpt.Config(vocab=64, max_length=16, layers=2, heads=2, width=32),
        batch=2,
    ),
    gpt_entry(
        "gpt-bytes",
        "GPT-2 style, 6 layers of 384, 128 bytes",
        gpt.Config(vocab=256, max_length=128),
        batch=8,
    ),
    llama_entry("llama", "LLaMA style, 6 layers of 384, 6 heads on 2, 256 tokens", llama.Config(), batch=4),
    llama_entry(
        "llama-tiny",
        "LLaMA style, 2 layers of 32, 4 heads on 2, 16 tokens",
        llama.Config(vocab=64, max_length=16, layers=2, heads=4, kv_heads=2, width=32, hidden=64),
        batch=2,
    ),
    bert_entry("bert", "BERT style, 6 layers of 384, 256 tokens", bert.Config(), batch=4),
    bert_entry(
        "bert-tiny",
        "BERT style, 2 layers of 32, 16 tokens",
        bert.Config(vocab=64, max_length=16, layers=2, heads=2, width=32),
        batch=2,
    ),
    vit_entry("vit", "ViT-S/16 with 6 layers, 224 pixels", vit.Config(), batch=4),
    vit_entry(
        "vit-tiny",
        "2 layers of 32, 16 patches of 4 pixels",
        vit.Config(size=16, patch=4, layers=2, heads=2, width=32, classes=10),
        batch=2,
    ),
    resnet_entry("resnet", "ResNet-18, 96 pixels", resnet.Config(), size=96, batch=4),
    resnet_entry(
        "resnet-tiny",
        "2 stages of one basic block, 16 pixels",
        resnet.Config(width=8, blocks=(1, 1), classes=10, small_stem=True),
        size=16,
        batch=4,
    ),
    moe_entry("moe", "4 layers of 256, 2 of 8 experts a token, 256 tokens", moe.Config(), batch=4),
    moe_entry(
        "moe-tiny",
        "2 layers of 32, 2 of 4 experts a token, 16 tokens",
        moe.Config(vocab=64, max_length=16, layers=2, heads=4, kv_heads=2, width=32, hidden=32, experts=4),
        batch=2,
    ),
    encdec_entry("encdec", "T5 style, 3 + 3 layers of 384, 256 tokens", encdec.Config(), batch=4),
    encdec_entry(
        "encdec-tiny",
        "T5 style, 2 + 2 layers of 32, 16 tokens",
        encdec.Config(vocab=64, max_length=16, layers=2, heads=2, width=32, hidden=64),
        batch=2,
    ),
    uvit_entry("uvit", "U-ViT, 7 layers of 384 with long skips, 32 pixels", uvit.Config(), batch=16),
    uvit_entry(
        "uvit-tiny",
        "U-ViT, 5 layers of 32 with long skips, 16 pixels",
        uvit.Config(size=16, layers=4, heads=2, width=32),
        batch=4,
    ),
)

ZOO: Mapping[str, Entry] = {entry.name: entry for entry in ENTRIES}
