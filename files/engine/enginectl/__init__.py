"""Engine control on the GPU host: picks the release to run, switches, rolls back, judges gates.

Standard library and `hostlib` only, Python 3.10 or newer, systemd 252 or newer.
"""
