"""The 11 gates of a boot: pure functions over the lines of this start's log.

A gate reads what the engine was observed to do. Four ranks write to one stream, so lines can be
glued together or torn: everything is searched for inside a line and counted by occurrence.
Each result is one of:

- `pass`: the evidence is there, or the gate does not apply;
- `fail`: contrary evidence, or none although it must have been printed by now;
- `cannot tell`: the log cannot answer (empty, incomplete, torn, or no request was made yet).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from enginectl.bootlog import GAP
from enginectl.release import GateSettings
from enginectl.server import Chat

PASS = "pass"  # noqa: S105
FAIL = "fail"
CANNOT_TELL = "cannot tell"

EVIDENCE_CHARS = 300

_DEPTH = re.compile(r"num_speculative_tokens\W{1,4}(\d+)")
_KV_DTYPE = re.compile(r"kv_cache_dtype=['\"]?([\w.]+)")
_ROUTE = re.compile(r"Skinny route map: M=\d+ +N=(\d+) +K=\d+ -> ([\w-]+)")
_KV_DECLINED = re.compile(r"ignor\w+ the checkpoint's kv_cache quantization directive", re.I)
_XQA = "FLASH_ATTN_V100 MTP verifier XQA path active (rows="
_REPACK = ("falling back to requant pack", "packing from the model's own weights")
_SCALAR = "scalar_paged"
_CENSUS = "QPN8_CENSUS_LOAD"
_VERDICT = re.compile(r"eligible=(YES|NO)")
_CENSUS_MODULE = re.compile(r"QPN8_CENSUS_LOAD(?: n=\d+)? layer=(\S+)")
_RANK = re.compile(r"Worker_TP(\d+)")
_RUN = re.compile(r"QPN8_CENSUS_RUN .*?route=(qpn8(?:-mt2)?)(?![\w-])")
# Lines without any of these are skipped quickly.
_MARKS = (
    "num_speculative_tokens",
    "kv_cache_dtype=",
    "route map:",
    "kv_cache quantization",
    "XQA path active",
    _REPACK[0],
    _REPACK[1],
    _SCALAR,
    "QPN8_CENSUS",
    "eligible=",
    GAP,
)
_LEAST_VOCABULARY_ROWS = 10_000  # no other matrix of the model has five digits of rows


@dataclass(frozen=True)
class Evidence:
    """A place in the log: the line's number from 1 and its text, cut to EVIDENCE_CHARS."""

    line: int
    text: str


@dataclass(frozen=True)
class Gate:
    """The result of one gate: its number and name in the table, verdict, reason and evidence."""

    number: int
    name: str
    verdict: str
    reason: str
    evidence: Evidence | None = None


@dataclass
class Seen:
    """What one pass over a log found; first occurrences with their places, and counts."""

    lines: int = 0
    gap: Evidence | None = None
    depth: tuple[int, Evidence] | None = None
    kv_dtype: tuple[str, Evidence] | None = None
    kv_declined: Evidence | None = None
    xqa: Evidence | None = None
    repack: Evidence | None = None
    scalar: Evidence | None = None
    lm_head: Evidence | None = None
    lm_head_other: Evidence | None = None
    qpn2: Evidence | None = None
    run: Evidence | None = None
    census_heads: int = 0
    census_verdicts: Counter[str] = field(default_factory=Counter)
    census_modules: dict[int | None, set[str]] = field(default_factory=dict)
    census_refused: Evidence | None = None
    census_last: Evidence | None = None


def observe(lines: Iterable[str], settings: GateSettings) -> Seen:
    """Read a log once, in memory independent of its length."""
    seen = Seen()
    rows = settings.vocab_rows // settings.tensor_parallel
    for number, line in enumerate(lines, 1):
        seen.lines = number
        if any(mark in line for mark in _MARKS):
            _observe_line(seen, line, Evidence(number, line.strip()[:EVIDENCE_CHARS]), rows)
    return seen


