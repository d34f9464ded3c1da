"""Where the numbers of a controller can go: callbacks for TensorBoard and Prometheus.

controller = dsc.PrecisionController(callback=tensorboard("runs/first"))
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from dsc.errors import BadControl

Callback = Callable[[int, Mapping[str, float]], None]


def tensorboard(folder: str) -> Callback:
    """Scalars in event files.

    Raises:
        BadControl: tensorboard is not installed.
    """
    writer = _imported("torch.utils.tensorboard").SummaryWriter(folder)

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(f"dsc/{name}", value, step)
        writer.flush()

    return write


def prometheus(registry: Any = None, port: int | None = None) -> Callback:
    """Gauges ``dsc_noise{product="mlp.up.forward"}``, served under ``port`` if one is given.

    Raises:
        BadControl: prometheus_client is not installed.
    """
    client = _imported("prometheus_client")
    registry = registry or client.REGISTRY
    gauges: dict[str, Any] = {}
    if port is not None:
        client.start_http_server(port, registry=registry)

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in {**numbers, "step": float(step)}.items():
            product, _, what = name.rpartition("/")
            key = "dsc_" + re.sub(r"\W", "_", what)
            labels = ("product",) if product else ()
            if key not in gauges:
                gauges[key] = client.Gauge(key, f"{what}, from dsc's precision controller", labels, registry=registry)
            (gauges[key].labels(product) if product else gauges[key]).set(value)

    return write


def both(*callbacks: Callback) -> Callback:
    """One callback that calls several."""

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for c in callbacks:
            c(step, numbers)

    return write


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as why:
        raise BadControl(f"{name} cannot be imported", "pip install 'dsc-compiler[metrics]'") from why
