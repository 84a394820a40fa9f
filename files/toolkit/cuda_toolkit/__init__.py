"""Installs a CUDA toolkit without root and proves it before anything is built on it.

Standard library only; runs on the host as the service user.
"""