def evaluate(seen: Seen, settings: GateSettings, warm: Chat | None) -> list[Gate]:
    """All 11 gates, in order.

    Args:
        seen: what `observe` found in this start's log.
        settings: the gates' parameters from the release.
        warm: the outcome of a chat request to this start, or None if none was made.
    """
    warmed = warm is not None and warm.succeeded
    return [
        _warm(warm),
        _depth(seen, settings.mtp_depth),
        _lm_head(seen, settings, warmed),
        _never(seen, 4, "no lm_head repack", seen.repack),
        _kv_dtype(seen),
        _once(seen, 6, "FP16 KV resolved", seen.kv_declined, lazy=False, warmed=warmed),
        _never(seen, 7, "zero scalar fallback", seen.scalar),
        _xqa(seen, settings.mtp_depth, warmed),
        _once(seen, 9, "QPN2 dispatched", seen.qpn2, lazy=True, warmed=warmed),
        _census(seen, settings),
        _dispatched(seen, settings, warmed),
    ]


def _observe_line(seen: Seen, line: str, place: Evidence, rows: int) -> None:
    if GAP in line:
        seen.gap = seen.gap or place
    if seen.depth is None and (depth := _DEPTH.search(line)):
        seen.depth = int(depth[1]), place
    if seen.kv_dtype is None and (dtype := _KV_DTYPE.search(line)):
        seen.kv_dtype = dtype[1], place
    if _KV_DECLINED.search(line):
        seen.kv_declined = seen.kv_declined or place
    if _XQA in line:
        seen.xqa = seen.xqa or place
    if _SCALAR in line:
        seen.scalar = seen.scalar or place
    if any(mark in line for mark in _REPACK):
        seen.repack = seen.repack or place
    for route in _ROUTE.finditer(line):
        if route[2] == "qpn2":
            seen.qpn2 = seen.qpn2 or place
        if int(route[1]) < _LEAST_VOCABULARY_ROWS and int(route[1]) != rows:
            continue
        if int(route[1]) == rows and route[2].startswith("qpn"):
            seen.lm_head = seen.lm_head or place
        else:
            seen.lm_head_other = seen.lm_head_other or place
    if _RUN.search(line):
        seen.run = seen.run or place
    if _CENSUS in line or "eligible=" in line:
        _observe_census(seen, line, place)


def _observe_census(seen: Seen, line: str, place: Evidence) -> None:
    seen.census_heads += line.count(_CENSUS)
    for verdict in _VERDICT.findall(line):
        seen.census_verdicts[verdict] += 1
        if verdict == "NO":
            seen.census_refused = seen.census_refused or place
    for module in _CENSUS_MODULE.finditer(line):
        ranks = _RANK.findall(line[: module.start()])
        rank = int(ranks[-1]) if ranks else None
        seen.census_modules.setdefault(rank, set()).add(module[1])
    seen.census_last = place


def _warm(warm: Chat | None) -> Gate:
    name = "warm request succeeded"
    if warm is None:
        return Gate(1, name, CANNOT_TELL, "no request was made; a log alone does not show it")
    return Gate(1, name, PASS if warm.succeeded else FAIL, warm.detail)


def _depth(seen: Seen, wanted: int) -> Gate:
    name = "MTP depth served"
    if seen.depth is None and wanted == 0 and not _unreadable(seen):
        return Gate(2, name, PASS, "no speculation, as wanted")
    if seen.depth is None:
        return Gate(2, name, CANNOT_TELL, _unreadable(seen) or "num_speculative_tokens not found")
    depth, place = seen.depth
    return Gate(2, name, PASS if depth == wanted else FAIL, f"{depth}, wanted {wanted}", place)


def _kv_dtype(seen: Seen) -> Gate:
    name = "kv_cache_dtype is auto"
    if seen.kv_dtype is None:
        return Gate(5, name, CANNOT_TELL, _unreadable(seen) or "kv_cache_dtype= not found")
    dtype, place = seen.kv_dtype
    return Gate(5, name, PASS if dtype == "auto" else FAIL, f"is {dtype}", place)


