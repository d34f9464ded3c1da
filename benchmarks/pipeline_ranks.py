"""Ranks of a pipeline on this machine, for the benchmarks: children of a process that has imported everything already."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsc.errors import DscWarning


def run(world: int, work: Callable[..., Any], *args: Any, seconds: float = 1800.0) -> list[Any]:
    """``work(*args)`` on ``world`` processes that are joined over gloo; what each returns, by rank.

    Raises:
        RuntimeError: with the traceback of the first rank that failed.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        ranks = [
            context.Process(target=_rank, args=(r, world, folder, queue, work, args), daemon=True) for r in range(world)
        ]
        for p in ranks:
            p.start()
        found: dict[int, Any] = {}
        try:
            while len(found) < world:
                rank, good, value = queue.get(timeout=seconds)
                if not good:
                    raise RuntimeError(f"rank {rank}: {value}")
                found[rank] = value
        finally:
            for p in ranks:
                p.kill() if len(found) < world else p.join(10)
    return [found[r] for r in range(world)]


def _rank(rank: int, world: int, folder: str, queue: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("error", category=DscWarning)  # what was left to ATen is no compiled run
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    try:
        queue.put((rank, True, work(*args)))
        queue.close()
        queue.join_thread()
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
        queue.close()
        queue.join_thread()
        os._exit(1)
    os._exit(0)
