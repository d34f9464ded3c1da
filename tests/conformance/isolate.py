"""Programs in processes of their own, a few at a time: one that crashes or hangs is a failure, not the end.

Each process is forked from this one, which has imported what they need and has run nothing, so a start costs little.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from conformance.outcome import Outcome

Task = Callable[[], Outcome]


@dataclass
class Child:
    index: int
    pid: int
    pipe: int
    log: IO[str]
    started: float
    answer: bytes = b""


def run_all(tasks: Sequence[Task], width: int, timeout: float) -> Iterator[tuple[int, Outcome]]:
    """Outcomes as they come, each with the place of its task.  At most ``width`` run at once, ``timeout`` seconds each."""
    waiting = iter(enumerate(tasks))
    children: dict[int, Child] = {}
    with selectors.DefaultSelector() as selector:
        try:
            while True:
                while len(children) < width and (task := next(waiting, None)) is not None:
                    child = start(*task)
                    children[child.pipe] = child
                    selector.register(child.pipe, selectors.EVENT_READ)
                if not children:
                    return
                ended = []
                for key, _ in selector.select(0.2):
                    child = children[key.fd]
                    part = os.read(child.pipe, 1 << 16)
                    child.answer += part
                    if not part:
                        ended.append(child)
                now = time.monotonic()
                ended += [c for c in children.values() if now - c.started > timeout and c not in ended]
                for child in ended:
                    selector.unregister(child.pipe)
                    del children[child.pipe]
                    yield child.index, finish(child, timeout)
        finally:
            for child in children.values():
                finish(child, 0.0)


def start(index: int, task: Task) -> Child:
    reader, writer = os.pipe()
    log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by finish
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        inside(task, writer, log)
    os.close(writer)
    return Child(index, pid, reader, log, time.monotonic())


def inside(task: Task, writer: int, log: IO[str]) -> None:
    """The child's whole life: it never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        begin = time.perf_counter()
        outcome = task()
        answer = pickle.dumps(replace(outcome, seconds=time.perf_counter() - begin))
        with os.fdopen(writer, "wb") as out:
            out.write(answer)
        code = 0
    except BaseException as e:
        os.write(log.fileno(), f"\n{type(e).__name__}: {e}\n".encode())
    finally:
        os._exit(code)


def finish(child: Child, timeout: float) -> Outcome:
    """Its answer, or what became of it.  Everything that it started is ended."""
    late = time.monotonic() - child.started > timeout
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL) if late else None
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pipe)
    seconds = time.monotonic() - child.started
    with child.log as log:
        if child.answer and not late:
            answer: Any = pickle.loads(child.answer)
            return answer if isinstance(answer, Outcome) else Outcome(failures=("no outcome",))
        log.seek(0)
        last = (log.read().strip().splitlines() or ["it said nothing"])[-1][:300]
    if late:
        why = f"did not end in {timeout:.0f} s"
    elif os.WIFSIGNALED(status):
        why = f"killed by {signal.Signals(os.WTERMSIG(status)).name}: {last}"
    else:
        why = last
    return Outcome(failures=(why,), seconds=seconds)