def _lm_head(seen: Seen, settings: GateSettings, warmed: bool) -> Gate:
    name = "lm_head on its own NVFP4 codes"
    if seen.lm_head is None and seen.lm_head_other is not None:
        rows = settings.vocab_rows // settings.tensor_parallel
        reason = f"no qpn route at N={rows}, the rows of lm_head on one rank"
        return Gate(3, name, FAIL, reason, seen.lm_head_other)
    return _once(seen, 3, name, seen.lm_head, lazy=True, warmed=warmed)


def _xqa(seen: Seen, depth: int, warmed: bool) -> Gate:
    name = "XQA tensor-core decode"
    if depth == 0:
        return Gate(8, name, PASS, "does not apply without speculation")
    return _once(seen, 8, name, seen.xqa, lazy=True, warmed=warmed)


def _dispatched(seen: Seen, settings: GateSettings, warmed: bool) -> Gate:
    name = "QPN8 dispatched"
    if settings.census_modules_per_rank == 0:
        return Gate(11, name, PASS, "does not apply without fused FP8 modules")
    return _once(seen, 11, name, seen.run, lazy=True, warmed=warmed)


def _once(
    seen: Seen, number: int, name: str, place: Evidence | None, *, lazy: bool, warmed: bool
) -> Gate:
    """A gate that wants a line; a `lazy` one is printed on first use, so after a request."""
    if place is not None:
        return Gate(number, name, PASS, "found", place)
    if reason := _unreadable(seen):
        return Gate(number, name, CANNOT_TELL, reason)
    if lazy and not warmed:
        reason = "not found; it is printed on first use and no request is known to have succeeded"
        return Gate(number, name, CANNOT_TELL, reason)
    return Gate(number, name, FAIL, "not found")


def _never(seen: Seen, number: int, name: str, place: Evidence | None) -> Gate:
    """A gate that wants the absence of a line, which only a complete log can show."""
    if place is not None:
        return Gate(number, name, FAIL, "found", place)
    if reason := _unreadable(seen):
        return Gate(number, name, CANNOT_TELL, reason)
    return Gate(number, name, PASS, f"not found in {seen.lines} lines")


def _census(seen: Seen, settings: GateSettings) -> Gate:
    wanted = settings.census_modules_per_rank * settings.tensor_parallel
    heads, yes = seen.census_heads, seen.census_verdicts["YES"]
    verdict, reason = PASS, f"{yes} eligible of {wanted} wanted"
    place = seen.census_last
    if seen.census_refused is not None:
        verdict, place = FAIL, seen.census_refused
        reason = f"{seen.census_verdicts['NO']} refused, {reason}"
    elif yes > wanted or heads > wanted:
        verdict = FAIL
        reason = f"{max(heads, yes)} census lines, {wanted} wanted"
    elif yes < wanted and (gap := _unreadable(seen)):
        verdict, reason = CANNOT_TELL, f"{reason}; {gap}"
    elif heads > yes:
        verdict = CANNOT_TELL
        reason = f"{reason}; the log is torn ({heads} census lines, {yes} verdicts)"
    elif yes < wanted and not _same_on_every_rank(seen, settings.tensor_parallel):
        verdict = CANNOT_TELL
        reason = f"{reason}; the ranks load the same modules but list different ones: lines lost"
    elif yes < wanted:
        verdict = FAIL
    return Gate(10, "QPN8 census", verdict, reason, place)


def _same_on_every_rank(seen: Seen, ranks: int) -> bool:
    """Tensor parallelism shards every module, so each rank must list the same ones.

    Also true if nothing was listed at all.
    """
    if not seen.census_modules:
        return True
    listed = [seen.census_modules.get(rank, set()) for rank in range(ranks)]
    return None not in seen.census_modules and all(modules == listed[0] for modules in listed)


def _unreadable(seen: Seen) -> str:
    """Why the absence of a line in this log proves nothing; empty if it does."""
    if seen.lines == 0:
        return "the log is empty"
    if seen.gap is not None:
        return f"the log is incomplete from line {seen.gap.line} on"
    return ""
