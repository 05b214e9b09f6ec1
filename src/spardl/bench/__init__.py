"""Timing of synchronisation: matches between our methods and their rivals, and the limits that nobody can beat."""
