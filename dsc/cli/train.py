"""``dsc train``: train a model of the zoo on a text with sparse layers, and see what the masks do."""

from __future__ import annotations

import enum
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsc.cli.app import BAD_INPUT, AsJson, app, console, fail, print_json, progress

if TYPE_CHECKING:
    from torch import Tensor

    from dsc.debug.train import Draw
    from dsc.models.zoo import Entry


class SparseMode(enum.StrEnum):
    none = "none"
    static = "static"
    dynamic = "dynamic"


@app.command()
def train(
    model: Annotated[str, typer.Option("--model", "-m", help="A name of the zoo, or bert-base.")] = "gpt-bytes",
    sparse_mode: Annotated[
        SparseMode, typer.Option(help="none; static: one density; dynamic: density by layer, decay by a probe.")
    ] = SparseMode.dynamic,
    pattern: Annotated[str | None, typer.Option(help="N:M; default: 2:4, and 4:8 for dynamic.")] = None,
    layers: Annotated[
        list[str] | None, typer.Option(help="mlp (default), all, or names with *; may be repeated.")
    ] = None,
    density: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the layers' work that dynamic keeps.")
    ] = 0.5,
    gate_threshold: Annotated[
        float, typer.Option(min=0, max=0.99, help="Skip gradient rows up to this share of their root mean square.")
    ] = 0.0,
    balance_entropy: Annotated[
        float, typer.Option(min=0.01, max=1, help="How evenly dynamic spreads density: 1 is all alike.")
    ] = 0.9,
    data: Annotated[Path | None, typer.Option(help="A text; default: Python's standard library.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 100,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no step later than this.")] = 120.0,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a batch; default: the model's own.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch; all by default.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the weights here, with exact zeros.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train with sparse layers on any text."""
    import torch

    from dsc import passlist, sparsity
    from dsc.debug.train import Settings, layer_table, table, watch_live
    from dsc.runtime.state import State
    from dsc.target import find

    if threads:
        torch.set_num_threads(threads)
    if save is not None and not save.resolve().parent.is_dir():
        fail(f"{save} cannot be written: there is no folder {save.resolve().parent}.", BAD_INPUT)
    entry = found(model)
    net, text = entry.build(), read(data)
    settings = Settings(
        mode=sparse_mode.value,
        pattern=pattern or ("4:8" if sparse_mode is SparseMode.dynamic else "2:4"),
        layers=tuple(layers or ("mlp",)),
        density=density,
        balance_entropy=balance_entropy,
        gate_threshold=gate_threshold,
        steps=steps,
        seconds=seconds,
    )
    if (option := settings.option()) is not None:
        passlist.sparse(
            (), option, State(), find("cpu")
        )  # a bad pattern is better heard of now than from inside the compiler
    draws, words = feeds(entry, net, text, batch or entry.batch)
    out, state = console(), State()
    if not as_json:
        out.print(f"{entry.name} ({entry.description}) learns {words}, {torch.get_num_threads()} threads.")
    summary = watch_live(net, settings, *draws, state, progress() if as_json else out)
    if as_json:
        print_json({**asdict(summary), "settings": asdict(settings)})
    else:
        if (by_layer := layer_table(summary)) is not None:
            out.print(by_layer)
        out.print(table(summary, settings, sum(p.numel() for p in net.parameters())))
    if save is not None:
        if summary.telemetry is not None:
            sparsity.finalize(net, state)
        torch.save(net.state_dict(), save)
        (progress() if as_json else out).print(f"Wrote {save}")


def found(name: str) -> Entry:
    """The entry of that name; ``bert-base`` is BERT's own size, on bytes."""
    from dsc.models import bert, zoo

    if name == "bert-base":
        config = bert.Config(vocab=257, max_length=128, layers=12, heads=12, width=768)
        return zoo.bert_entry(name, "BERT, 12 layers of 768, 128 bytes", config, batch=2)
    try:
        return zoo.load(name)
    except zoo.UnknownModel as why:
        fail(f"{str(why)[0].upper()}{str(why)[1:]}.", BAD_INPUT)


def read(data: Path | None) -> Tensor:
    """[N] uint8, longer than a few rows."""
    import torch

    from dsc.debug.demo import stdlib_text

    if data is None:
        return stdlib_text(4_000_000)
    try:
        content = data.read_bytes()
    except OSError as why:
        fail(f"{data} cannot be read: {why.strerror}.", BAD_INPUT)
    if len(content) < 4096:
        fail(f"{data} has {len(content)} bytes; give a text of 4096 or more.", BAD_INPUT)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def feeds(entry: Entry, net: object, text: Tensor, batch: int) -> tuple[tuple[Draw, Draw], str]:
    """What to learn from and what to judge by, and that in words: by the inputs that the model takes."""
    import torch

    from dsc.debug.train import hidden_bytes, next_bytes

    inputs = entry.inputs(batch)
    kinds = [t.dtype for t in inputs]
    cut = int(len(text) * 0.9)
    much = f"{len(text) / 1e6:.1f} MB" if len(text) >= 1e5 else f"{len(text) / 1e3:.1f} kB"
    size = f"{much} of text, {batch} x {inputs[0].shape[-1]} bytes a step"
    if kinds in ([torch.int64, torch.int64], [torch.int64, torch.bool, torch.int64]) and hasattr(net, "tokens"):
        length, vocab = int(inputs[0].shape[-1]), int(net.tokens.num_embeddings)
        make = next_bytes if len(kinds) == 2 else hidden_bytes
        if length + 1 > len(text) - cut:
            fail(f"The text is too short for rows of {length} bytes; give a longer one.", BAD_INPUT)
        return (make(text[:cut], batch, length, vocab, 0), make(text[cut:], batch, length, vocab, 1)), size
    learn, judge = (torch.Generator().manual_seed(s) for s in (0, 1))
    words = f"random inputs of its own ({batch} a step), since it reads no text"
    return (lambda: entry.draw(batch, learn), lambda: entry.draw(batch, judge)), words
