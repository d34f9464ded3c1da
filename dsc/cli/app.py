"""What all commands share: the application, its error handling, and the options that several of them take."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from dsc import __version__
from dsc.errors import DscError

FAILED, BAD_INPUT = 1, 2
"""Exit codes: what was asked for does not hold; what was given cannot be used."""


class Commands(TyperGroup):
    """Commands whose mistakes of the user end in one sentence and exit code 2."""

    def invoke(self, ctx: Any) -> Any:  # the type of the context has moved between versions of typer
        try:
            return super().invoke(ctx)
        except DscError as mistake:
            fail(str(mistake), BAD_INPUT)


app = typer.Typer(cls=Commands, help="A training compiler for PyTorch.", no_args_is_help=True, rich_markup_mode="rich")

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name of the zoo, FILE.py:function_or_class, FILE.pt2, FILE.onnx, hf:CONFIG.json, or FILE.trace.",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "--inputs",
        "-i",
        metavar="VALUE",
        help="An input, once for each: f32[4,128], i64[4,16]<1000 for numbers below 1000, 0.5; or FILE.py:FUNCTION.",
    ),
]
TargetName = Annotated[
    str | None,
    typer.Option("--target", "-t", metavar="NAME", help="a100, a100-40, h100, h100-pcie, h200, cpu; default: cpu."),
]
Inference = Annotated[bool, typer.Option("--inference", help="Compile the forward alone, as for evaluation.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables for people.")]


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsc {__version__} (torch {metadata.version('torch')}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the versions and leave.")
    ] = False,
) -> None:
    """A training compiler for PyTorch."""


def fail(sentence: str, code: int = FAILED) -> NoReturn:
    """Print the sentence on the error stream and leave with that exit code."""
    typer.echo(sentence, err=True)
    raise typer.Exit(code)


def print_json(value: object) -> None:
    """``value`` on the output stream, keys in their own order."""
    typer.echo(json.dumps(value, indent=2))


def console() -> Console:
    """A console on the output stream of now, which a test may have replaced."""
    return Console()


def progress() -> Console:
    """A console on the error stream: progress and remarks, so that the output can be piped."""
    return Console(stderr=True)
