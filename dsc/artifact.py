"""Compiled models in a folder: planned and built on one machine, run on another.

    manifest.json       what it was made for and with, what it takes and gives, a checksum of every file
    forward.py          the programs, to be read (inference.py instead, of a model that is not trained)
    backward.py
    forward.program     the programs, as ``dsc.portable`` keeps them
    kernels/            each kernel: its source, and for a GPU its cubin
    triton/             Triton's cache of them: the GPU machine compiles nothing

Programs are unpickled: load only folders that nobody else can write.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dsc import __version__, errors, kernels, portable
from dsc.options import Options
from dsc.program import Program
from dsc.runtime import run
from dsc.runtime.pool import Pool

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Input:
    """One tensor that the programs take."""

    source: str
    """parameter, buffer or input."""
    name: str
    """Of the parameter or buffer; the place of an input among the tensors of the call."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    model: str
    target: str
    capability: tuple[int, int] | None
    """Of the GPU; None for a CPU."""
    training: bool
    inputs: tuple[Input, ...]
    results: int
    """Tensors that the model gives."""
    differentiable: tuple[int, ...]
    """Those of the results that have a gradient."""
    single: bool
    """Whether the model gives a tensor, not a tuple."""
    files: Mapping[str, str]
    """Path -> SHA-256."""
    versions: Mapping[str, str]
    """Of dsc, torch and triton."""
    format: int = FORMAT

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def versions() -> dict[str, str]:
    """Of what a folder depends on."""
    found = {"dsc": __version__, "torch": torch.__version__.partition("+")[0]}
    try:
        found["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        found["triton"] = "none"
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load(folder: str | Path, model: nn.Module) -> Callable[..., Any]:
    """``model`` as compiled into ``folder`` by ``dsc compile``: a function of the model's inputs, with gradients.

    The weights are those of ``model``, as they are at each call.

    Raises:
        BadArtifact: no such folder, a file that changed, another target, torch, Triton or model.
    """
    place = Path(folder)
    manifest = read(place)
    check_machine(place, manifest)
    tensors = bound(place, manifest, model)
    device = next((t.device for t in tensors if t is not None), torch.device("cpu"))
    if (device.type == "cuda") != (manifest.capability is not None):
        raise errors.BadArtifact(
            str(place), f"it was compiled for {manifest.target}, and the model is on {device}", "move the model there"
        )
    if manifest.capability is not None:
        fill_triton_cache(place)
    pool, options = Pool(), Options()

    def function(kind: str) -> Callable[[list[object]], tuple[object, ...]]:
        program = portable.loads((place / f"{kind}.program").read_bytes())
        return run.load(program, kernels.launches(program, options), pool, kind)

    if not manifest.training:
        return _inference(manifest, model, function("inference"), place)
    return _training(manifest, model, function("forward"), function("backward"), place)


def read(place: Path) -> Manifest:
    """The manifest, after a look at every file that it names."""
    try:
        data = json.loads((place / MANIFEST).read_text())
        if data.get("format") != FORMAT:
            raise errors.BadArtifact(
                str(place), f"its format is {data.get('format')}, not {FORMAT}", "compile it again with this dsc"
            )
        known = {f.name for f in fields(Manifest)}
        values = {k: v for k, v in data.items() if k in known}
        values["inputs"] = tuple(Input(**{**i, "shape": tuple(i["shape"])}) for i in values["inputs"])
        values["differentiable"] = tuple(values["differentiable"])
        values["capability"] = tuple(values["capability"]) if values["capability"] else None
        manifest = Manifest(**values)
    except FileNotFoundError:
        raise errors.BadArtifact(str(place), f"it has no {MANIFEST}", "give a folder that dsc compile wrote") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as why:
        raise errors.BadArtifact(str(place), f"its {MANIFEST} cannot be read ({why})", "compile it again") from why
    for name, wanted in manifest.files.items():
        file = place / name
        if not file.is_file() or digest(file.read_bytes()) != wanted:
            raise errors.BadArtifact(str(place), f"{name} is missing or not what was written", "compile it again")
    return manifest


def check_machine(place: Path, manifest: Manifest) -> None:
    for name, here in versions().items():
        there = manifest.versions.get(name, "none")
        if there != here and (name != "triton" or manifest.capability is not None):
            raise errors.BadArtifact(
                str(place), f"it was compiled with {name} {there}, and this is {name} {here}", "compile it again here"
            )
    if manifest.capability is None:
        return
    if not torch.cuda.is_available():
        raise errors.BadArtifact(
            str(place),
            f"it needs the GPU that it was compiled for ({manifest.target}), and here is none",
            "move it there",
        )
    here_capability = torch.cuda.get_device_capability()
    if here_capability != manifest.capability:
        raise errors.BadArtifact(
            str(place),
            f"it was compiled for {manifest.target} (sm_{''.join(map(str, manifest.capability))}), and this GPU is "
            f"sm_{''.join(map(str, here_capability))}",
            "compile it for this GPU",
        )


def bound(place: Path, manifest: Manifest, model: nn.Module) -> list[Tensor | None]:
    """The model's own tensor for each input of the programs; None where the caller gives it."""
    own = {"parameter": dict(model.named_parameters()), "buffer": dict(model.named_buffers())}
    out: list[Tensor | None] = []
    for i in manifest.inputs:
        if i.source == "input":
            out.append(None)
            continue
        t = own[i.source].get(i.name)  # type: ignore[attr-defined]
        if t is None:
            raise errors.BadArtifact(
                str(place), f"the model has no {i.source} {i.name!r}, as {manifest.model} had", "give that model"
            )
        if (problem := differs(t, i)) is not None:
            raise errors.BadArtifact(
                str(place), f"{i.source} {i.name!r} is {problem}", "give the model that was compiled"
            )
        out.append(t)
    return out


def differs(t: Tensor, i: Input) -> str | None:
    """``float32[4, 8], and was compiled as ...``, or None."""
    dtype = str(t.dtype).removeprefix("torch.")
    if (dtype, tuple(t.shape)) == (i.dtype, i.shape):
        return None
    return f"{dtype}{list(t.shape)}, and was compiled as {i.dtype}{list(i.shape)}"


def gather(manifest: Manifest, model: nn.Module, args: tuple[object, ...], place: Path) -> list[Tensor]:
    """The tensors of one call, in the order of the programs' inputs."""
    given = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
    tensors = []
    for own, i in zip(bound(place, manifest, model), manifest.inputs):
        if own is None:
            number = int(i.name)
            if number >= len(given):
                raise errors.BadArtifact(str(place), f"the call gives {len(given)} tensors, too few", "give them all")
            own = given[number]
            if (problem := differs(own, i)) is not None:
                raise errors.BadArtifact(str(place), f"input {number} is {problem}", "compile it for these inputs too")
        tensors.append(own)
    return tensors


def _inference(manifest: Manifest, model: nn.Module, call: Any, place: Path) -> Callable[..., Any]:
    def compiled(*args: object) -> Any:
        with torch.no_grad():
            results = call(gather(manifest, model, args, place))
        return results[0] if manifest.single else tuple(results[: manifest.results])

    return compiled


def _training(manifest: Manifest, model: nn.Module, forward: Any, backward: Any, place: Path) -> Callable[..., Any]:
    """The two programs as one function with a gradient, in AOTAutograd's calling convention."""
    fixed = [i for i in range(manifest.results) if i not in manifest.differentiable]

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
            outputs = forward([t.detach() for t in tensors])
            results, saved = outputs[: manifest.results], outputs[manifest.results :]
            ctx.save_for_backward(*saved)
            ctx.mark_non_differentiable(*(results[i] for i in fixed))
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            tangents = [grads[i].contiguous() for i in manifest.differentiable]
            return tuple(backward([*ctx.saved_tensors, *tangents]))

    def compiled(*args: object) -> Any:
        results = Step.apply(*gather(manifest, model, args, place))  # type: ignore[no-untyped-call]
        return results[0] if manifest.single else results

    return compiled


def fill_triton_cache(place: Path) -> None:
    """Triton finds by content what another machine compiled: only copy what its own cache lacks."""
    import triton

    target = Path(triton.knobs.cache.dir)
    for entry in sorted((place / "triton").iterdir()):
        if entry.is_dir() and not (target / entry.name).exists():
            shutil.copytree(entry, target / entry.name)


def text_of(program: Program) -> str:
    """The program to be read: its Python, and what it launches."""
    lines = [f"# run_{i}: {', '.join(c.kernel for c in s)}" for i, s in enumerate(program.sequences)]
    return "\n".join([*lines, "", program.source])


def describe(tensors: Sequence[Tensor], names: Sequence[tuple[str, str]]) -> tuple[Input, ...]:
    """Inputs of a manifest: ``names`` are their sources and names."""
    return tuple(
        Input(source, name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for t, (source, name) in zip(tensors, names, strict=True)
    )
