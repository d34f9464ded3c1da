"""``dsc kernels``: the emitted kernels beside the graph that they came from, and what they use on each GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsc.cli.app import BAD_INPUT, AsJson, Inference, Inputs, ModelName, TargetName, app, console, fail, print_json
from dsc.cli.app import progress as errors_console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from dsc.codegen.cubin import KernelFacts
    from dsc.debug.kernels import Listed

    Facts = Mapping[tuple[str, int], KernelFacts]

Name = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Show these kernels in full: a name, or a part of it.")
]
DType = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Cast the model and its inputs first: bf16, f16, f32.")
]
Parallel = Annotated[int, typer.Option("--parallel", min=1, help="Processes that compile.")]


@app.command()
def kernels(
    model: ModelName,
    name: Name = None,
    inputs: Inputs = None,
    target: TargetName = None,
    dtype: DType = None,
    inference: Inference = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="Print the PTX of the kernels that NAME selects.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Print their machine code.")] = False,
    candidates: Annotated[
        bool,
        typer.Option(
            "--candidates", help="Compile other schedules too; show which is taken, and why the others are not."
        ),
    ] = False,
    parallel: Parallel = 2,
    as_json: AsJson = False,
) -> None:
    """Show the kernels of MODEL: their source, where they come from, and registers, spills and access widths.

    GPU kernels are compiled for sm_80 and sm_90, on any machine.  With --candidates every kernel is compiled with up to
    six schedules for the target, which are compared by a model, or by what a GPU here has measured.
    """
    from dsc.cli import candidates as table_of
    from dsc.cli import source
    from dsc.debug.kernels import CAPABILITIES, listed

    if (ptx or sass) and name is None and not as_json:
        fail(
            "--ptx and --sass print the code of single kernels: give a NAME too, as in: dsc kernels gpt gelu --ptx.",
            BAD_INPUT,
        )
    session = source.captured(model, inputs, target, training=not inference, dtype=dtype)
    everything = listed(session)
    chosen = [k for k in everything if name is None or name in k.title]
    if not chosen and name is not None:
        names = ", ".join(k.title for k in everything)
        fail(f"No kernel of {model} has {name!r} in its name; it has: {names or 'none'}.", BAD_INPUT)
    on_gpu = session.target.kind == "cuda"
    if (ptx or sass) and not on_gpu:
        fail("--ptx and --sass need a GPU target: add --target h100 or --target a100.", BAD_INPUT)
    if candidates and not on_gpu:
        fail("--candidates needs a GPU target: add --target h100 or --target a100.", BAD_INPUT)
    facts = compiled(chosen, CAPABILITIES, parallel) if on_gpu else {}
    choices = table_of.chosen(chosen, session.target, parallel) if candidates else {}
    if as_json:
        rows = [{**as_data(k, facts, sass), **table_of.data(choices, k.title)} for k in chosen]
        print_json({"model": model, "target": session.target.name, "kernels": rows})
        return
    out = console()
    if not out.is_terminal:
        out.width = max(out.width, 170)
    if name is not None:
        for k in chosen:
            show_kernel(out, k, facts, ptx, sass)
    table_of.show(out, chosen, choices)
    out.print(table(f"{model} for {session.target.name}", chosen, facts))


def compiled(chosen: Sequence[Listed], capabilities: Sequence[int], parallel: int) -> Facts:
    """Facts of the kernels, with a progress bar on the error stream."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dsc.debug.kernels import facts_of

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors_console(), transient=True) as bar:
        job = bar.add_task("compiling", total=len(chosen) * len(capabilities))
        return facts_of(chosen, capabilities, parallel, lambda: bar.advance(job))


def show_kernel(out: Console, k: Listed, facts: Facts, ptx: bool, sass: bool) -> None:
    """Graph text with the user's lines, source with the width of each access, machine code on request."""
    from rich.rule import Rule
    from rich.syntax import Syntax

    mine = {c: f for (title, c), f in facts.items() if title == k.title}
    out.print(Rule(f"{k.title}: {k.launches} launches of {megabytes(k.bytes)} a step", align="left"))
    out.print(origin(k))
    out.print(Syntax(annotated(k, mine), "python" if k.schedule else "cpp", background_color="default", word_wrap=True))
    for capability, f in sorted(mine.items()):
        for wanted, title, text in ((ptx, "PTX", f.ptx), (sass, "SASS", f.sass() if sass else "")):
            if wanted:
                out.print(Rule(f"{title} of {k.title} for sm_{capability}", align="left", style="dim"))
                out.print(text, markup=False, highlight=False, soft_wrap=True)


