"""``dsc cache``: what compiled kernels and graphs take on disk; delete them, take them to another machine."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from dsc.cli.app import BAD_INPUT, AsJson, app, console, fail, print_json

Stats = Annotated[bool, typer.Option("--stats", help="Show what is there, which is also what no option does.")]
Clear = Annotated[bool, typer.Option("--clear", help="Delete all kernels and saved crashes.")]
Export = Annotated[
    Path | None, typer.Option("--export", metavar="FILE", dir_okay=False, help="Write all kernels into one file.")
]
Import = Annotated[
    Path | None,
    typer.Option(
        "--import",
        metavar="FILE",
        help="Take kernels of FILE that fit this machine. They are code: take what you would run.",
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", metavar="MB", min=0, help="Delete what was not used for longest above this.")
]


@app.command()
def cache(
    stats: Stats = False,
    clear: Clear = False,
    export: Export = None,
    import_: Import = None,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Show, shrink, empty, export or import the cache of compiled kernels and graphs.

    It lies in ~/.cache/dsc, or where DSC_CACHE_DIR says, and keeps itself below 2 GiB.
    """
    from dsc import options
    from dsc.codegen import archive, build
    from dsc.codegen import cache as folder_of_kernels
    from dsc.debug import crash
    from dsc.debug.units import nbytes

    if sum((stats, clear, export is not None, import_ is not None, limit is not None)) > 1:
        fail("Give one of --stats, --clear, --export, --import and --limit.", BAD_INPUT)
    given = options.parse(None, None, os.environ)
    folder = Path(given.cache_dir) if given.cache_dir else options.default_cache_dir()
    done: dict[str, Any] = {"folder": str(folder)}
    if clear:
        count, freed = folder_of_kernels.clear(folder)
        crashes = crash.clear(folder / crash.CRASHES)
        done |= {"deleted": count, "bytes": freed, "crashes": crashes}
        sentence = f"Deleted libraries and graphs: {count}, {nbytes(freed)}; crashes: {crashes}; in {folder}"
    elif limit is not None:
        freed = folder_of_kernels.evict(folder, limit * 1_000_000)
        done |= {"bytes": freed}
        sentence = f"Deleted {nbytes(freed)} in {folder}"
    elif export is not None:
        count, size = archive.write(folder, export)
        done |= {"file": str(export), "exported": count, "bytes": size}
        sentence = f"Wrote libraries and graphs: {count}, {nbytes(size)}, to {export}"
    elif import_ is not None:
        compiler = build.find_compiler(given.cxx)
        if compiler is None:
            fail("Kernels fit a compiler, and none was found here: install g++ or clang++, or name one by DSC_CXX.")
        try:
            found = archive.read(import_, folder, compiler)
        except build.CacheUnusable as why:
            fail(f"The cache cannot be used: {why}.")
        done |= {"file": str(import_), "taken": found.taken, "present": found.present, "foreign": found.foreign}
        sentence = (
            f"Took libraries and graphs of {import_}: {found.taken}; here before: {found.present}; "
            f"not for this machine: {found.foreign}"
        )
    else:
        entries = folder_of_kernels.entries(folder)
        total, crashes = sum(e.bytes for e in entries), len(crash.saved(folder / crash.CRASHES))
        counts, top = Counter(e.kind for e in entries), folder_of_kernels.LIMIT
        done |= {"libraries": counts["library"], "graphs": counts["graph"], "schedules": counts["choice"]}
        done |= {"models": counts["artifact"], "bytes": total, "limit": top, "crashes": crashes}
        sentence = (
            f"Kernel libraries: {counts['library']}, graphs: {counts['graph']}, measured schedules: {counts['choice']}, "
            f"compiled models: {counts['artifact']}, {nbytes(total)} of at most {nbytes(top)}; "
            f"crashes: {crashes}; in {folder}"
        )
    if as_json:
        print_json(done)
    else:
        console().print(sentence, highlight=False, markup=False, soft_wrap=True)
