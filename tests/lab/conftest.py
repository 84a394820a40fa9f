"""Tests on a lab of their own: two real systemd hosts, deployed by `script/deploy`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from lab import mirror
from lab.debian import debian_mirror
from lab.places import CACHE
from tests.lab.lab_support import LAB_NAME, DeployedLab, environment
from tests.lab.toolkit_lab import apt_sources, new_site
from tests.unit.toolkit_support import Site, lay_out_programs, served


@pytest.fixture(scope="session")
def lab() -> Iterator[DeployedLab]:
    """A fresh lab, deployed once; it goes down with this process, whatever happens."""
    deployed = DeployedLab(environment(LAB_NAME), "")
    deployed.run("script/lab", "down")
    try:
        deployed.run("script/lab", "up", "--watch", str(os.getpid()))
        deployed.first_deploy = deployed.run("script/deploy").stdout
        yield deployed
    finally:
        deployed.run("script/lab", "down")


@pytest.fixture(scope="session")
def deploy_with(
    lab: DeployedLab, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, object]], CompletedProcess[str]]:
    """Deploy with other settings: returns pyinfra's run for a dict of v100 overrides."""

    return lambda overrides: lab.deploy_with(
        "v100", overrides, tmp_path_factory.mktemp("inventory")
    )


@pytest.fixture(scope="session")
def info() -> mirror.MirrorInfo:
    return mirror.build(CACHE, debian_mirror(apt_sources()))


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out_programs(tmp_path_factory.mktemp("tools") / "tools")


@pytest.fixture(scope="session")
def installed(
    tmp_path_factory: pytest.TempPathFactory, programs: Path, info: mirror.MirrorInfo
) -> Site:
    """A toolkit installed over http; tests that change a tree take a copy."""
    with served(info.folder) as address:
        site = new_site(tmp_path_factory.mktemp("installed"), programs, info, address)
        done = site.run("install")
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def copied(installed: Site, tmp_path: Path) -> Path:
    """A copy of the installed tree, stamp and file times included."""
    tree = tmp_path / "copy"
    subprocess.run(["cp", "-a", installed.link.resolve(), tree], check=True)
    return tree
