"""The version, where everything can read it without importing anything."""

__version__ = "0.2.0"
