"""How often ``dsc bisect`` names the right pass and the right node: twenty planted mistakes, one at a time.

    python benchmarks/bisection.py [--model gpt] [--batch 1] [--only 3 7] [--out bisect.json]

The mistakes stand in ``tests/planted.py``: in a joint pass, in a pass on the forward or the backward, or in the
lowering of one operator.  The model is traced once and planned anew with each mistake; seconds are those of the tracing
and of the one search.  On a busy machine, the CPU time of all threads is the better measure.  In the lowering a node
counts as right if it calls the operator whose rule is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import planted  # noqa: E402
from dsc import ops  # noqa: E402
from dsc.debug.bisect import Verdict, examine  # noqa: E402
from dsc.debug.capture import Session, capture  # noqa: E402
from dsc.debug.source import Model  # noqa: E402
from dsc.models.zoo import load  # noqa: E402


@dataclass(frozen=True)
class Row:
    number: int
    mistake: str
    where: str
    found_pass: str
    right_pass: bool
    broken: str
    found_node: str
    right_node: bool
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Captured:
    session: Session
    seconds: float
    cpu_seconds: float


def captured(model: Model) -> Captured:
    begun = time.perf_counter(), time.process_time()
    session = capture(model, "cpu", keep_values=True, on_host=True)
    return Captured(session, time.perf_counter() - begun[0], time.process_time() - begun[1])


def measure(number: int, start: Captured) -> Row:
    mistake = planted.MISTAKES[number]
    begun = time.perf_counter(), time.process_time()
    with planted.planted(number) as options:
        verdict = examine(planted.planned_again(start.session, options))
    seconds, cpu_seconds = time.perf_counter() - begun[0], time.process_time() - begun[1]
    found = verdict.finding
    return Row(
        number,
        mistake.title,
        f"{mistake.by}/{mistake.graph}",
        f"{found.pass_name}/{found.graph}" if found else "none",
        found is not None and (found.pass_name, found.graph) == (mistake.by, mistake.graph),
        mistake.op or planted.BROKEN[0],
        found.node if found else "",
        is_right(mistake, verdict),
        start.seconds + seconds,
        start.cpu_seconds + cpu_seconds,
    )


def is_right(mistake: planted.Mistake, verdict: Verdict) -> bool:
    """Whether the node is the broken one."""
    if verdict.finding is None:
        return False
    if not mistake.op:
        return [verdict.finding.node] == planted.BROKEN[:1]
    stages = verdict.session.regions[0].of(mistake.graph)
    node = next((n for n in stages[-1].gm.graph.nodes if n.name == verdict.finding.node), None)
    return node is not None and ops.name_of(node) == mistake.op


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--batch", type=int, help="samples; the model's own number by default")
    parser.add_argument("--only", type=int, nargs="*", default=range(len(planted.MISTAKES)))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    entry = load(arguments.model)
    start = captured(Model(entry.name, entry.build(), entry.inputs(arguments.batch)))
    rows = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {entry.name}")
    print(f"{'':2} {'mistake in':22} {'found in':22} {'':3} {'broken':50} {'found':50} {'':3} {'s':>5} {'CPU s':>5}")
    for number in arguments.only:
        row = measure(number, start)
        rows.append(row)
        passes, nodes = ("yes" if right else "NO" for right in (row.right_pass, row.right_node))
        print(
            f"{row.number:2} {row.where:22} {row.found_pass:22} {passes:3} {row.broken[-50:]:50} {row.found_node[-50:]:50} "
            f"{nodes:3} {row.seconds:5.1f} {row.cpu_seconds:5.1f}  {row.mistake}",
            flush=True,
        )
    print(
        f"right pass {sum(r.right_pass for r in rows)} of {len(rows)}, "
        f"right node {sum(r.right_node for r in rows)} of {len(rows)}, at most {max(r.seconds for r in rows):.1f} s "
        f"({max(r.cpu_seconds for r in rows):.1f} s of CPU, all threads)"
    )
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(r) for r in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
