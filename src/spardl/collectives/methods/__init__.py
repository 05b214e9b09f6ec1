"""The methods: one file each. `registry.py` finds them by name."""
