"""What script/deploy makes of pyinfra's plan."""

from stack.run import planned_changes


def entry(name: str, changed: list[str], conditional: list[str]) -> dict[str, object]:
    return {
        "name": name,
        "hosts_with_change": changed,
        "hosts_with_conditional_change": conditional,
    }


def test_only_certain_changes_count() -> None:
    plan = {
        "plan": [
            entry("Engine | release", ["v100"], []),
            entry("Gateway | restarted, for it changed", [], ["dgx"]),
            entry("Base | packages", ["v100", "dgx"], []),
            entry("Checkpoint", [], []),
        ]
    }
    assert planned_changes(plan) == ["v100: Engine | release", "dgx, v100: Base | packages"]
