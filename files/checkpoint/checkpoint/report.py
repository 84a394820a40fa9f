"""A census as people and programs read it."""

from __future__ import annotations

from checkpoint import census
from checkpoint.census import Census, Difference
from checkpoint.strict import NAMED_AT_MOST

GROUP_LABELS = {"mtp": "MTP", "input_scale": "input scales"}


def as_json(found: Census, expected: Census, difference: Difference) -> dict[str, object]:
    """Both censuses; of each kind of difference a count and the first names."""

    def named(names: list[str]) -> dict[str, object]:
        return {"count": len(names), "first": names[:NAMED_AT_MOST]}

    return {
        "found": found.as_json(),
        "expected": expected.as_json(),
        "missing": named(difference.missing),
        "extra": named(difference.extra),
        "differing": named(difference.differing),
    }


def table(found: Census, expected: Census) -> str:
    """Both censuses side by side, with what differs marked."""
    rows = [("tensors", found.tensors, expected.tensors)]
    rows += [(group, found.groups[group], expected.groups[group]) for group in census.GROUPS]
    rows += [
        (dtype, found.dtypes.get(dtype, 0), expected.dtypes.get(dtype, 0))
        for dtype in sorted(found.dtypes.keys() | expected.dtypes)
    ]
    rows += [("bytes", found.bytes, expected.bytes)]
    lines = [f"{'':12} {'found':>15} {'expected':>15}"]
    lines += [
        f"{label:12} {have:15,} {want:15,}{'' if have == want else '  differs'}"
        for label, have, want in rows
    ]
    return "\n".join(lines)


def total(expected: Census) -> str:
    """The census in one sum: `2,194 = 1,445 trunk + 333 vision + ...`."""
    parts = " + ".join(
        f"{count:,} {GROUP_LABELS.get(group, group)}"
        for group, count in expected.groups.items()
        if count
    )
    return f"{expected.tensors:,} = {parts}"
