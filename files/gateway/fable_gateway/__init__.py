"""The gateway between the users and the engine: keys, a cap, patience, and untouched bytes.

`config` and `keys` are the settings, `limits` the cap, `headers` what crosses and what does not,
`upstream` the way to the engine, `relay` the way back, `app` the handlers, `service` the process,
`cli` the commands.
"""
