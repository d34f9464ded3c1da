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
        f"{d.pipeline} stages",
        f"{d.tensor} tensor" if d.tensor > 1 else "",
    ]
    extra = [f"{d.expert} expert" if d.expert > 1 else "", f"ZeRO-{d.zero}" if d.zero else ""]
    return " x ".join(p for p in parts if p) + "".join(f", {e}" for e in extra if e)


def devices(degrees: Degrees, cluster: Cluster) -> tuple[int, ...]:
    """The card of each pipeline rank, of the first replica and the first of its tensor-parallel group.

    Tensor-parallel groups are neighbours; pipeline ranks follow each other through the nodes, and replicas come last:
    between stages something is sent for every micro-batch, between replicas once a step.
    """
    return tuple(rank * degrees.tensor for rank in range(degrees.pipeline))


def peers(degrees: Degrees, cluster: Cluster) -> list[int]:
    """The cards that hold the same stages as the first one, its replicas."""
    return [replica * degrees.pipeline * degrees.tensor for replica in range(degrees.data)]


def reduce_seconds(nbytes: float, degrees: Degrees, cluster: Cluster) -> float:
    """Of the sum of ``nbytes`` of gradients over replicas: a ring over the slowest link between them."""
    if degrees.data == 1:
        return 0.0
    places = peers(degrees, cluster)
    one_machine = len({p // cluster.per_node for p in places}) == 1
    link = cluster.inside if one_machine else cluster.between
    return 2 * (degrees.data - 1) / degrees.data * link.seconds(nbytes)
