"""The lab's two hosts (`script/lab up`), and every point in which they differ from production."""

from lab import places

_lab = places.load_ready("inventory/lab.py")


def _ssh(name: str) -> dict[str, object]:
    return {
        "ssh_hostname": "127.0.0.1",
        "ssh_port": _lab.ports[f"ssh-{name}"],
        "ssh_user": places.LOGIN_USER,
        "ssh_key": str(_lab.ssh_key),
        "ssh_known_hosts_file": str(_lab.known_hosts),
        "ssh_strict_host_key_checking": "yes",
        "ssh_config_file": "/dev/null",
        "ssh_allow_agent": False,
        "ssh_look_for_keys": False,
    }


v100 = [
    (
        "v100",
        {
            **_ssh("v100"),
            "address": places.HOSTS["v100"].late_address,
            "artifacts": _lab.artifacts,
            "overrides": {
                "toolkit.source": "mirror",
                "toolkit.location": f"{places.SITE_URL}/toolkit",
                "toolkit.components": _lab.toolkit_components,  # no libraries, no profilers
                "engine.python": "python3.11",  # Debian 12's
                "engine.numa_node": None,  # no cards, no socket to pin to
                "engine.census_modules_per_rank": 8,  # 2 fused modules in each of 4 layers
                "engine.vocabulary_rows": 40960,  # the miniature's
                "engine.boot_deadline_seconds": 60,
                "engine.cold_boot_deadline_seconds": 60,
                "engine.drain_seconds": 10,
                "access.consumers": [places.BRIDGE_ADDRESS],  # this machine
            },
        },
    )
]

dgx = [
    (
        "dgx",
        {
            **_ssh("dgx"),
            "address": places.HOSTS["dgx"].address,
            "stranger_address": places.HOSTS["dgx"].stranger_address,
            "artifacts": _lab.artifacts,
            "overrides": {
                "gateway.hold_seconds": 60,
                "gateway.keys": {"lab": _lab.gateway_key_sha256},
            },
        },
    )
]
