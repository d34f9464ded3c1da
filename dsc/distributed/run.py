"""``torchrun --nproc-per-node 4 -m dsc.distributed.run script.py [arguments]``: a script on every rank, errors said once.

The processes have joined when the script starts: over NCCL where every one has a GPU, else over gloo.  A rank that fails
says why in a line, and torchrun ends the others, or starts all again with ``--max-restarts``.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

from dsc.distributed.join import own_device, start_processes
from dsc.errors import DscError

USAGE = "usage: torchrun --nproc-per-node N -m dsc.distributed.run [--timeout SECONDS] SCRIPT [ARGUMENTS]"
TIMEOUT = 600.0


def arguments(given: list[str]) -> tuple[float, list[str]]:
    """Seconds after which a silent rank counts as dead, and the script with its own arguments."""
    if given[:1] == ["--timeout"] and len(given) > 1:
        return float(given[1]), given[2:]
    return TIMEOUT, given


@record
def main() -> None:
    timeout, script = arguments(sys.argv[1:])
    if not script or script[0].startswith("-") or "RANK" not in os.environ:
        sys.exit(USAGE)
    start_processes(own_device(), timeout)
    sys.argv = script
    sys.path[0] = os.path.dirname(os.path.abspath(script[0]))
    try:
        runpy.run_path(script[0], run_name="__main__")
    except DscError as why:
        sys.stderr.write(f"dsc: {why}\n")
        stop(why)
    except Exception as why:
        sys.excepthook(type(why), why, why.__traceback__)
        stop(why)
    dist.destroy_process_group()


def stop(why: Exception) -> None:
    """End this process at once: the usual way out waits for ranks that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    get_error_handler().record_exception(why)
    os._exit(1)


if __name__ == "__main__":
    main()
