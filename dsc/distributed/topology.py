"""Which card does what, and what sums over replicas cost: the heaviest traffic takes the fastest links.

Tensor parallelism sums values of every layer, so its groups are neighbours in a node.  Stages send something for every
micro-batch, replicas sum gradients once a step: whichever is more traffic gets the nearer cards.
"""

from __future__ import annotations

from dsc.distributed.cluster import Cluster
from dsc.distributed.plan import Degrees


def words(d: Degrees) -> str:
    """``2 replicas x 4 stages x 8 tensor``."""
    parts = [
        f"{d.data} replicas" if d.data > 1 else "",
        f"{d.pipeline} stage{'s' if d.pipeline > 1 else ''}",
        f"{d.tensor} tensor" if d.tensor > 1 else "",
    ]
    extra = [f"{d.expert} expert" if d.expert > 1 else "", f"ZeRO-{d.zero}" if d.zero else ""]
    extra.append("replicas side by side" if d.near == "replicas" else "")
    return " x ".join(p for p in parts if p) + "".join(f", {e}" for e in extra if e)


def devices(degrees: Degrees) -> tuple[int, ...]:
    """The card of each pipeline rank, of the first replica and the first of its tensor-parallel group."""
    apart = degrees.tensor * (degrees.data if degrees.near == "replicas" else 1)
    return tuple(rank * apart for rank in range(degrees.pipeline))


def peers(degrees: Degrees) -> tuple[int, ...]:
    """The cards that hold the same stages as the first one: its replicas."""
    apart = degrees.tensor * (degrees.pipeline if degrees.near == "stages" else 1)
    return tuple(replica * apart for replica in range(degrees.data))


def reduce_seconds(nbytes: float, degrees: Degrees, cluster: Cluster) -> float:
    """Of the sum of ``nbytes`` of gradients over replicas: a ring over the slowest link between them."""
    if degrees.data == 1:
        return 0.0
    one_machine = len({p // cluster.per_node for p in peers(degrees)}) == 1
    link = cluster.inside if one_machine else cluster.between
    return 2 * (degrees.data - 1) / degrees.data * link.seconds(nbytes)
