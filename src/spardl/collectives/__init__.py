"""The algorithms, without I/O: one file each. A method is one file in `methods/` plus one line in its registry."""
