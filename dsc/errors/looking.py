"""Models, files and nodes that the command line and the debug tools are given."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dsc.errors.base import DscError, nearest


@dataclass(eq=False, repr=False)
class BadGraphFile(DscError):
    """A saved graph that cannot be read."""

    problem: str

    def __str__(self) -> str:
        return f"The saved graph cannot be read: {self.problem.rstrip('.')}; save it again with this version of dsc and torch."


@dataclass(eq=False, repr=False)
class BadArchive(DscError):
    """A file of exported kernels that cannot be read or written."""

    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path} cannot serve as an archive of kernels: {self.problem}; make one by dsc cache --export FILE."
        )


@dataclass(eq=False, repr=False)
class BadCrash(DscError):
    """A file that is not a saved crash."""

    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path} is not a crash that can be replayed: {self.problem}; give the .json file beside the .txt one."
        )


@dataclass(eq=False, repr=False)
class BadTrace(DscError):
    """A file that is not a trace, or one that this version cannot read."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path} is not a trace that can be read: {self.problem}; record one by dsc.trace(...) or DSC_TRACE=folder."


@dataclass(eq=False, repr=False)
class TraceUnwritable(DscError):
    """A trace that cannot be written where the user wants it."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"The trace {self.path} cannot be written: {self.reason}; name a file or folder that you can write."


@dataclass(eq=False, repr=False)
class UnknownModel(DscError):
    """A MODEL that is neither a name of the zoo nor one of the other forms."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.name!r} is not a model: {nearest(self.name, self.known).rstrip('.')} "
            "Or give FILE.py:NAME, FILE.pt2, FILE.onnx or hf:CONFIG.json."
        )


@dataclass(eq=False, repr=False)
class BadModel(DscError):
    """A file, or something in it, that cannot serve as a model."""

    spec: str
    problem: str
    instead: str

    def __str__(self) -> str:
        return f"{self.spec} cannot be used: {self.problem.rstrip('.')}; {self.instead}."


@dataclass(eq=False, repr=False)
class BadInput(DscError):
    """An ``--input`` that cannot be read, or none where one is needed."""

    text: str
    problem: str

    def __str__(self) -> str:
        what = f"Input {self.text!r} cannot be used" if self.text else "Inputs are missing"
        return (
            f"{what}: {self.problem}; write --input f32[4,128], i64[4,16]<1000 for indices below 1000, a number, "
            "or FILE.py:FUNCTION for a function that gives them all."
        )


@dataclass(eq=False, repr=False)
class UnknownNode(DscError):
    """A node that no graph of the model has."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        close = difflib.get_close_matches(self.name, self.known, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "dsc show prints them."
        return f"No graph has a node {self.name!r}; {hint}"


@dataclass(eq=False, repr=False)
class NotReduced(DscError):
    """No script can be made of a failure, or there is no failure."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"Nothing can be cut out of {self.what}: {self.reason}; dsc bisect says what is known."


@dataclass(eq=False, repr=False)
class Untraceable(DscError):
    """Something in the user's model that cannot be put into a graph."""

    what: str
    reason: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what} cannot be traced: {self.reason}; {self.instead}."


@dataclass(eq=False, repr=False)
class CpuOnly(DscError):
    """An operator of a graph traced on a CPU that no other device has."""

    op: str
    node: str
    device: str

    def __str__(self) -> str:
        return (
            f"The model cannot be planned for {self.device} from here: node {self.node!r} calls {self.op}, which only "
            "CPUs have; trace it on a machine with that device, or write that part in other operators."
        )


@dataclass(eq=False, repr=False)
class BadArtifact(DscError):
    """A compiled model that cannot be run here."""

    folder: str
    reason: str
    instead: str

    def __str__(self) -> str:
        return f"{self.folder} cannot be loaded: {self.reason}; {self.instead}."


@dataclass(eq=False, repr=False)
class Unsaveable(DscError):
    """A model that compiles, but not into a folder."""

    model: str
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.model} cannot be saved: {self.reason}; compile it where it runs, by torch.compile(backend='dsc')."
        )
