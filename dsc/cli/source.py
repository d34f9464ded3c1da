"""What a user means by MODEL: a name of the zoo, a file, or a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsc.cli.app import progress
from dsc.errors import BadModel, BadOption, UnknownModel

if TYPE_CHECKING:
    from dsc.debug.capture import Session
    from dsc.debug.source import Model
    from dsc.options import Options


def find(spec: str, inputs: Sequence[str] = ()) -> Model:
    """The model that ``spec`` names, on ``inputs`` such as ``f32[4,128]`` where they are given.

    Raises:
        UnknownModel: no name of the zoo, and none of the other forms.
        BadModel, BadInput: what the form that it has cannot use.
    """
    if spec.startswith("hf:"):
        from dsc.debug.load import huggingface

        return huggingface.load(spec, inputs)
    if spec.endswith(".pt2"):
        from dsc.debug.load import exported

        return exported.load(spec, inputs)
    if spec.endswith(".onnx"):
        from dsc.debug.load import onnx

        return onnx.load(spec, inputs)
    if spec.endswith(".py") or ".py:" in spec:
        from dsc.debug.load import python

        return python.load(spec, inputs)
    return from_zoo(spec, inputs)


def from_zoo(name: str, inputs: Sequence[str]) -> Model:
    """A model of ``dsc.models``, in any case of its name."""
    from dsc.debug.load.python import from_user
    from dsc.debug.source import Model
    from dsc.models.zoo import ZOO

    entry = ZOO.get(name.lower())
    if entry is None:
        raise UnknownModel(name, tuple(ZOO))
    module = entry.build()
    return Model(entry.name, module, from_user(inputs, module) if inputs else entry.inputs())


def captured(
    spec: str,
    inputs: Sequence[str] | None = None,
    target: str | None = None,
    *,
    training: bool = True,
    options: Options | None = None,
    dtype: str | None = None,
) -> Session:
    """What became of the model ``spec`` on ``target``, or what a trace of such a compilation recorded.

    Raises:
        UnknownModel, BadModel, BadInput, ModelFailed: of the model.
        BadTrace: no trace can be read.
        BadModel, BadOption: passes, a target, inputs or a dtype for a trace, which has its own.
    """
    if is_trace(spec):
        from dsc.debug import trace

        if options is not None:
            raise BadModel(spec, "it is a trace, whose passes have run", "give the model")
        recorded = trace.read(spec)
        for remark in recorded.remarks:
            progress().print(remark, style="yellow", highlight=False, markup=False)
        session = trace.session_of(recorded)
        if target is not None and target.lower() != session.target.name:
            raise BadOption(
                "--target", target, f"{session.target.name}, for which {spec} was recorded, or leave it out"
            )
        if inputs:
            raise BadOption("--input", " ".join(inputs), f"none: {spec} holds what was recorded")
        if dtype is not None:
            raise BadOption("--dtype", dtype, f"none: {spec} holds what was recorded")
        return session
    from dsc.debug.capture import capture

    return capture(in_dtype(find(spec, inputs or ()), dtype), target or "cpu", options, training=training)


def in_dtype(model: Model, dtype: str | None) -> Model:
    """The model with floating-point weights and inputs of ``dtype``: f64, f32, bf16 or f16; None leaves them.

    Raises:
        BadOption: another name.
    """
    if dtype is None:
        return model
    import torch

    from dsc.torch_shim import FakeTensor

    known = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
    if (wanted := known.get(dtype)) is None:
        raise BadOption("--dtype", dtype, f"a dtype of floating-point numbers: {', '.join(known)}")
    args = tuple(a.to(wanted) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in model.args)
    if any(isinstance(p, FakeTensor) for p in model.module.parameters()):
        from dsc.debug.shapes import cast

        cast(model.module, wanted)
        return replace(model, args=args)
    return replace(model, module=model.module.to(wanted), args=args)


def is_trace(spec: str) -> bool:
    """A file of ``dsc.trace``, or a folder of ``DSC_TRACE``."""
    return spec.endswith(".trace") or Path(spec).is_dir()
