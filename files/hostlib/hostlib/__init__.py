"""What the programs that run on a host share: errors, safe writes, downloads, progress.

Standard library only, Python 3.10 or newer.
"""
