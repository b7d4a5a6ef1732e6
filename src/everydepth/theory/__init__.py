"""Bounds of the papers, computed from the constants of real networks."""
