"""All ranks in one process on a simulated network, in virtual time: what the network is, and who drives the programs.

The package is not called `simulate`, because that is the name of the function `spardl.simulate`: importing a package of
the same name would bind the package there.
"""
