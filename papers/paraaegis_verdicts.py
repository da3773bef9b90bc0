"""ParaAegis's claims on Table 1, judged by the figures; a claim that fails says where and why."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from papers.cells import Results
from papers.paraaegis_figures import counting, seconds, training_of
from papers.paraaegis_rows import BY_LABEL, DIAL, DIAL_NAMES, PARTITION_TITLES, ROWS, STATIC, Bench
from papers.report import Check

CHANCE = 2.0
"""Points of accuracy that two runs of the same training may differ by."""

SAME_NOISE = (
    "by construction: noise first and encryption after it is the very noise of DP-FedAvg, so that only time can differ"
)


def checks(results: Results, bench: Bench, partition: str) -> tuple[Check, ...]:
    """Every claim, for one partition."""
    accuracy = {row.label: training_of(results, bench, partition, row).accuracy for row in ROWS}
    time = {row.label: seconds(results, bench, partition, row) for row in ROWS}
    shared = training_of(results, bench, partition, BY_LABEL["serial"]).of is BY_LABEL["dp-fedavg"]
    where = f"{bench.name} {PARTITION_TITLES[partition]}"
    found = (
        growing("accuracy grows with r", [accuracy[one] for one in DIAL], DIAL_NAMES, unit="%"),
        _time(results, bench, time),
        _serial_accuracy(accuracy, shared=shared),
        _serial_time(time),
        _dynamic_accuracy(accuracy),
        _dynamic_time(time),
        _pads(accuracy, time),
    )
    return tuple(Check(f"{where}: {one.claim}", one.held, one.seen) for one in found)


def _time(results: Results, bench: Bench, time: Mapping[str, float | None]) -> Check:
    found = growing("time grows with r", [time[one] for one in DIAL], DIAL_NAMES, unit="s")
    votes = {row.title: counting(results, bench, row) for row in STATIC}
    told = ", ".join(f"{title} {_short(one)} s" for title, one in votes.items() if one)
    if found.held is not False or not told:
        return found
    why = f"; counting votes alone takes, of a round: {told}; at 0 and at 100 % nobody votes"
    return Check(found.claim, found.held, found.seen + why)


def growing(claim: str, values: Sequence[float | None], names: Sequence[str], *, unit: str) -> Check:
    """Whether the numbers grow from the first to the last; where they do not, the steps down are named."""
    there = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    seen = ", ".join(f"{name}: {_short(value)} {unit}" for name, value in there)
    if len(there) < 2:
        return Check(claim, None, seen)
    down = [
        f"{a} → {b} ({_short(other - one)} {unit})"
        for (a, one), (b, other) in itertools.pairwise(there)
        if not one < other
    ]
    return Check(claim, not down, seen + (f"; not from {', '.join(down)}" if down else ""))


def _serial_accuracy(accuracy: Mapping[str, float | None], *, shared: bool) -> Check:
    claim = f"serial is the least accurate (below DP-FedAvg by more than {CHANCE:g} points of chance)"
    serial, plain = accuracy["serial"], accuracy["dp-fedavg"]
    others = {name: one for name, one in accuracy.items() if name != "serial" and one is not None}
    if serial is None or plain is None:
        return Check(claim, None)
    lower = [name for name, one in others.items() if one < serial]
    held = serial < plain - CHANCE and not lower
    seen = f"serial {serial:.1f}, DP-FedAvg {plain:.1f}"
    if not held:
        which = f"; below serial: {', '.join(lower)}" if lower else ""
        seen += f"{which}; {SAME_NOISE}" + (" (the training was shared)" if shared else "")
    return Check(claim, held, seen)


def _serial_time(time: Mapping[str, float | None]) -> Check:
    claim = "serial takes longest"
    serial, others = time["serial"], {name: one for name, one in time.items() if name != "serial" and one is not None}
    if serial is None or not others:
        return Check(claim, None)
    longer = [f"{name} {_short(one)} s" for name, one in others.items() if one >= serial]
    seen = f"{_short(serial)} s; " + (
        f"longer: {', '.join(longer)}" if longer else f"next {_short(max(others.values()))} s"
    )
    return Check(claim, not longer, seen)


def _dynamic_accuracy(accuracy: Mapping[str, float | None]) -> Check:
    claim = f"dynamic 10 % × 0.99 lies between static 5 % and 10 % in accuracy (up to {CHANCE:g} points of chance)"
    low, one, high = (accuracy[name] for name in ("r5", "r10-x0.99", "r10"))
    if low is None or one is None or high is None:
        return Check(claim, None)
    held = min(low, high) - CHANCE <= one <= max(low, high) + CHANCE
    return Check(claim, held, f"static 5 %: {low:.1f}, dynamic: {one:.1f}, static 10 %: {high:.1f}")


def _dynamic_time(time: Mapping[str, float | None]) -> Check:
    claim = "dynamic 10 % × 0.99 takes less time than static 10 %"
    one, static = time["r10-x0.99"], time["r10"]
    if one is None or static is None:
        return Check(claim, None)
    return Check(claim, one < static, f"{_short(one)} and {_short(static)} s")


def _pads(accuracy: Mapping[str, float | None], time: Mapping[str, float | None]) -> Check:
    claim = f"ours: pads encrypt 100 %, within {CHANCE:g} points of FedAvg, in less time than CKKS encrypts 1 %"
    ours, plain, ours_time, ckks_time = accuracy["pads100"], accuracy["fedavg"], time["pads100"], time["r1"]
    if ours is None or plain is None or ours_time is None or ckks_time is None:
        return Check(claim, None)
    held = abs(ours - plain) <= CHANCE and ours_time < ckks_time
    return Check(claim, held, f"{ours:.1f} and {plain:.1f} %, {_short(ours_time)} and {_short(ckks_time)} s")


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"
