"""The gateway between the users and the engine: keys, a cap, patience, and untouched bytes.

`config`, `keys` and `keyfile` are the settings, `limits` the cap, `body` and `headers` what crosses
and what does not, `upstream` the way to the engine with `patience` while it is away, `relay` the
way back, `accounting` and `metrics` what is counted, `app` the handlers, `protocol` the edges of
HTTP, `service` the process, `cli` and `keys_cli` the commands.
"""
