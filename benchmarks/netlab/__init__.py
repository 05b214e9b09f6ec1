"""Several hosts on one machine: network namespaces on a virtual switch, with links of a given rate."""
