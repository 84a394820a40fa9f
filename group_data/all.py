"""Settings of both hosts. Checked by `stack/settings.py`; a wrong one stops before any change."""

# The user that owns models, toolkit, venvs and the gateway, and that runs both servers.
service = {
    "user": "mavis",
    "home": "/home/mavis",
}

# What consumers see: one port, the names under which the model answers (the first is in answers).
serving = {
    "port": 8601,
    "names": ["qwen38-27b", "qwen3.8-27b", "fable-27b"],
}
