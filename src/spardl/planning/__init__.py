"""What a step costs, and which tensors to synchronise together so that it costs least."""
