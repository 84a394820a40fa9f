"""pyinfra's own settings for every run from this folder."""

from pyinfra import config

# One host's failure stops the other: a half-deployed pair is worse than an old one.
config.FAIL_PERCENT = 0
config.REQUIRE_PYINFRA_VERSION = "~=3.10"
