"""What can go wrong, a class per mistake, a file per field.  Every message is in its class, and says what to do next."""

from __future__ import annotations

from dsc.errors.base import DscError as DscError
from dsc.errors.base import DscWarning as DscWarning
from dsc.errors.base import nearest as nearest
from dsc.errors.base import size as size
from dsc.errors.compiling import CacheUnusable as CacheUnusable
from dsc.errors.compiling import CodegenFailed as CodegenFailed
from dsc.errors.compiling import CompilerMissing as CompilerMissing
from dsc.errors.compiling import InvalidGraph as InvalidGraph
from dsc.errors.compiling import LeftToATen as LeftToATen
from dsc.errors.compiling import LeftToEager as LeftToEager
from dsc.errors.compiling import ModelFailed as ModelFailed
from dsc.errors.compiling import PassFailed as PassFailed
from dsc.errors.compiling import TritonMissing as TritonMissing
from dsc.errors.looking import BadArchive as BadArchive
from dsc.errors.looking import BadArtifact as BadArtifact
from dsc.errors.looking import BadCrash as BadCrash
from dsc.errors.looking import BadGraphFile as BadGraphFile
from dsc.errors.looking import BadInput as BadInput
from dsc.errors.looking import BadModel as BadModel
from dsc.errors.looking import BadTrace as BadTrace
from dsc.errors.looking import CpuOnly as CpuOnly
from dsc.errors.looking import NotReduced as NotReduced
from dsc.errors.looking import TraceUnwritable as TraceUnwritable
from dsc.errors.looking import UnknownModel as UnknownModel
from dsc.errors.looking import UnknownNode as UnknownNode
from dsc.errors.looking import Unsaveable as Unsaveable
from dsc.errors.looking import Untraceable as Untraceable
from dsc.errors.memory import BadPlan as BadPlan
from dsc.errors.memory import InfeasibleBudget as InfeasibleBudget
from dsc.errors.options import BadOption as BadOption
from dsc.errors.options import BadPassOrder as BadPassOrder
from dsc.errors.options import BadPlugin as BadPlugin
from dsc.errors.options import OptionNotYet as OptionNotYet
from dsc.errors.options import UnknownOption as UnknownOption
from dsc.errors.options import UnknownPass as UnknownPass
from dsc.errors.options import UnknownTarget as UnknownTarget
from dsc.errors.pipeline import BadCluster as BadCluster
from dsc.errors.pipeline import BadMicrobatches as BadMicrobatches
from dsc.errors.pipeline import ClusterTooSmall as ClusterTooSmall
from dsc.errors.pipeline import PipelineTooLarge as PipelineTooLarge
from dsc.errors.pipeline import TooManyStages as TooManyStages
from dsc.errors.pipeline import UnknownSchedule as UnknownSchedule
from dsc.errors.state import BadState as BadState
