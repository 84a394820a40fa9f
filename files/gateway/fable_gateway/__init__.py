"""The gateway between the users and the engine: keys, a cap, patience, and untouched bytes.

`config`, `keys` and `keyfile` are the settings, `limits` the cap, `body` and `headers` what crosses
and what does not, `upstream` the way to the engine with `patience` while it is away, `relay` the
way back, `accounting` and `metrics` what is counted, `app` the handlers, `protocol` the edges of
HTTP, `service` the process, `cli` and `keys_cli` the commands.

What a request asks for and how its answer becomes strict is pure: `request` and `history` on the
way up; on the way down `stream`, `sse` and `shortcut` for events, `message` for whole answers, both
through `answer`, which reads text with `toolcalls`, `callreaders` and `scan`, the engine's own
calls with `enginecalls`, and both with `arguments`.
"""
