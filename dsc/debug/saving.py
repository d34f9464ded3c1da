"""``dsc compile``: a captured model into a folder that ``dsc.load`` runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsc import artifact, errors, portable
from dsc.artifact import Manifest
from dsc.codegen.alternatives import troubled
from dsc.compilation import Compilation
from dsc.debug.candidates import choices_of, retuned, scheduled
from dsc.debug.capture import Region, Session, untouched
from dsc.debug.kernels import Listed, facts_of, listed
from dsc.debug.source import Model

if TYPE_CHECKING:
    from dsc.codegen.cubin import KernelFacts

    Facts = Mapping[tuple[str, int], KernelFacts]


def save(
    session: Session, folder: Path, parallel: int = 2, done: Callable[[], None] = lambda: None, tune: bool = False
) -> Manifest:
    """Write the programs of ``session`` and its compiled kernels; see ``files_of``."""
    manifest, files = files_of(session, parallel, done=done, tune=tune)
    write(folder, files)
    return manifest


def files_of(
    session: Session,
    parallel: int = 2,
    begins: Callable[[int], None] = lambda _: None,
    done: Callable[[], None] = lambda: None,
    tune: bool = False,
) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest, and all files of the folder, the manifest among them.

    ``begins`` is called with the number of kernels to compile, ``done`` after each.  With ``tune`` kernels have the
    schedules that are modelled to be best, else the default ones, but where those came out badly
    (``dsc.codegen.alternatives.troubled``).

    Raises:
        Unsaveable: a model that needs more than one graph, sizes that change, or what a process cannot hand on.
        CodegenFailed: a kernel that cannot be compiled.
    """
    region, programs = checked(session)
    training = "forward" in programs
    single, differentiable, count = results_of(session, region)
    if training and saved_count(programs, differentiable) != outputs_of(programs["forward"]) - count:
        raise unsaveable(session, "its graphs give more than its results (inputs that change, or share memory)")
    files = {name: data for made in programs.values() for name, data in program_files(session, made).items()}
    defaults, on_gpu = listed(session), session.target.kind == "cuda"
    begins(len(defaults) if on_gpu else 0)
    with tempfile.TemporaryDirectory(prefix="dsc-") as cache:
        facts: Facts = facts_of(defaults, capabilities(session), parallel, done, cache) if on_gpu else {}
        kernels = well_scheduled(session, defaults, facts, parallel, tune)
        changed = [k for k, old in zip(kernels, defaults) if k is not old]
        if changed:
            facts = {**facts, **facts_of(changed, capabilities(session), parallel, cache=cache)}
        files |= kernel_files(kernels, facts)
        files |= {
            f"triton/{p.relative_to(cache)}": p.read_bytes() for p in sorted(Path(cache).rglob("*")) if p.is_file()
        }
    for made in programs.values() if changed else ():
        files |= program_files(session, retuned(made, changed))
    tensors = [t for t in region.inputs if isinstance(t, Tensor)]
    manifest = Manifest(
        model=session.model.name,
        target=session.target.name,
        capability=session.target.capability,
        training=training,
        inputs=artifact.describe(tensors, names_of(session.model, region.inputs)),
        results=count,
        differentiable=differentiable,
        single=single,
        files={name: artifact.digest(data) for name, data in files.items()},
        versions=artifact.versions(),
    )
    return manifest, {**files, artifact.MANIFEST: manifest.text().encode()}


def checked(session: Session) -> tuple[Region, Mapping[str, Compilation]]:
    if len(session.regions) != 1 or session.regions[0].left:
        reasons = [why for r in session.regions for _, why in r.left]
        raise unsaveable(session, reasons[0] if reasons else f"it needs {len(session.regions)} graphs, not one")
    (region,) = session.regions
    programs = {made.kind: made for made in region.programs}
    if not all(isinstance(t, Tensor) for t in region.inputs):
        raise unsaveable(session, "it takes sizes or numbers as inputs")
    if any(made.program.symbols for made in programs.values()):
        raise unsaveable(session, "its sizes are symbols")
    return region, programs


