"""A rank's gradients and residuals. `memory.Memory` is the only face of it that programs see."""
