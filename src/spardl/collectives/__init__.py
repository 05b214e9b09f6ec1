"""The algorithms, without I/O: one file each. A method is one file here plus one line in `config.METHODS`."""
