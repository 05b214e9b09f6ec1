"""How the hot loops are compiled. `compiled.py` gives them the signatures that the rest of the code sees.

Magnitudes are compared as integers: a float32 without its sign bit, read as uint32, orders like its absolute value.
That integer is called its key. Every loop that is called from outside has exactly one type signature, so that it is
compiled and cached on import.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

MAGNITUDE = np.uint32(0x7FFFFFFF)  # the bits of a float32 that are its key
INFINITE_KEY = np.uint32(0x7F800000)  # what reaches it is not finite

inlined = njit(cache=True, nogil=True, boundscheck=False)


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a loop for this one signature, on import, or load it from the cache."""
    decorator: Callable[[Callable[..., Any]], Any] = njit(signature, cache=True, nogil=True, boundscheck=False)
    return decorator
