"""``FILE.pt2``: a program of ``torch.export``, on the inputs that it was exported with."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from dsc.debug.load.python import from_user
from dsc.debug.source import Keyworded, Model
from dsc.errors import BadInput, BadModel


def load(file: str, given: Sequence[str] = ()) -> Model:
    """The program as a module that can be trained.

    Raises:
        BadModel: no such file, or no exported program.
        BadInput: the program kept no inputs, and none are given.
    """
    if not Path(file).is_file():
        raise BadModel(file, "there is no such file", "check the path")
    instead = "save one by torch.export.save(torch.export.export(module, inputs), FILE)"
    if not zipfile.is_zipfile(file):  # torch would log a page
        raise BadModel(file, "it is no exported program, or the end of it is missing", instead)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(file)
            module = program.module()
    except Exception as why:
        words = str(why).strip().splitlines()[0][:120] if str(why).strip() else ""
        raise BadModel(file, f"this torch cannot read it ({type(why).__name__}: {words})", instead) from why
    if given:
        return Model(file, module, from_user(given, module))
    if program.example_inputs is None:
        raise BadInput("", f"{Path(file).name} does not hold those that it was exported with")
    args, kwargs = program.example_inputs
    if kwargs:
        return Model(file, Keyworded(module, tuple(kwargs)), (*args, *kwargs.values()))
    return Model(file, module, tuple(args))
