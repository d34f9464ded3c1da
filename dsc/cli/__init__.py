"""The ``dsc`` command: a file a command, each of which imports what it needs, so that ``dsc --help`` is quick."""

from __future__ import annotations

try:
    import rich as _rich  # noqa: F401
    import typer as _typer  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"The dsc command needs {error.name}: pip install 'dsc-compiler[cli]'") from None

from dsc.cli import bisect as bisect
from dsc.cli import cache as cache
from dsc.cli import compile as compile
from dsc.cli import demo as demo
from dsc.cli import diff as diff
from dsc.cli import doctor as doctor
from dsc.cli import explain as explain
from dsc.cli import graph as graph
from dsc.cli import kernels as kernels
from dsc.cli import memory as memory
from dsc.cli import ops as ops
from dsc.cli import opt as opt
from dsc.cli import passes as passes
from dsc.cli import pipeline as pipeline
from dsc.cli import precision as precision
from dsc.cli import reduce as reduce
from dsc.cli import replay as replay
from dsc.cli import show as show
from dsc.cli import trace as trace
from dsc.cli import train as train
from dsc.cli import view as view
from dsc.cli.app import app as app


def main() -> None:
    """The console entry point."""
    app()