def results_of(session: Session, region: Region) -> tuple[bool, tuple[int, ...], int]:
    """Whether the model gives one tensor, which results have gradients, and how many there are."""
    with untouched(session.model.module), torch.enable_grad():
        result = session.model.module(*session.model.args)
    leaves = pytree.tree_leaves(result)
    flat = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, (tuple, list)) else []
    if len(flat) != len(leaves) or not all(isinstance(t, Tensor) for t in flat):
        raise unsaveable(session, "it gives something else than a tensor or a tuple of tensors")
    given = region.dynamo.graph.output_node().args[0]
    if not isinstance(given, (tuple, list)) or len(given) != len(flat):
        raise unsaveable(session, "its results are not those of its graph")
    return isinstance(result, Tensor), tuple(i for i, t in enumerate(flat) if t.requires_grad), len(flat)


def saved_count(programs: Mapping[str, Compilation], differentiable: Sequence[int]) -> int:
    """Tensors that the forward hands to the backward: its inputs, but for the gradients of the results."""
    return len(programs["backward"].gm.graph.find_nodes(op="placeholder")) - len(differentiable)


def outputs_of(made: Compilation) -> int:
    results = made.gm.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    return len(results)


def names_of(model: Model, inputs: Sequence[object]) -> list[tuple[str, str]]:
    """Where each input of the graph comes from."""
    module = model.module
    known: dict[int, tuple[str, str]] = {id(p): ("parameter", n) for n, p in module.named_parameters()}
    known |= {id(b): ("buffer", n) for n, b in module.named_buffers()}
    given = [x for x in pytree.tree_leaves(model.args) if isinstance(x, Tensor)]
    known |= {id(x): ("input", str(i)) for i, x in enumerate(given)}
    if any(id(x) not in known for x in inputs):
        why = "it reads tensors that are neither its parameters, its buffers, nor its inputs"
        raise errors.Unsaveable(model.name, why)
    return [known[id(x)] for x in inputs]


def program_files(session: Session, made: Compilation) -> dict[str, bytes]:
    """A program to be read, and to be loaded.

    Raises:
        Unsaveable: it holds what a process cannot hand on.
    """
    try:
        data = portable.dumps(made.program)
    except portable.NotPortable as why:
        raise unsaveable(session, str(why)) from why
    return {f"{made.kind}.py": artifact.text_of(made.program).encode(), f"{made.kind}.program": data}


def capabilities(session: Session) -> tuple[int, ...]:
    """That of the target, if it is a GPU."""
    if session.target.capability is None:
        return ()
    major, minor = session.target.capability
    return (10 * major + minor,)


def well_scheduled(
    session: Session, kernels: Sequence[Listed], facts: Facts, parallel: int, tune: bool
) -> Sequence[Listed]:
    """The kernels, with other schedules where those are modelled to be better: of all with ``tune``, else of the troubled."""
    if not facts:
        return kernels
    doubtful = [k for k in kernels if tune or any(troubled(f.code) for (t, _), f in facts.items() if t == k.title)]
    with tempfile.TemporaryDirectory(prefix="dsc-") as cache:  # what loses need not travel
        return scheduled(kernels, choices_of(doubtful, session.target, parallel, cache=cache))


def kernel_files(kernels: Sequence[Listed], facts: Facts) -> dict[str, bytes]:
    """Sources of all kernels, and for a GPU their cubins."""
    out = {f"kernels/{k.title}.{'py' if k.schedule else 'cpp'}": k.source.encode() for k in kernels}
    return out | {f"kernels/{title}.sm_{c}.cubin": f.cubin for (title, c), f in facts.items()}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """All files, the manifest last: a folder without it is not complete."""
    (folder / artifact.MANIFEST).unlink(missing_ok=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def unsaveable(session: Session, why: str) -> errors.Unsaveable:
    return errors.Unsaveable(session.model.name, why)
