"""The whole rebuild of both hosts, in the order in which it happens."""

from pyinfra import host

from stack import target
from stack.roles.base import base
from stack.roles.checkpoint import checkpoint
from stack.roles.engine import engine, engine_programs
from stack.roles.gateway import gateway
from stack.roles.toolkit import toolkit

if "v100" in host.groups:
    settings = target.engine_settings()
    locked = target.locked_artifacts(settings)
    packages = ["g++", "nftables", "xz-utils", f"{settings.engine.python}-venv"]
    if settings.engine.numa_node is not None:
        packages.append("numactl")
    base(service=settings.service, packages=packages)
    engine_programs(settings=settings, locked=locked)
    toolkit(settings=settings, locked=locked.toolkit)
    checkpoint(settings=settings, locked=locked.checkpoint)
    engine(settings=settings, locked=locked, gateway_address=target.peer_address("dgx"))

if "dgx" in host.groups:
    own = target.gateway_settings()
    base(service=own.service, packages=[f"{own.gateway.python}-venv"])
    gateway(settings=own, engine_address=target.peer_address("v100"))
