"""A pipeline step on plain numbers: when each action of given orders runs, what each rank holds, and what no order beats.

The rules:

1. A rank runs its actions one after the other, in its order; it waits until what an action reads has arrived.
2. A forward reads what the stage before sent; dgrad reads what the stage after sent, and its own forward; wgrad its dgrad.
3. Results are sent while the rank goes on.  Messages over one cut in one direction follow each other; each takes the
   cut's ``send`` seconds, none between stages of one rank.
4. A rank holds ``held`` bytes from a forward on; dgrad gives back all but ``kept`` of them, wgrad the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Order = tuple[tuple[int, str, int], ...]
"""Actions of one rank: stage, kind (F, B, I or W), micro-batch."""


@dataclass(frozen=True)
class Pipeline:
    """What the stages cost.  Sequences are by stage, unless they say otherwise."""

    ranks: int
    microbatches: int
    home: tuple[int, ...]
    """Stage -> rank."""
    forward: tuple[float, ...]
    dgrad: tuple[float, ...]
    wgrad: tuple[float, ...]
    send: tuple[float, ...]
    """Seconds from a stage to the next; one fewer than stages."""
    held: tuple[float, ...]
    kept: tuple[float, ...]
    static: tuple[float, ...] = ()
    """Bytes of each rank that are there all the time."""
    work: tuple[float, ...] = ()
    """Bytes more while a backward of the stage runs."""
    limit: float = float("inf")
    """Bytes that a rank may hold."""

    @property
    def stages(self) -> int:
        return len(self.home)

    def of(self, rank: int) -> list[int]:
        """The stages of a rank."""
        return [s for s, r in enumerate(self.home) if r == rank]

    def busy(self, rank: int) -> float:
        """Seconds of work of a rank."""
        return self.microbatches * sum(self.forward[s] + self.dgrad[s] + self.wgrad[s] for s in self.of(rank))

    @property
    def lags(self) -> list[float]:
        """``send`` where it crosses ranks, else 0."""
        return [c if self.home[s] != self.home[s + 1] else 0.0 for s, c in enumerate(self.send)]

    def base(self, rank: int) -> float:
        """Bytes that a rank holds all the time, with those that any of its backwards needs while it runs."""
        static = self.static[rank] if self.static else 0.0
        return static + (max(self.work[s] for s in self.of(rank)) if self.work else 0.0)


@dataclass(frozen=True)
class Timeline:
    """What came of a simulation."""

    seconds: float
    bubble: float
    """1 - work / (ranks x seconds)."""
    peaks: tuple[float, ...]
    """Bytes of each rank."""
    spans: tuple[tuple[tuple[float, float], ...], ...] = field(repr=False)
    """Start and end of each action of each rank."""


class Deadlock(ValueError):
    """Orders in which every rank waits for another."""


def bound(p: Pipeline) -> float:
    """Seconds that no orders beat.

    1. A rank works from when the first micro-batch can reach its first stage.
    2. Its forwards and dgrads are over when the last dgrad starts its way back to the first stage, which has a wgrad left.
    3. One micro-batch goes all the way there and back.
    4. Within the limit a rank waits, in the beginning for the first gradient, in the end for the last one (``_waits``).
    """
    lags = p.lags
    there, back = [0.0] * p.stages, [0.0] * p.stages
    for s in range(1, p.stages):
        there[s] = there[s - 1] + p.forward[s - 1] + lags[s - 1]
        back[s] = back[s - 1] + p.dgrad[s - 1] + lags[s - 1]
    found = sum(p.forward) + sum(p.dgrad) + 2 * sum(lags) + p.wgrad[0]
    for rank in range(p.ranks):
        mine = p.of(rank)
        start = min(there[s] for s in mine)
        found = max(found, start + p.busy(rank))
        sent = p.microbatches * sum(p.forward[s] + p.dgrad[s] for s in mine)
        found = max(found, start + sent + min(back[s] for s in mine) + p.wgrad[0])
        found = max(found, start + p.busy(rank) + _waits(p, rank, there, back))
    return found


def _waits(p: Pipeline, rank: int, there: Sequence[float], back: Sequence[float]) -> float:
    """Seconds that a rank is idle at least between its first action and the end, because of its limit.

    Let ``a`` be its first stage, whose micro-batches it holds longest; so many fit that not all of them do.

    1. Until the first dgrad of ``a`` can start, one trip there and back after the first forward, no micro-batch of ``a``
       gives its bytes back: forwards of ``a`` are those that fit, later stages run as many as fit beside their own bytes,
       and before what the next stage reads can be there, none.
    2. The last forward of ``a`` waits for such a dgrad, so what follows comes later.  From its end one more trip takes its
       time, and all that is left to do is for micro-batches that fit, or weight gradients whose bytes fit.
    """
    mine, lags = p.of(rank), p.lags
    a, rest = mine[0], mine[1:]
    room = (p.limit - p.base(rank)) * (1 + 1e-9)
    if p.held[a] <= 0 or room >= p.held[a] * p.microbatches:
        return 0.0
    f, i, w = p.forward, p.dgrad, p.wgrad
    most = int(room / p.held[a])
    trip = sum(f[a:]) + sum(i[a:]) + 2 * sum(lags[a:])
    others = sum(f[s] + i[s] + w[s] for s in rest)
    beside = max(0, int((room - min((p.held[s] for s in rest), default=0.0)) / p.held[a]))
    first = trip - i[a] - most * f[a] - min(most, beside) * others
    if rest:
        first = max(first, there[rest[0]] - there[a] - most * f[a])
    owed = max((w[s] / p.kept[s] if p.kept[s] else float("inf") for s in mine if w[s]), default=0.0)
    whole = others + i[a] + w[a]
    left = max((n * whole + (room - n * p.held[a]) * owed for n in range(1, most + 1)), default=float("inf"))
    last = trip - f[a] + max(w[a], back[a] + w[0]) - left
    return max(first, 0.0) + max(last, 0.0)


def simulate(p: Pipeline, orders: Sequence[Order]) -> Timeline:
    """Run the orders.

    Raises:
        Deadlock: an action waits for one that comes later.
    """
    code = Coded(p)
    ids = [code.encode(order) for order in orders]
    ends = code.ends(ids)
    if ends is None:
        raise Deadlock("some action waits for one that comes later")
    seconds = max((max(e, default=0.0) for e in ends), default=0.0)
    spans = []
    for order, finish in zip(ids, ends):
        spans.append(tuple((e - code.seconds[x], e) for x, e in zip(order, finish)))
    busy = sum(p.busy(r) for r in range(p.ranks))
    return Timeline(
        seconds,
        1 - busy / (p.ranks * seconds) if seconds else 0.0,
        tuple(code.peak(r, order) for r, order in enumerate(ids)),
        tuple(spans),
    )


KINDS = "FIWB"


class Coded:
    """A pipeline with actions as numbers, for searches: ``(kind * stages + stage) * microbatches + microbatch``."""

    def __init__(self, p: Pipeline) -> None:
        m, n = p.microbatches, p.stages
        self.m, self.n = m, n
        self.count = len(KINDS) * n * m
        self.channel = [-1] * self.count
        """Where messages follow each other: forward over cut s is s, backward n + s."""
        self.needs = [-1] * self.count
        """The action whose result is read: a B reads what an I reads, and gives what an I and a W give."""
        self.gives = list(range(self.count))
        """The number under which others wait for an action: that of the I for a B."""
        for s in range(n):
            for b in range(m):
                f, i, w, both_id = (self.id(k, s, b) for k in range(4))
                if s:
                    self.needs[f] = self.id(0, s - 1, b)
                    self.channel[f] = s - 1
                for x in (i, both_id):
                    if s < n - 1:
                        self.needs[x] = self.id(1, s + 1, b)
                        self.channel[x] = n + s
                    else:
                        self.needs[x] = f
                self.needs[w] = i
                self.gives[both_id] = i
        self.cost(p)

    def cost(self, p: Pipeline) -> None:
        """Take the costs of ``p``, which has as many stages and micro-batches."""
        self.p = p
        both = [a + b for a, b in zip(p.dgrad, p.wgrad)]
        freed = [k - h for k, h in zip(p.kept, p.held)], [-k for k in p.kept], [-h for h in p.held]
        lags = p.lags
        nothing = [0.0] * self.n
        self.seconds = self._spread(p.forward, p.dgrad, p.wgrad, both)
        self.bytes = self._spread(p.held, *freed)
        self.lag = self._spread([0.0, *lags], [*lags, 0.0], nothing, [*lags, 0.0])
        self.base = [p.base(r) for r in range(p.ranks)]

    def _spread(self, *per_kind: Sequence[float]) -> list[float]:
        """Numbers by kind and stage, once for each micro-batch."""
        found: list[float] = []
        for kind in per_kind:
            for value in kind:
                found += [value] * self.m
        return found

    def id(self, kind: int, stage: int, batch: int) -> int:
        return (kind * self.n + stage) * self.m + batch

    def encode(self, order: Iterable[tuple[int, str, int]]) -> list[int]:
        return [self.id(KINDS.index(k), s, b) for s, k, b in order]

    def decode(self, ids: Iterable[int]) -> Order:
        found = []
        for x in ids:
            rest, batch = divmod(x, self.m)
            kind, stage = divmod(rest, self.n)
            found.append((stage, KINDS[kind], batch))
        return tuple(found)

    def peak(self, rank: int, order: Sequence[int]) -> float:
        """Bytes of a rank at its worst moment: it depends on its own order alone."""
        now = top = 0.0
        change = self.bytes
        for x in order:
            now += change[x]
            top = max(top, now)
        return self.base[rank] + top

    def ends(
        self,
        orders: Sequence[Sequence[int]],
        seconds: Sequence[float] | None = None,
        lags: Sequence[float] | None = None,
    ) -> list[list[float]] | None:
        """When each action ends; None for a deadlock.  Others' ``seconds`` and ``lags`` than nominal may be given."""
        done = self.run(orders, seconds, lags)[1]
        if done is None:
            return None
        return [[done[self.gives[x]] if x < 3 * self.n * self.m else done[x] for x in order] for order in orders]

    def run(
        self,
        orders: Sequence[Sequence[int]],
        seconds: Sequence[float] | None = None,
        lags: Sequence[float] | None = None,
        stop: float = float("inf"),
    ) -> tuple[float, list[float] | None]:
        """Seconds of the step, and the end of each action by its number; infinite on a deadlock or beyond ``stop``."""
        cost = self.seconds if seconds is None else seconds
        lag = self.lag if lags is None else lags
        needs, gives, channel = self.needs, self.gives, self.channel
        done = [-1.0] * self.count
        waiting = [-1] * self.count
        arrived = [0.0] * (2 * self.n)
        place = [0] * len(orders)
        clock = [0.0] * len(orders)
        ready = list(range(len(orders)))
        while ready:
            rank = ready.pop()
            order, first, now = orders[rank], place[rank], clock[rank]
            at = first
            for at in range(first, len(order)):
                x = order[at]
                need = needs[x]
                if need >= 0:
                    when = done[need]
                    if when < 0.0:
                        waiting[need] = rank
                        break
                    wire = channel[x]
                    if wire >= 0:
                        before = arrived[wire]
                        when = (when if when > before else before) + lag[x]
                        arrived[wire] = when
                    if when > now:
                        now = when
                now += cost[x]
                if now > stop:
                    return float("inf"), None
                given = gives[x]
                done[x] = done[given] = now
                other = waiting[given]
                if other >= 0:
                    waiting[given] = -1
                    ready.append(other)
            else:
                at = len(order)
            place[rank], clock[rank] = at, now
        if any(place[r] < len(o) for r, o in enumerate(orders)):
            return float("inf"), None
        return max(clock, default=0.0), done
