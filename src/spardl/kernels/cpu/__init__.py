"""The kernels of a CPU: `compiled.py` is their face, over loops that numba compiles."""
