"""What is offered for exchange, and what becomes of the weights afterwards: two ways."""

from collections.abc import Mapping
from typing import ClassVar, Protocol

from torch import Tensor

from spardl.integrations import dct
from spardl.integrations.outer import Outer
from spardl.integrations.replica import Replica
from spardl.sync.landing import Landing, take_landings
from spardl.sync.session import Session
from spardl.update import LocalUpdates

Replicas = Mapping[str, Replica]


class Exchange(Protocol):
    """One way of exchanging weights. `landings` are what an exchange has brought that has not landed yet."""

    of_weights: ClassVar[bool]
    landings: dict[str, Landing]

    def offer(self, session: Session, replicas: Replicas, decay: float) -> None:
        """Submit every tensor; the caller closes the step."""
        ...

    def collect(self, session: Session) -> None:
        """The step is over, and it counts: fetch the landings."""
        ...

    def land(self, replicas: Replicas, outer: Outer) -> None:
        """Apply the landings."""
        ...

    def waiting(self, session: Session) -> dict[str, Tensor]:
        """What of earlier exchanges waits beside the weights, by name: a copy."""
        ...

    def forget(self, session: Session) -> None:
        """Nothing waits any more."""
        ...


class Ahead:
    """What a rank has not sent stays applied to its weights: the difference is the residual, and is not stored."""

    of_weights: ClassVar[bool] = True

    def __init__(self, rule: LocalUpdates) -> None:
        self.landings: dict[str, Landing] = {}

    def offer(self, session: Session, replicas: Replicas, decay: float) -> None:
        for name, replica in replicas.items():
            own = replica.own()
            if decay < 1.0:
                own.lerp_(replica.shared, 1.0 - decay)
                replica.show()
            session.submit(name, own, shared=replica.shared)

    def collect(self, session: Session) -> None:
        self.landings = take_landings(session.sync)

    def land(self, replicas: Replicas, outer: Outer) -> None:
        for name, landing in self.landings.items():
            replica, step = replicas[name], outer.step(name, landing)
            landing.apply(replica.shared, replica.own(), step, outer.kernels, everywhere=outer.everywhere)
            replica.show()
        self.landings = {}

    def waiting(self, session: Session) -> dict[str, Tensor]:
        return {}

    def forget(self, session: Session) -> None:
        pass


class Reset:
    """Own weights become the shared ones at every exchange; what was not sent waits in the session's residuals."""

    of_weights: ClassVar[bool] = False

    def __init__(self, rule: LocalUpdates) -> None:
        self.landings: dict[str, Landing] = {}
        self.coefficients = rule.transform == "dct"
        self._moves: dict[str, Tensor] = {}

    def offer(self, session: Session, replicas: Replicas, decay: float) -> None:
        if decay < 1.0:
            for group in session.sync.groups:
                group.buffer.values.mul_(decay)
        self._moves = {name: replica.shared - replica.own() for name, replica in replicas.items()}
        if self.coefficients:
            self._moves = {name: dct.forward(move) for name, move in self._moves.items()}
        for name, move in self._moves.items():
            session.submit(name, move)

    def collect(self, session: Session) -> None:
        moves = {name: dct.inverse(move) for name, move in self._moves.items()} if self.coefficients else self._moves
        self.landings = {name: Landing(None, agreed, None, agreed) for name, agreed in moves.items()}
        self._moves = {}

    def land(self, replicas: Replicas, outer: Outer) -> None:
        for name, landing in self.landings.items():
            replica = replicas[name]
            replica.shared -= outer.step(name, landing)
            replica.own().copy_(replica.shared)
            replica.show()
        self.landings = {}

    def waiting(self, session: Session) -> dict[str, Tensor]:
        kept = {name: kept.residual for name, kept in session.sync.kept().items()}
        return {name: dct.inverse(each) for name, each in kept.items()} if self.coefficients else kept

    def forget(self, session: Session) -> None:
        for group in session.sync.groups:
            group.buffer.values.zero_()