def origin(k: Listed) -> RenderableType:
    """The nodes, each with the line of the program that it comes from; a line that repeats is printed once."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold", style="dim")
    last = ""
    for text, line in k.nodes:
        grid.add_row(escaped(text), escaped(line) if line != last else "")
        last = line
    return grid


def annotated(k: Listed, facts: Mapping[int, KernelFacts]) -> str:
    """The source, with the width of accesses at the ends of their lines."""
    lines = k.source.rstrip("\n").splitlines()
    comment = "#" if k.schedule else "//"
    for number in {a.line for f in facts.values() for a in f.accesses}:
        widths = sorted({a.width for f in facts.values() for a in f.accesses if a.line == number})
        lines[number - 1] += f"  {comment} {' or '.join(map(str, widths))} bytes a thread"
    return "\n".join(lines)


def table(title: str, chosen: Sequence[Listed], facts: Facts) -> Table:
    """A row a kernel, a line in it for each GPU; loads and stores as those of 16 bytes of all."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    made.add_column("kernel", overflow="fold", min_width=20)
    for column in ("runs", "moved"):
        made.add_column(column, justify="right", no_wrap=True)
    capabilities = sorted({c for _, c in facts})
    if capabilities:
        made.add_column("tile", no_wrap=True)
        for column in ("sm", "regs", "spill", "shared", "occ.", "loads", "stores", "tensor"):
            made.add_column(column, justify="right", no_wrap=True)
    for k in chosen:
        row = [escaped(k.title), str(k.launches), megabytes(k.bytes)]
        if k.schedule is not None:
            columns = zip(*(cells(facts[k.title, c]) for c in capabilities))
            row += [tile(k), *("\n".join(column) for column in columns)]
        made.add_row(*row)
    moved = sum(k.launches * k.bytes for k in chosen)
    made.caption = f"{len(chosen)} kernels, {sum(k.launches for k in chosen)} launches, {megabytes(moved)} a step"
    if capabilities:
        made.caption += "; loads and stores: of 16 bytes / all, in the code of a thread"
    return made


def tile(k: Listed) -> str:
    s = k.schedule
    assert s is not None
    parts = f"\n{s.parts} parts" if s.parts else ""
    return f"{s.XB} x {s.RB}\n{s.num_warps} warps{parts}" if s.RB > 1 else f"{s.XB}\n{s.num_warps} warps"


def cells(f: KernelFacts) -> tuple[str, ...]:
    tensor = ", ".join(f"{count} {name}" for name, count in sorted(f.tensor.items())) or "-"
    return (
        str(f.capability),
        str(f.registers),
        f"[red]{f.spilled} B[/]" if f.spilled else "0",
        f"{f.shared} B",
        f"{f.occupancy:.0%}",
        f"{f.wide(store=False)}/{f.loads}",
        f"{f.wide(store=True)}/{f.stores}",
        tensor,
    )


def as_data(k: Listed, facts: Facts, sass: bool) -> dict[str, Any]:
    """A kernel as JSON."""
    data: dict[str, Any] = {
        "name": k.title,
        "launches": k.launches,
        "bytes": k.bytes,
        "traffic": dict(k.traffic),
        "graph": [{"node": text, "line": line} for text, line in k.nodes],
        "source": k.source,
    }
    if k.schedule is not None:
        data["schedule"] = {
            name: getattr(k.schedule, name) for name in ("XB", "RB", "num_warps", "num_stages", "parts")
        }
    for (title, capability), f in sorted(facts.items()):
        if title != k.title:
            continue
        data[f"sm_{capability}"] = {
            "registers": f.registers,
            "spilled_bytes": f.spilled,
            "shared_bytes": f.shared,
            "occupancy": f.occupancy,
            "loads": f.loads,
            "loads_16_bytes": f.wide(store=False),
            "stores": f.stores,
            "stores_16_bytes": f.wide(store=True),
            "async_copies": f.async_copies,
            "tensor_core": dict(f.tensor),
            "accesses": [
                {"line": a.line, "buffer": a.buffer, "store": a.store, "bytes": a.width, "instructions": a.count}
                for a in f.accesses
            ],
            "ptx": f.ptx,
            **({"sass": f.sass()} if sass else {}),
        }
    return data


def megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 10_000 else f"{count / 1e3:.2f} kB"


def escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
