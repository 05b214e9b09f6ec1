"""Who moves bytes: connections of our own, torch.distributed, or MPI."""
