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
        return dataclasses.replace(self)


@dataclass(slots=True)
class GroupStats:
    """One group (or all of them together), cumulated over its steps on this rank.

    `delta` is the last diagnosis of its selection: what it left behind, relative to chance.
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
        return {**dataclasses.asdict(self), "density": self.density, "bits_per_entry": self.bits_per_entry}


@dataclass(slots=True)
class SyncStats:
    """What `SyncHandle.stats()` returns: each group, and all together."""

    groups: list[GroupStats] = field(default_factory=list)

    @property
    def total(self) -> GroupStats:
        total = GroupStats(name="total", elements=0, dense=all(group.dense for group in self.groups))
        for group in self.groups:
            total.include(group)
        return total

    def to_dict(self) -> dict[str, Any]:
        return {"total": self.total.to_dict(), "groups": [group.to_dict() for group in self.groups]}
