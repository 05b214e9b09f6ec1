"""Recipes and what runs them. Nothing is imported here, so that the command line starts fast."""
