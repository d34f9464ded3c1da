"""Sparse training seen from outside of graphs: telemetry, density, decay, and what remains at the end.

All of it reads and writes a ``dsc.State`` that was given to ``torch.compile(..., options={"sparsity": ..., "state": s})``.
Nothing here makes anything compile again, but ``compact``, which changes shapes.
"""

from __future__ import annotations

from dsc.sparsity.channels import Channels as Channels
from dsc.sparsity.channels import compact as compact
from dsc.sparsity.channels import gate as gate
from dsc.sparsity.control import DECAYS as DECAYS
from dsc.sparsity.control import balance as balance
from dsc.sparsity.control import densify as densify
from dsc.sparsity.control import estimate_hessian as estimate_hessian
from dsc.sparsity.control import probe_decay as probe_decay
from dsc.sparsity.control import set_decay as set_decay
from dsc.sparsity.export import finalize as finalize
from dsc.sparsity.telemetry import Layer as Layer
from dsc.sparsity.telemetry import Telemetry as Telemetry
from dsc.sparsity.telemetry import read as read
from dsc.sparsity.telemetry import tell as tell
