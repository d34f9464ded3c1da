"""``dsc compile``: plan and compile a model for a machine that need not be here, into a folder."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsc.cli.app import AsJson, Inference, Inputs, ModelName, TargetName, app, console, print_json
from dsc.cli.app import progress as errors_console
from dsc.cli.kernels import DType, Parallel

if TYPE_CHECKING:
    from dsc.debug.source import Model


@app.command("compile")
def compile_model(
    model: ModelName,
    out: Annotated[Path, typer.Option("--out", "-o", file_okay=False, help="The folder to write.")],
    inputs: Inputs = None,
    target: TargetName = None,
    dtype: DType = None,
    inference: Inference = False,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="No weights: only shapes are traced, so that any model fits this machine.")
    ] = False,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Compile up to six schedules of every GPU kernel and take the one modelled to be best."
        ),
    ] = False,
    parallel: Parallel = 2,
    as_json: AsJson = False,
) -> None:
    """Compile MODEL for --target into a folder: programs, kernels, cubins, a manifest; ``dsc.load`` runs it there."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dsc.cli import source
    from dsc.debug.kept import compile_into
    from dsc.debug.shapes import only as on_shapes

    start = time.perf_counter()
    with on_shapes() if shapes else nullcontext():
        found = (
            large(model, dtype) if shapes and not inputs else source.in_dtype(source.find(model, inputs or ()), dtype)
        )
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=errors_console(), transient=True) as bar:
            job = bar.add_task("compiling", total=None)
            manifest, copied = compile_into(
                out,
                found,
                target or "cpu",
                training=not inference,
                parallel=parallel,
                tune=tune,
                begins=lambda count: bar.update(job, total=count),
                done=lambda: bar.advance(job),
            )
    seconds = time.perf_counter() - start
    size = sum((out / name).stat().st_size for name in manifest.files)
    if as_json:
        print_json(
            {
                "model": manifest.model,
                "target": manifest.target,
                "folder": str(out),
                "kernels": sum(name.startswith("kernels/") and not name.endswith(".cubin") for name in manifest.files),
                "files": len(manifest.files) + 1,
                "bytes": size,
                "seconds": seconds,
                "copied": copied,
            }
        )
        return
    kernels = [name for name in manifest.files if name.startswith("kernels/") and not name.endswith(".cubin")]
    console().print(
        f"{manifest.model} for {manifest.target}: {len(kernels)} kernels in {seconds:.1f} s, {size / 1e6:.1f} MB in {out}"
        f"{', as compiled before' if copied else ''}.\n"
        f"Run it there: dsc.load({str(out)!r}, model)(*inputs)",
        highlight=False,
        markup=False,
    )


def large(name: str, dtype: str | None) -> Model:
    """A model by name, of the zoo or of real size, made while only shapes are.

    Raises:
        UnknownModel: neither.
        BadOption: no such dtype.
    """
    from dsc.cli import source
    from dsc.cli.shapes_of import entry
    from dsc.debug.source import Model

    if "." in name or ":" in name:
        return source.in_dtype(source.find(name), dtype)
    chosen = entry(name)
    return source.in_dtype(Model(chosen.name, chosen.build(), chosen.inputs()), dtype)
