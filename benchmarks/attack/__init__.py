"""Attacks on runs: faults of many kinds, at places of a seed's choice, and what became of every rank."""
