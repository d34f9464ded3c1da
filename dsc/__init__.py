"""dsc: a training compiler for PyTorch.

``torch.compile(model, backend="dsc", options={...})`` needs no import of this package.
The names below are imported when first used, so that ``import dsc`` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsc import sparsity as sparsity
    from dsc.artifact import load as load
    from dsc.debug.tracing import trace as trace
    from dsc.distributed.cluster import Cluster as Cluster
    from dsc.distributed.pipeline import Pipeline as Pipeline
    from dsc.distributed.pipeline import pipeline as pipeline
    from dsc.distributed.plan import PipelinePlan as PipelinePlan
    from dsc.distributed.planner import plan_pipeline as plan_pipeline
    from dsc.errors import DscError as DscError
    from dsc.errors import DscWarning as DscWarning
    from dsc.manager import Pass as Pass
    from dsc.manager import Remark as Remark
    from dsc.manager import Report as Report
    from dsc.precision.controller import PrecisionController as PrecisionController
    from dsc.precision.plan import PrecisionPlan as PrecisionPlan
    from dsc.runtime.state import State as State
    from dsc.target import Target as Target
    from dsc.watch import Watcher as Watcher
    from dsc.watch import watching as watching

__version__ = "0.1.0"

_HOMES = {
    "load": "dsc.artifact",
    "trace": "dsc.debug.tracing",
    "Cluster": "dsc.distributed.cluster",
    "PipelinePlan": "dsc.distributed.plan",
    "plan_pipeline": "dsc.distributed.planner",
    "Pipeline": "dsc.distributed.pipeline",
    "pipeline": "dsc.distributed.pipeline",
    "DscError": "dsc.errors",
    "DscWarning": "dsc.errors",
    "Pass": "dsc.manager",
    "Remark": "dsc.manager",
    "Report": "dsc.manager",
    "PrecisionController": "dsc.precision.controller",
    "PrecisionPlan": "dsc.precision.plan",
    "State": "dsc.runtime.state",
    "Target": "dsc.target",
    "Watcher": "dsc.watch",
    "watching": "dsc.watch",
}


_MODULES = ("sparsity",)


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"dsc.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
