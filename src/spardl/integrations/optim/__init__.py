"""Optimizers before the selection."""
