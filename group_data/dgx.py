"""Settings of the gateway's host."""

gateway = {
    "port": 18777,
    "python": "python3",
    "max_in_flight": 8,
    "max_queued": 256,
    # Longer than an engine switch: requests wait this long for an engine that is away.
    "hold_seconds": 300,
    "connect_timeout_seconds": 5,
    "max_body_bytes": 67108864,
    # All request bodies that are held at the same time.
    "max_buffered_bytes": 134217728,
    # name: sha256 of the key. `script/key NAME` makes one and prints both.
    # While it is empty every deploy is refused. For keys in use see docs/operations.md.
    "keys": {},
    # True: a gateway program or unit made by hand is kept beside as NAME.original, and replaced.
    "take_over": False,
}
