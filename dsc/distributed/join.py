"""How a process joins the others of a pipeline, and what it says when one of them is gone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dsc.errors import DscError, RankLost, StageFailed

LOST = ("Connection closed", "Connection reset", "Broken pipe", "unhandled system error", "remote process", "Timed out")
"""Words of gloo and NCCL when the other side is gone."""


def own_device() -> torch.device:
    """The GPU that torchrun gave to this process, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def start_processes(device: torch.device, timeout: float) -> None:
    """Join the other processes, unless the script did already: NCCL for GPUs, gloo for CPUs.

    After a restart torchrun hands out the store of the attempt before, with the addresses of processes that are gone:
    each attempt gets keys of its own.
    """
    if dist.is_initialized():
        return
    limit = timedelta(seconds=timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, world = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend, store=PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=world, timeout=limit
    )


@contextmanager
def failures(doing: str) -> Iterator[None]:
    """Errors of the runtime as one sentence that names the rank and what it was doing."""
    log, quiet = logging.getLogger("torch.distributed.pipelining.schedules"), logging.Filter("nobody")
    log.addFilter(quiet)  # it would print the whole schedule; the error says what to know
    try:
        yield
    except DscError:
        raise
    except Exception as why:
        line = (str(why.__cause__ or why).strip().splitlines() or [type(why).__name__])[0]
        rank = dist.get_rank()
        if any(word in str(why) for word in LOST):
            raise RankLost(rank, doing, line) from why
        raise StageFailed(rank, doing, f"{type(why.__cause__ or why).__name__}: {line}") from why
    finally:
        log.removeFilter(quiet)
