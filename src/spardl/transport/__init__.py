"""Who moves bytes: torch.distributed, or a simulated network in one process."""
