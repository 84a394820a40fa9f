"""The two real hosts. ssh reaches them by these names: see ~/.ssh/config of the operator."""

# Addresses are those at which the other host reaches it. Set the gateway host's before the first
# deploy; until then every run is refused.
v100 = [("v100", {"address": "100.78.29.29", "overrides": {}})]
dgx: list[tuple[str, dict[str, object]]] = [("dgx", {"address": None, "overrides": {}})]
