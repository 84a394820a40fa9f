"""Builds content-addressed virtual environments from hash locks. Standard library only."""
