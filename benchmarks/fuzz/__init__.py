"""Fuzzing: everything that reads bytes from the network or the disk, fed with bytes that are almost right."""
