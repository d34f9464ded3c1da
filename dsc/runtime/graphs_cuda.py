"""Recording on a GPU: a CUDA graph for each recording, with a memory pool of its own.

Pools are not shared: a recording may be replayed while results of another are in use.  The default generator is
registered with every graph by torch, and moves on at each replay as it would have without.
No GPU has run this file yet: ``cuda_graphs`` is off unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsc.torch_shim import raw_stream


@dataclass(frozen=True)
class CudaRecorder:
    device: torch.device

    def stream(self) -> int:
        return raw_stream(self.device.index if self.device.index is not None else torch.cuda.current_device())

    def record(self, run: Callable[[], tuple[object, ...]]) -> tuple[tuple[object, ...], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do meanwhile, such as loading data, does not spoil the recording
        with torch.cuda.device(self.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run()
        return results, graph.replay
