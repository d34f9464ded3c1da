"""``FILE.py:NAME``: a module class, a module, or a function, with its inputs from the same file or from the user."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from dsc.debug.load import inputs as texts
from dsc.debug.source import Called, Model
from dsc.errors import BadInput, BadModel


def load(spec: str, given: Sequence[str] = ()) -> Model:
    """The object that ``spec`` names.

    1. A class derived from ``nn.Module`` is made without arguments; an instance is taken as it is.
    2. A function without parameters that gives a module makes the model; any other function is the model.
    3. Inputs are those ``given``, else those of ``inputs`` in the file: a function or a value; one value, a tuple of
       the arguments, or a dictionary of them by name.

    Raises:
        BadModel: no such file, the file raises, it has no such name, or that is no model.
        BadInput: there are none, or they cannot be read.
    """
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py"):
        file, name = spec, ""
    module = execute(file, spec)
    found = module_of(spec, pick(module, spec, name))
    if given:
        return Model(spec, found, from_user(given, found))
    if not hasattr(module, "inputs"):
        if takes_nothing(found):
            return Model(spec, found, ())
        raise BadInput("", f"{Path(file).name} has no function inputs() that gives them")
    return Model(spec, found, arguments(found, values(module.inputs, f"{file}:inputs")))


def from_user(given: Sequence[str], module: nn.Module) -> tuple[object, ...]:
    """Texts, or one ``FILE.py:FUNCTION`` that gives all inputs.  Those of a function take part in the backward."""
    if len(given) == 1 and ".py:" in given[0]:
        file, _, name = given[0].rpartition(":")
        return arguments(module, values(pick(execute(file, given[0]), given[0], name), given[0]))
    return texts.parse(given, grad=isinstance(module, Called))


def execute(file: str, spec: str) -> ModuleType:
    """The file as a module, run once a process; what lies beside it can be imported, as when Python runs it."""
    path = Path(file).resolve()
    if not path.is_file():
        raise BadModel(spec, f"there is no file {file}", "check the path")
    name = f"dsc_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    described = importlib.util.spec_from_file_location(name, path)
    assert described is not None and described.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(described)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    sys.path.insert(0, str(path.parent))
    try:
        described.loader.exec_module(module)
    except (Exception, SystemExit) as why:
        sys.modules.pop(name, None)
        raise BadModel(spec, f"the file raises {described_error(why, str(path))}", "correct the file") from why
    finally:
        sys.path.remove(str(path.parent))
    return module


def described_error(why: BaseException, file: str) -> str:
    """``NameError: name 'x' is not defined, at line 3``."""
    words = why.msg if isinstance(why, SyntaxError) else str(why).strip().split("\n")[0].rstrip(".")
    lines = [f.lineno for f in traceback.extract_tb(why.__traceback__) if f.filename == file]
    line = why.lineno if isinstance(why, SyntaxError) else lines[-1] if lines else None
    return f"{type(why).__name__}: {words}" + (f", at line {line}" if line else "")


def pick(module: ModuleType, spec: str, name: str) -> object:
    """What the file calls ``name``."""
    own = [n for n, v in vars(module).items() if not n.startswith("_") and is_model(v, module) and n != "inputs"]
    if name and hasattr(module, name):
        return getattr(module, name)
    if not name:
        example = f"{spec}:{own[0]}" if own else "a file that defines a model"
        raise BadModel(spec, "it does not say which model of the file", f"give {example}")
    close = difflib.get_close_matches(name, own, n=1)
    instead = f"did you mean {close[0]!r}" if close else f"it has {', '.join(own)}" if own else "it defines no model"
    raise BadModel(spec, f"the file defines no {name!r}", instead)


def is_model(value: object, module: ModuleType) -> bool:
    if isinstance(value, (type, FunctionType)) and value.__module__ != module.__name__:
        return False
    return isinstance(value, (nn.Module, FunctionType)) or (isinstance(value, type) and issubclass(value, nn.Module))


def module_of(spec: str, value: object) -> nn.Module:
    """The module that a class, an instance or a function stands for; its weights are the same every time."""
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, type) and issubclass(value, nn.Module):
        module: nn.Module = made(spec, value)
        return module
    if isinstance(value, type) or not callable(value):
        kind = "is a class that is no nn.Module" if isinstance(value, type) else f"has type {type(value).__name__}"
        raise BadModel(spec, f"it {kind}", "name a module or a function")
    if not inspect.signature(value).parameters and isinstance(result := made(spec, value), nn.Module):
        return result
    return Called(value)


def made(spec: str, make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return make()
        except Exception as why:
            problem = f"making it raises {type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}"
            raise BadModel(spec, problem, "name a function without parameters that makes the module") from why


def takes_nothing(module: nn.Module) -> bool:
    target = module.function if isinstance(module, Called) else module.forward
    return not inspect.signature(target).parameters


def values(source: object, spec: str) -> object:
    """What ``inputs`` gives if it is a function, or is."""
    if not callable(source) or isinstance(source, torch.Tensor):
        return source
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return source()
        except Exception as why:
            raise BadModel(spec, f"it raises {type(why).__name__}: {why}", "let it give the inputs as a tuple") from why


def arguments(module: nn.Module, given: object) -> tuple[object, ...]:
    """A dictionary, a tuple or list, or a single value, as positional arguments."""
    if isinstance(given, Mapping):
        target = module.function if isinstance(module, Called) else module.forward
        try:
            bound = inspect.signature(target).bind(**given)
        except TypeError as why:
            raise BadInput("inputs()", str(why)) from why
        bound.apply_defaults()
        return bound.args
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)
