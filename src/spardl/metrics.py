"""Numbers that people ask for: what was sent, how dense it was, where the time went."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Traffic:
    """What one rank's transport has moved so far, and how long it took.

    A transport that sees when bytes begin to arrive says for how long they were under way. Of others only the round's
    time is known: its share at the best rate seen so far counts as transfer, the rest as waiting for peers.
    """

    rounds: int = 0
    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    seconds_transferring: float = 0.0
    best_rate: float = 0.0

    def count(
        self,
        *,
        rounds: int,
        messages: int,
        sent: int,
        received: int,
        seconds: float,
        transferring: float | None = None,
    ) -> None:
        """Add what was done. `transferring`: seconds in which messages were under way, where that is known."""
        self.rounds += rounds
        self.messages += messages
        self.bytes_sent += sent
        self.bytes_received += received
        self.seconds += seconds
        if transferring is not None:
            self.seconds_transferring += transferring
        elif seconds > 0:
            moved = max(sent, received)
            self.best_rate = max(self.best_rate, moved / seconds)
            self.seconds_transferring += moved / self.best_rate if moved else 0.0

    def copy(self) -> "Traffic":
        """A snapshot, to see later what was moved since."""
        return dataclasses.replace(self)


@dataclass(slots=True)
class GroupStats:
    """One group (or all of them together), cumulated over its steps on this rank.

    `last_entries` are those of the last result. `delta` is the last diagnosis of its selection: what it left behind,
    relative to chance.
    """

    name: str
    elements: int
    dense: bool = False
    steps: int = 0
    skipped: int = 0
    rounds: int = 0
    messages: int = 0
    bytes_sent: int = 0
    entries_sent: int = 0
    entries: int = 0
    last_entries: int = 0
    seconds_selecting: float = 0.0
    seconds_packing: float = 0.0
    seconds_waiting: float = 0.0
    seconds_transferring: float = 0.0
    delta: float | None = None

    @property
    def density(self) -> float:
        """Achieved: entries of the result over elements, averaged over steps."""
        return self.entries / (self.elements * self.steps) if self.elements and self.steps else 0.0

    @property
    def bits_per_entry(self) -> float:
        """Bits on the wire, headers included, per entry sent."""
        return 8 * self.bytes_sent / self.entries_sent if self.entries_sent else 0.0

    def include(self, other: "GroupStats") -> None:
        """Count what another group has done as well; steps are taken together."""
        for name in ("elements", "rounds", "messages", "bytes_sent", "entries_sent", "entries"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("seconds_selecting", "seconds_packing", "seconds_waiting", "seconds_transferring"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.steps = max(self.steps, other.steps)
        self.skipped = max(self.skipped, other.skipped)

    def observe(self, before: Traffic, after: Traffic, seconds: float, packing: float) -> None:
        """Count one step's traffic; what was spent neither in the transport nor on frames was spent selecting."""
        self.rounds += after.rounds - before.rounds
        self.messages += after.messages - before.messages
        self.bytes_sent += after.bytes_sent - before.bytes_sent
        transport = after.seconds - before.seconds
        transferring = after.seconds_transferring - before.seconds_transferring
        self.seconds_transferring += transferring
        self.seconds_waiting += transport - transferring
        self.seconds_packing += packing
        self.seconds_selecting += seconds - transport - packing

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {**dataclasses.asdict(self), "density": self.density, "bits_per_entry": self.bits_per_entry}


@dataclass(frozen=True, slots=True)
class Change:
    """Ranks have left, or come, and the others have gone on: `step` is the first exchange without them.

    All go by the numbers that they had when they came. What a lost rank had computed and not sent is lost with it; only
    that rank knew how much it was.

    epoch    how often ranks have left or come
    members  those that are there now, in rank order
    seconds  from when this rank noticed to when it could go on
    """

    epoch: int
    step: int
    members: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    seconds: float


@dataclass(slots=True)
class SyncStats:
    """What `stats()` returns: each present group, and all together since the beginning.

    `past` are groups that have been rearranged into the present ones: a group counts from when it was formed, the total
    never goes back. `steps` and `skipped` are the session's own count. `seconds_exposed` are those that training has
    waited for exchanges of weights, or of gradients at the step; inside backward nobody counts them. `changes` are
    ranks that have left or come.
    """

    groups: list[GroupStats] = field(default_factory=list)
    past: GroupStats | None = None
    steps: int | None = None
    skipped: int | None = None
    seconds_exposed: float = 0.0
    changes: list[Change] = field(default_factory=list)

    @property
    def total(self) -> GroupStats:
        """All groups of all times as one."""
        total = GroupStats(name="total", elements=0, dense=all(group.dense for group in self.groups))
        for group in self.groups:
            total.include(group)
        elements = total.elements
        if self.past is not None:
            total.include(self.past)
        total.elements = elements
        total.steps = total.steps if self.steps is None else self.steps
        total.skipped = total.skipped if self.skipped is None else self.skipped
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {"total": self.total.to_dict(), "groups": [group.to_dict() for group in self.groups]}


@dataclass(frozen=True, slots=True)
class Span:
    """When a group was exchanged, in seconds from the first gradient of its step, on this rank."""

    group: str
    begins: float
    ends: float


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One synchronised step, for observers.

    seconds  from its first gradient to its commit, on this rank
    counted  false if some rank's gradient was not finite, so that the step was rolled back everywhere
    entries  of the averaged result
    spans    of its groups, where somebody observes
    """

    step: int
    seconds: float
    counted: bool
    groups: int
    elements: int
    entries: int
    bytes_sent: int
    spans: tuple[Span, ...] = ()

    @property
    def density(self) -> float:
        """Entries of the result over elements."""
        return self.entries / self.elements if self.elements else 0.0
