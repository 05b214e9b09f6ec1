"""spardl inside other people's training loops."""
