"""A cluster as data: which cards, how many a node, and what links them.

Link rates are one way, per card, as NVIDIA's datasheets and the DGX manuals print them: third-generation NVLink of an
A100 300 GB/s, fourth-generation of an H100 or H200 450 GB/s, a network card for each GPU at 200 Gb/s (HDR, DGX A100)
or 400 Gb/s (NDR, DGX H100).  ``EFFICIENCY`` of a rate is what one large message reaches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsc import target as targets
from dsc.errors import BadCluster
from dsc.target import Target

EFFICIENCY = 0.85
PER_NODE = 8
"""Cards of one node, where a text asks for more than that without saying how many nodes."""

SPEC = re.compile(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*x\s*([a-z][\w-]*?)(?:@([a-z]+)(\d+(?:\.\d+)?)?)?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Link:
    """What carries bytes between two cards."""

    name: str
    bandwidth: float
    """Bytes per second, one way."""
    latency: float
    """Seconds."""

    def seconds(self, nbytes: float) -> float:
        """Of one message."""
        return self.latency + nbytes / (self.bandwidth * EFFICIENCY) if nbytes else 0.0


NVLINK3 = Link("NVLink", 300e9, 4e-6)
NVLINK4 = Link("NVLink", 450e9, 4e-6)
LOOPBACK = Link("loopback", 2e9, 50e-6)
INSIDE: Mapping[str, Link] = {"a100-40": NVLINK3, "a100": NVLINK3, "h100": NVLINK4, "h200": NVLINK4, "cpu": LOOPBACK}
"""Card -> what links the cards of a node; others go over PCIe, at their own rate."""
BETWEEN: Mapping[str, Link] = {
    "a100-40": Link("InfiniBand", 25e9, 8e-6),
    "a100": Link("InfiniBand", 25e9, 8e-6),
    "h100": Link("InfiniBand", 50e9, 8e-6),
    "h100-pcie": Link("InfiniBand", 25e9, 8e-6),
    "h200": Link("InfiniBand", 50e9, 8e-6),
    "cpu": Link("Ethernet", 1.25e9, 100e-6),
}
KINDS: Mapping[str, tuple[str, float]] = {"ib": ("InfiniBand", 8e-6), "eth": ("Ethernet", 30e-6)}


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` machines with ``per_node`` cards each."""

    card: str
    """Name of a target."""
    nodes: int
    per_node: int
    inside: Link
    """Between the cards of a node."""
    between: Link
    """Between nodes, for each card."""

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def target(self) -> Target:
        """The card."""
        return targets.find(self.card)

    def link(self, a: int, b: int) -> Link | None:
        """What joins two devices; None for a device with itself."""
        if a == b:
            return None
        return self.inside if a // self.per_node == b // self.per_node else self.between

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """``8xa100``, ``2x8xh100`` (nodes, cards a node), ``4x8xh100@ib400`` (Gb/s for each card between nodes).

        More than eight cards without a number of nodes stand in nodes of eight.

        Raises:
            BadCluster: another form, no card, or a number that makes no nodes.
            UnknownTarget: no such card.
        """
        found = SPEC.fullmatch(text)
        if found is None:
            raise BadCluster(text, "it is not of the form CARDSxNAME or NODESxCARDSxNAME, such as 8xa100 or 2x8xh100")
        nodes, cards = (int(g) if g else None for g in found.group(1, 2))
        assert cards is not None
        card = targets.find(found[3])
        if nodes == 0 or cards == 0:
            raise BadCluster(text, "it has no card")
        if nodes is None:
            nodes = max(cards // PER_NODE, 1) if cards % PER_NODE == 0 else 1
            if cards > PER_NODE and cards % PER_NODE:
                raise BadCluster(text, f"{cards} cards do not fill nodes of {PER_NODE}: give NODESxCARDSxNAME")
            cards //= nodes
        inside = INSIDE.get(card.name, Link("PCIe", card.link, 10e-6))
        between = BETWEEN[card.name]
        if found[4]:
            if found[4].lower() not in KINDS:
                raise BadCluster(text, f"{found[4]!r} is no network: ib or eth, with Gb/s behind it, such as @ib200")
            name, latency = KINDS[found[4].lower()]
            between = Link(name, float(found[5]) * 1e9 / 8 if found[5] else between.bandwidth, latency)
        return cls(card.name, nodes, cards, inside, between)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Cluster:
        """What ``dataclasses.asdict`` made of one."""
        return cls(**{**data, "inside": Link(**data["inside"]), "between": Link(**data["between"])})

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        cards = f"{self.per_node}x{self.card}"
        return cards if self.nodes == 1 else f"{self.nodes}x{cards}"
