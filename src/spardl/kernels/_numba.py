"""How the hot loops are compiled. `compiled.py` gives them the signatures that the rest of the code sees.

Magnitudes are compared as integers: a float32 without its sign bit, read as uint32, orders like its absolute value.
That integer is called its key. Every loop that is called from outside has exactly one type signature, so that it is
compiled and cached on import.
"""

import numpy as np
from numba import njit

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)

inlined = njit(cache=True, nogil=True, boundscheck=False)


def compiled(signature):
    return njit(signature, cache=True, nogil=True, boundscheck=False)
