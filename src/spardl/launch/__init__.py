"""How ranks start, find each other and end: local workers of our own, or ranks of torchrun, mpiexec and srun."""
