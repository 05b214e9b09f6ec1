"""How the simulator's own loops are compiled. They are few and small, so it happens when they are first called."""

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """The same function, compiled when it is first called, or read from disk."""
    return cast(Function, njit(cache=True, nogil=True, boundscheck=False)(function))
