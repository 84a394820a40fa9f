"""What every host needs: distribution packages and the service user."""

from __future__ import annotations

from pyinfra import host
from pyinfra.api.deploy import deploy
from pyinfra.facts.deb import DebPackages
from pyinfra.facts.server import Users
from pyinfra.operations import apt, server

from stack.settings import Service

APT_OPTIONS = "-o DPkg::Lock::Timeout=300"
CACHE_SECONDS = 3600


@deploy("Base")
def base(service: Service, packages: list[str]) -> None:
    """Install what is missing of `packages`; make the service user."""
    present = host.get_fact(DebPackages)
    missing = [name for name in packages if name not in present]
    if missing:
        apt.update(
            name="Refresh the package lists",
            cache_time=CACHE_SECONDS,
            _sudo=True,
            _env={"DEBIAN_FRONTEND": "noninteractive"},
        )
    apt.packages(
        name=f"Distribution packages: {', '.join(packages)}",
        packages=packages,
        no_recommends=True,
        extra_install_args=APT_OPTIONS,
        _sudo=True,
    )
    if service.user not in host.get_fact(Users):
        server.user(  # noqa: S604  # its login shell
            name=f"Service user {service.user}",
            user=service.user,
            home=service.home,
            shell="/bin/bash",
            ensure_home=True,
            _sudo=True,
        )
