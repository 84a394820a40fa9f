"""Fetch, count and verify the engine's checkpoint.

Standard library only, Python 3.10 or newer.
"""
