"""What a transport is: it performs the operations that a program yields, for one rank."""

from typing import Any, Protocol, TypeVar

from spardl.collectives.program import Operation, Program
from spardl.metrics import Traffic

Result = TypeVar("Result")


class Transport(Protocol):
    rank: int
    workers: int
    traffic: Traffic

    def perform(self, operation: Operation) -> Any:
        """Do what a program asked for and return what it is to be sent."""
        ...


def run(program: Program[Result], transport: Transport) -> Result:
    """Drive a program to its end on this rank."""
    try:
        operation = next(program)
        while True:
            operation = program.send(transport.perform(operation))
    except StopIteration as stop:
        result: Result = stop.value
        return result
