"""What a transport is: it performs the operations that a program yields, for one rank."""

from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch

from spardl.collectives.program import Ask, Operation, Program, Round, answers
from spardl.metrics import Traffic

Result = TypeVar("Result")


class Transport(Protocol):
    """Rank `rank` of `workers`, connected with all others. One thread uses it at a time.

    rank, workers  as the group it was made from numbers and counts its ranks
    device         where the frames that it hands to programs are
    traffic        what it has moved so far
    checks         whether messages of rounds carry checksums; the same on all ranks, and set between rounds

    Every wait has a deadline: a peer that is gone or silent is a `PeerError` that names it. What a peer sends that the
    operation does not expect is a `ProtocolError`, where the transport can see that.
    """

    rank: int
    workers: int
    device: torch.device
    traffic: Traffic
    checks: bool

    def perform(self, operation: Operation) -> Any:
        """Do what a program asked for, and return what it is to be sent: the frames of a round in the order of its
        `receive`, or nothing for an all-reduce."""
        ...

    def arrive(self) -> None:
        """Return when all that was performed is over. Until then `perform` may only have queued it on the device, so
        that the host could go on; whoever reads results from there calls this first, for its deadline."""
        ...

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order. Collective. For settings and plans, not for speed."""
        ...

    def close(self) -> None:
        """Give back connections and groups; whatever it is asked for afterwards is a `StateError`.

        Every rank closes its own, when nobody needs it any more; none waits for the others. Closing twice is fine.
        """
        ...


def run(program: Program[Result], transport: Transport) -> Result:
    """Drive a program to its end on this rank. Whenever it asks, the host waits for the device."""
    try:
        operation = next(program)
        while True:
            operation = program.send(_answer(operation, transport))
    except StopIteration as stop:
        result: Result = stop.value
        return result


def _answer(operation: Operation | Ask, transport: Transport) -> Any:
    if not isinstance(operation, Ask):
        return transport.perform(operation)
    transport.arrive()  # for its deadline
    return answers([operation])[0]


def use_the_time(operation: Round) -> float:
    """Do what the program left to be done while messages travel; how many seconds that took.

    For transports, when all messages of the round have left. It is no part of the time that the round takes.
    """
    if operation.meanwhile is None:
        return 0.0
    started = perf_counter()
    operation.meanwhile()
    return perf_counter() - started
