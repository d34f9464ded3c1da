"""Formats that change while a model trains: signals, rules, and the switches of compiled products.

Products report what they saw into the state; the host reads it one step late, and decides between steps.  So nothing is
compiled again, and no step waits for the device.

    controller = dsc.PrecisionController()
    controller.when(lambda layer: layer.gradient_norm > 0.5, "fp32", roles="backward")
    model = torch.compile(model, backend="dsc", options={"precision": "int8", "controller": controller})
    ...
    controller.scale(model(x)).backward()
    controller.step(optimizer)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsc.errors import BadControl
from dsc.precision.formats import SEEN
from dsc.precision.request import KEYS
from dsc.precision.rules import (
    ABOVE,
    BELOW,
    CALM,
    FALLBACKS,
    HISTORY,
    LOST,
    NOISY,
    PATIENCE,
    SHARE,
    Callback,
    Layer,
    Product,
    Rule,
    seen_name,
    slot_name,
)  # fmt: skip
from dsc.runtime.state import State

PER_PRODUCT: Mapping[str, tuple[int, float]] = {
    "seen": (0, math.nan), "late": (0, math.nan), "largest": (1, 0.0), "quiet": (0, 0), "first": (0, math.nan),
}  # fmt: skip
"""Entries of the state that have a place for each product: in which dimension, and what stands there at first."""


@dataclass
class PrecisionController:
    """Decides between steps which format each product has.

    ``callback`` hears of every step; ``budget`` is that of the estimated gradient error, which only a plan of a
    calibration makes possible.  All that it knows is in ``state``, and in ``state_dict``.
    """

    budget: float = 0.02
    callback: Callback | None = None
    loss_scaling: bool | None = None
    """None: if a product is planned in fp16."""
    patience: int = CALM
    """Steps that a rule must not hold before what it did is undone."""
    state: State = field(default_factory=State)
    rules: list[Rule] = field(default_factory=list)
    products: dict[str, Product] = field(default_factory=dict)
    """Of all graphs that were compiled with this controller: a product that several of them have is one, by its name."""
    places: dict[str, int] = field(default_factory=dict)
    """Where each product's numbers stand."""

    def __post_init__(self) -> None:
        self._scaler: Any = None
        self._saved_scaler: dict[str, Any] | None = None
        self._copied: Any = None
        self._device: torch.device | None = None
        self._own: dict[str, Tensor] = {}
        self.when(lambda layer: layer.noise > NOISY, "bf16", roles="backward", name="noise above the gradient")
        self.when(lambda layer: layer.lost > LOST, "bf16", name="values rounded to zero")
        self.when(lambda layer: not layer.finite, "bf16", name="not finite")

    # What the user calls.

    def when(
        self, holds: Callable[[Layer], bool], format: str, roles: str | None = None, name: str = ""
    ) -> PrecisionController:
        """Add a rule.  ``roles``: forward, dgrad, wgrad, or backward for both of the latter; None for all.

        Raises:
            BadControl: a format to which products cannot switch, or a role that does not exist.
        """
        if format not in FALLBACKS:
            raise BadControl(f"a rule cannot switch to {format!r}", f"use one of {', '.join(map(repr, FALLBACKS))}")
        if roles is not None and roles not in KEYS:
            raise BadControl(f"{roles!r} is no role", f"use one of {', '.join(map(repr, KEYS))}")
        chosen = KEYS[roles] if roles is not None else ("forward", "dgrad", "wgrad")
        self.rules.append(Rule(holds, format, chosen, name or f"rule {len(self.rules)}"))
        return self

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` of: scaled where fp16 needs it."""
        scaler = self._scaling(loss.device)
        scaled: Tensor = scaler.scale(loss) if scaler is not None else loss
        return scaled

    def step(self, optimizer: Any = None) -> None:
        """Step the optimizer (not if scaled gradients are not finite), then decide with what the step before reported."""
        if optimizer is not None:
            if self._scaler is not None:
                self._scaler.step(optimizer)
                self._scaler.update()
            else:
                optimizer.step()
        if not self.products:
            return
        self._arrived()
        self._grow()
        seen = self._tensor("seen", lambda: torch.full((len(self.places), len(SEEN)), torch.nan))
        late = self._tensor("late", lambda: torch.full((len(self.places), len(SEEN)), torch.nan))
        count = self._tensor("step", lambda: torch.zeros((), dtype=torch.int64))
        seen.copy_(torch.where(torch.isnan(late), seen, late))
        largest = self._tensor("largest", lambda: torch.zeros(HISTORY, len(self.places)))
        largest[int(count) % HISTORY] = late[:, 1:3].nan_to_num(0.0).amax(1)
        self._decide(seen, largest)
        self._read(late)
        count += 1
        self._choose_measured(int(count))
        if self.callback is not None:
            self.callback(int(count), self.metrics())

    def metrics(self) -> dict[str, float]:
        """Named numbers of the last step that was read: per layer and role, and of the whole."""
        seen, out = self.state.get("precision.controller.seen"), dict[str, float]()
        if seen is None:
            return out
        for i, p in self._placed():
            if i >= len(seen):
                continue  # of a graph that has not run a whole step yet
            for k in (0, 1, 2, 3, 4, 5):
                if not math.isnan(value := float(seen[i, k])):
                    out[f"{p.site}/{SEEN[k]}"] = value
            out[f"{p.site}/promoted"] = float(self._code(p) > 0)
            if p.role == "wgrad":
                out[f"{p.layer}/gradient norm"] = float(seen[i, 5]) / self._scale_value()
        out["estimated error"] = self.estimate()
        out["promoted products"] = float(sum(self._code(p) > 0 for p in self.products.values()))
        out["switches"] = float(self._tensor("switches", lambda: torch.zeros((), dtype=torch.int64)))
        out["loss scale"] = self._scale_value()
        return out

    def formats(self) -> dict[str, str]:
        """The format that each product has now."""
        return {p.site: p.formats[self._code(p)] for p in self.products.values()}

    def switch(self, site: str, format: str) -> None:
        """Give one product another of its formats, from the next step on.

        Raises:
            BadControl: there is no such product, or it cannot have the format.
        """
        p = self.products.get(site)
        if p is None or format not in p.formats:
            known = ", ".join(p.formats) if p is not None else ", ".join(list(self.products)[:4]) or "none yet"
            raise BadControl(f"{site!r} cannot be switched to {format!r}", f"use one of: {known}")
        code = p.formats.index(format)
        if code != self._code(p):
            self.state[slot_name(site)][0] = code
            self._tensor("switches", lambda: torch.zeros((), dtype=torch.int64)).add_(1)

    def estimate(self) -> float:
        """Gradient error, from the plan's prediction and how noise has changed since; 0 without such a plan."""
        return math.sqrt(sum(self._share(i, p) ** 2 for i, p in self._placed() if not self._code(p)))

    def state_dict(self) -> dict[str, Any]:
        """All that it needs to go on as if it had not stopped."""
        self._arrived()
        scaler = self._scaler.state_dict() if self._scaler is not None else self._saved_scaler
        state = {k: v.clone() for k, v in self.state.state_dict().items()}
        return {"state": state, "scaler": scaler, "places": dict(self.places)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """What ``state_dict`` gave, before or after the model was compiled."""
        if self.places and self.places != saved["places"]:
            saved = {**saved, "state": self._moved(saved["state"], saved["places"])}
        else:
            self.places = dict(saved["places"])
        self.state.load_state_dict(saved["state"], strict=False)
        self._saved_scaler = saved["scaler"]
        if self._scaler is not None and self._saved_scaler is not None:
            self._scaler.load_state_dict(self._saved_scaler)

    # What the compiler calls.

    def register(self, product: Product, device: torch.device) -> None:
        """Make the entries of one product; those that were loaded before stay."""
        self.products.setdefault(product.site, product)
        self.places.setdefault(product.site, len(self.places))
        self._device = device
        self.state.put(slot_name(product.site), lambda: torch.zeros(2, dtype=torch.int64, device="cpu"))
        self.state.put(seen_name(product.site), lambda: torch.full((len(SEEN),), torch.nan, device=device))

    # What it does between steps.

    def _decide(self, seen: Tensor, largest: Tensor) -> None:
        """Rules first; then the budget, one product at a time."""
        quiet = self._tensor("quiet", lambda: torch.zeros(len(self.places), dtype=torch.int64))
        held = self._held(seen, largest)
        quiet += 1
        for i, p in self._placed():
            if (wanted := held.get(p.site)) is not None:
                quiet[i] = 0
                if p.formats.index(wanted) > self._code(p):
                    self.switch(p.site, wanted)
        self._keep_budget(quiet)

    def _held(self, seen: Tensor, largest: Tensor) -> dict[str, str]:
        """Site -> the most exact format that a rule asks for."""
        out: dict[str, str] = {}
        rows, tops = seen.tolist(), largest.amax(0).tolist()
        for layer, places in self._layers().items():
            view = self._view(layer, places, rows, tops)
            for rule in self.rules:
                if not rule.holds(view):
                    continue
                for p in places.values():
                    if p.role in rule.roles and rule.format in p.formats:
                        known = out.get(p.site, p.formats[0])
                        out[p.site] = max(known, rule.format, key=p.formats.index)
        return out

    def _keep_budget(self, quiet: Tensor) -> None:
        """Promote what errs most for its time when the estimate is too high; give back what has been calm for long."""
        above = self._tensor("above", lambda: torch.zeros((), dtype=torch.int64))
        estimate = self.estimate()
        above.copy_(above + 1 if estimate > ABOVE * self.budget else torch.zeros_like(above))
        low = [(i, p) for i, p in self._placed() if self._code(p) == 0]
        if int(above) >= PATIENCE and low:
            i, worst = max(low, key=lambda ip: self._share(*ip) ** 2 / max(ip[1].seconds, 1e-12))
            self.switch(worst.site, worst.formats[1])
            quiet[i] = 0
            above.zero_()
            return
        for i, p in self._placed():
            if self._code(p) > 0 and int(quiet[i]) > self.patience:
                back = math.hypot(estimate, self._share(i, p))
                if back <= BELOW * self.budget or p.error == 0:
                    self.switch(p.site, p.formats[0])
                    quiet[i] = 0

    def _share(self, i: int, p: Product) -> float:
        """A product's part of the estimated error, in its planned format."""
        first = self._tensor("first", lambda: torch.full((len(self.places),), torch.nan))
        seen = self.state.get("precision.controller.seen")
        noise = float(seen[i, 0]) if seen is not None and i < len(seen) else math.nan
        if math.isnan(noise) or self._code(p) > 0:
            return p.error
        if math.isnan(float(first[i])):
            first[i] = noise
        return p.error * noise / max(float(first[i]), 1e-30)

    def _view(
        self, layer: str, places: Mapping[int, Product], rows: Sequence[Sequence[float]], tops: Sequence[float]
    ) -> Layer:
        own = [rows[i] for i in places]
        wgrad = [rows[i][5] for i, p in places.items() if p.role == "wgrad"]
        scale = self._scale_value()
        return Layer(
            layer,
            {p.role: p.formats[self._code(p)] for p in places.values()},
            wgrad[0] / scale if wgrad else math.nan,
            _most(r[0] for r in own),
            _most(tops[i] for i in places),
            _most(x for r in own for x in r[3:5]),
            not any(r[6] > 0 for r in own) or scale != 1.0,  # the scaler deals with what its own scale makes infinite
        )

    def _layers(self) -> dict[str, dict[int, Product]]:
        out: dict[str, dict[int, Product]] = {}
        for i, p in self._placed():
            out.setdefault(p.layer, {})[i] = p
        return out

    def _placed(self) -> Iterator[tuple[int, Product]]:
        for p in self.products.values():
            yield self.places[p.site], p

    def _grow(self) -> None:
        """Make room for products of graphs that were compiled since."""
        for name, (dim, empty) in PER_PRODUCT.items():
            entry = f"precision.controller.{name}"
            known = self.state.get(entry)
            if known is None or (missing := len(self.places) - known.shape[dim]) <= 0:
                continue
            shape = [*known.shape[:dim], missing, *known.shape[dim + 1 :]]
            grown = torch.cat([known, known.new_full(shape, empty)], dim)
            self.state.replace(entry, grown.pin_memory() if known.is_pinned() else grown)
            self._own.pop(name, None)

    def _moved(self, saved: Mapping[str, Tensor], places: Mapping[str, int]) -> dict[str, Tensor]:
        """What was saved, in the order of the graphs that were compiled here."""
        out = dict(saved)
        for site in places:
            self.places.setdefault(site, len(self.places))
        self._grow()
        for name, (dim, empty) in PER_PRODUCT.items():
            if (old := saved.get(f"precision.controller.{name}")) is None:
                continue
            shape = [*old.shape[:dim], len(self.places), *old.shape[dim + 1 :]]
            new = old.new_full(shape, empty)
            for site, place in places.items():
                if place < old.shape[dim]:
                    new.select(dim, self.places[site]).copy_(old.select(dim, place))
            out[f"precision.controller.{name}"] = new
        return out

    def _read(self, late: Tensor) -> None:
        """Begin to copy what this step reported; it is there when the next one ends."""
        empty = torch.full((len(SEEN),), torch.nan, device=self._device)
        rows = torch.stack([self.state.get(seen_name(site), empty) for site in self.places])
        late.copy_(rows, non_blocking=True)
        if rows.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _arrived(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # of the step before: long done
            self._copied = None

    def _choose_measured(self, step: int) -> None:
        for i, p in self._placed():
            wanted = i % SHARE == step % SHARE or len(self.products) <= SHARE // 4
            slot = self.state[slot_name(p.site)]
            if bool(slot[1]) != wanted:
                slot[1] = wanted

    def _code(self, p: Product) -> int:
        return int(self.state[slot_name(p.site)][0])

    def _tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._own:
            pinned = self._device is not None and self._device.type == "cuda" and name == "late"
            put = self.state.put(f"precision.controller.{name}", lambda: make().pin_memory() if pinned else make())
            self._own[name] = put
        return self._own[name]

    def _scaling(self, device: torch.device) -> Any:
        wanted = self.loss_scaling
        if wanted is None:
            wanted = any(p.formats[0] == "fp16" for p in self.products.values())
        if wanted and self._scaler is None:
            self._scaler = torch.amp.GradScaler(device.type)
            if self._saved_scaler is not None:
                self._scaler.load_state_dict(self._saved_scaler)
        return self._scaler

    def _scale_value(self) -> float:
        """Of the loss; on a GPU a number of the step before, which is there already."""
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0


def _most(numbers: Iterable[float]) -> float:
    """The largest, NaN if there is none."""
    return max((x for x in numbers if not math.isnan(x)), default=math.nan)
