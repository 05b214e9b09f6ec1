"""Who moves bytes: connections of our own, torch.distributed, MPI, or a simulated network in one process."""
