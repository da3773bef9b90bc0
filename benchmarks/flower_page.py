"""docs/results/flower.md, written from the measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.flower_load import ORDER, OURS_HERE, PLAIN_HERE
from benchmarks.flower_rounds import FLOOR, OURS, PLAIN
from benchmarks.flower_simulation import SIZES
from benchmarks.flower_split import CANDIDATES, NODES
from benchmarks.flower_store import Measured, Store
from benchmarks.tables import markdown

BOUND = 1.15
_MIB = 1 << 20
_AGAINST = {1: ("plain, our polling", "plain, stock polling")}
_AGAINST[2] = ("plain with evaluation, our polling", "plain with evaluation, stock polling")
_SHOWN = {
    FLOOR: "Flower alone: clients send back what they got, no torch, our polling",
    "plain, stock polling": "plain FedAvg, Flower's polling (every 3 s)",
    "plain, our polling": "plain FedAvg, our polling (0.05 to 0.5 s)",
    "plain with evaluation, stock polling": "plain FedAvg and a phase of evaluation, Flower's polling",
    "plain with evaluation, our polling": "plain FedAvg and a phase of evaluation, our polling",
}


_WHEN = ("before", "now")
_FIRST = ("", "1")
"""Rounds, as messages name them: what comes before the first, and the first."""
_SPLIT = [
    *("scheme", "what", "seconds a round", "of it in client apps", "in the server's app", "looks for replies"),
    *("processor seconds a round", "of it workers", "server's app", "beyond Flower alone"),
    *("first round, s", "its phases", "its processor seconds", "load"),
]


def page(store: Store) -> str:
    """The whole page; parts that were not measured are left out."""
    parts = [*_title(store), *_split(store), *_rounds(store), *_simulation(store), *_load(store), *_crowd(store)]
    return "\n".join(parts).rstrip() + "\n"


def _title(store: Store) -> Iterator[str]:
    machine = store.get("machine") or {}
    packages = ", ".join(f"{name} {one}" for name, one in machine.get("packages", {}).items())
    yield "# On Flower: what a round costs\n"
    yield (
        f"Digits, an mlp (26,122 parameters), square loss, one full-batch gradient per round, {machine.get('cores')} "
        f"cores, Python {machine.get('python')}, {packages}, one thread per process. Written by "
        "`python -m benchmarks.flower` from `flower.json`."
    )
    loads = [one for found in store.named("").values() for one in found.get("load", ())]
    if loads:
        yield (
            f"\nThe load average beside the measurements, which counts their own processes too, was "
            f"{min(loads):.1f} to {max(loads):.1f} (median {statistics.median(loads):.1f})."
        )
    for note in (store.get("notes") or {}).get("texts", ()):
        yield f"\n{note}"


def _split(store: Store) -> Iterator[str]:
    cells = dict(sorted(store.named("split/").items()))
    if not cells:
        return
    yield f"\n## A round taken apart, {NODES} clients\n"
    yield (
        "`python -m benchmarks.flower --parts split` (one cluster; each scheme, and an app without FedVeil that sends "
        "as many messages of as many bytes; medians over the rounds after the first). *Before* is another copy of "
        "FedVeil (`--before`), on a cluster of its own, in turns with this one.\n"
    )
    rows = []
    for scheme in CANDIDATES:
        floor = [one["floor"] for name, one in cells.items() if name.endswith(f"/now/{scheme}")]
        kinds = {when: [one for name, one in cells.items() if name.endswith(f"/{when}/{scheme}")] for when in _WHEN}
        if floor:
            rows.append([scheme, "Flower alone", *_taken_apart(floor, None), _load_of(kinds["now"])])
        rows += [
            [scheme, f"FedVeil, {when}", *_taken_apart(found, floor), _load_of(found)]
            for when, found in kinds.items()
            if found
        ]
    yield markdown(_SPLIT, rows)
    yield (
        "\nIn client apps: from the moment that FedVeil is reached in the process that Flower starts for a message "
        "until the answer is there, for the median client, over the phases of a round. In the server's app: from the "
        "last reply of a phase to the next push; nodes sleep three seconds after an answer, so most of that is not "
        "waited for. The first round is counted from the run's first message on; its processor time holds the start "
        "of the server's app and, before, that of workers."
    )


def _taken_apart(found: Sequence[Measured], floor: Sequence[Measured] | None) -> list[str]:
    """One row: seconds and processor time of rounds after the first, then of the first."""
    phases = [[p for p in one["phases"] if p["round"] not in _FIRST] for one in found]
    per_round = len(phases[0]) / max(len({p["round"] for p in phases[0]}), 1)
    in_clients = statistics.median(c["seconds"] for one in found for c in one["clients"] if c["round"] not in _FIRST)
    between = statistics.median(p["between"] for each in phases for p in each)
    looks = statistics.median(p["looks"] for each in phases for p in each)
    total, worker, server = (_used(found, kind) for kind in (None, "worker", "server app"))
    begun = [[p for p in one["phases"] if p["round"] in _FIRST] for one in found]
    first = statistics.median(sum(p["last"] + p["between"] * (n > 0) for n, p in enumerate(one)) for one in begun)
    start = statistics.median(sum(one["used"][1].values()) - sum(one["used"][0].values()) for one in found)
    return [
        _seconds(statistics.median(second for one in found for second in later(one))),
        _seconds(per_round * in_clients),
        _seconds(per_round * between),
        f"{per_round * looks:.0f}",
        f"{total:.2f}",
        f"{worker:.2f}",
        f"{server:.2f}",
        "" if floor is None else f"{total - _used(floor, None):+.2f}",
        _seconds(first),
        str(len(begun[0])),
        f"{start:.1f}",
    ]


def _used(found: Sequence[Measured], kind: str | None) -> float:
    """Median processor seconds of a round after the first, of one kind of process or of all."""

    def seconds(sample: dict[str, float]) -> float:
        return sum(sample.values()) if kind is None else sample.get(kind, 0.0)

    pairs = (pair for one in found for pair in zip(one["used"][1:], one["used"][2:], strict=False))
    return statistics.median(seconds(later) - seconds(earlier) for earlier, later in pairs)


def later(found: Measured) -> list[float]:
    """Seconds of the rounds after the first, which holds what happens once."""
    return [float(one) for one in found["seconds"][1:]]


def _passes(store: Store, name: str) -> list[Measured]:
    return [one for key, one in sorted(store.named("deployment/").items()) if key.partition("/")[2] == name]


def _middle(found: Sequence[Measured]) -> float:
    return statistics.median(second for one in found for second in later(one))


def _processor(found: Sequence[Measured]) -> float | None:
    known = [one["processor"] for one in found if one.get("processor") is not None]
    return statistics.mean(known) if known else None


def _rounds(store: Store) -> Iterator[str]:
    measured = {name: found for name in (FLOOR, *PLAIN, *OURS) if (found := _passes(store, name))}
    if not measured:
        return
    clients = next(iter(measured.values()))[0]["clients"]
    yield f"\n## Seconds per round, {clients} clients, real SuperLink and SuperNodes\n"
    yield (
        "`python -m benchmarks.flower --parts rounds` (one cluster, the candidates in turns, the first round of each "
        "left out)\n"
    )
    yield from _rounds_table(store, measured, clients)
    yield (
        "\nProcessor seconds are those of all processes of the cluster, server and clients. Every message starts a "
        "process on Flower. Plain FedAvg's loads torch in it; FedVeil's hands the message to a worker that has loaded "
        "torch already, which is why it can be below plain FedAvg. Against *Flower alone* FedVeil's own part shows."
    )
    yield "\n**Overhead over plain FedAvg with as many phases**, ratio of the medians (bound: at most 1.15):\n"
    yield from _ratios(measured)


def _rounds_table(store: Store, measured: dict[str, list[Measured]], clients: int) -> Iterator[str]:
    rows = []
    for name in ("fedavg", "veil-secagg, always"):
        found = store.get(f"here/{clients}/{name}")
        if found is not None:
            rows.append(
                [f"{name}, local engine, all clients in one process", "–", *_figures([found]), "", _load_of([found])]
            )
    for name, found in sorted(
        measured.items(), key=lambda item: (item[1][0]["phases"], list(_SHOWN).count(item[0]) == 0)
    ):
        used = _processor(found)
        cells = [_SHOWN.get(name, f"FedVeil, {name}"), str(found[0]["phases"]), *_figures(found)]
        rows.append([*cells, "" if used is None else f"{used:.1f}", _load_of(found)])
    yield markdown(["what", "phases", "seconds per round", "range", "rounds", "processor seconds", "load"], rows)


def _figures(found: Sequence[Measured]) -> list[str]:
    seconds = [one for each in found for one in later(each)]
    return [
        _seconds(statistics.median(seconds)),
        f"{_seconds(min(seconds))}–{_seconds(max(seconds))}",
        str(len(seconds)),
    ]


def _load_of(found: Sequence[Measured]) -> str:
    return "–".join(f"{one:.0f}" for one in (min(min(x["load"]) for x in found), max(max(x["load"]) for x in found)))


def _ratios(measured: dict[str, list[Measured]]) -> Iterator[str]:
    rows = []
    for name in OURS:
        if name not in measured:
            continue
        phases, ours = measured[name][0]["phases"], _middle(measured[name])
        for against in _AGAINST[phases]:
            if against in measured:
                ratio = ours / _middle(measured[against])
                used, theirs = _processor(measured[name]), _processor(measured[against])
                processor = "" if used is None or not theirs else f"{used / theirs:.2f}"
                verdict = "within" if ratio <= BOUND else "above"
                rows.append([f"FedVeil, {name}", _SHOWN[against], f"{ratio:.2f}", processor, verdict])
        if FLOOR in measured:
            ratio = ours / (phases * _middle(measured[FLOOR]))
            used, theirs = _processor(measured[name]), _processor(measured[FLOOR])
            processor = "" if used is None or not theirs else f"{used / (phases * theirs):.2f}"
            rows.append(
                [f"FedVeil, {name}", f"Flower alone, {phases} phase{'s' * (phases > 1)}", f"{ratio:.2f}", processor, ""]
            )
    yield markdown(["what", "against", "seconds", "processor time", f"≤ {BOUND}"], rows)
    pair = ("veil-secagg, on-dropout", "veil-secagg, always")
    if all(one in measured for one in pair):
        one, two = (_middle(measured[name]) for name in pair)
        yield (
            f'\nThe second phase of `unmask = "always"` costs {two - one:.1f} s a round ({_seconds(one)} → '
            f"{_seconds(two)}); without it, clients trust the server to be honest about who arrived."
        )


def _simulation(store: Store) -> Iterator[str]:
    rows = []
    for clients in SIZES:
        theirs = store.get(f"simulation/{clients}")
        ours = {name: store.get(f"beside/{clients}/{name}") for name in ("fedavg", "veil-secagg, always")}
        if theirs is None or "skipped" in theirs:
            if theirs is not None:
                yield f"\nPlain FedAvg on Ray with {clients} clients was left out: {theirs['skipped']}."
            continue
        ray = statistics.median(later(theirs))
        cells = [str(clients), _seconds(ray)]
        for found in ours.values():
            middle = statistics.median(later(found)) if found else None
            cells += ["–", "–"] if middle is None else [_seconds(middle), f"{ray / middle:.2f}"]
        rows.append([*cells, _load_of([theirs, *(one for one in ours.values() if one)])])
    if not rows:
        return
    yield "\n## Flower's simulation beside the local engine\n"
    yield (
        "`python -m benchmarks.flower --parts simulation` in an environment with `flwr[simulation]` (plain FedAvg on "
        "Ray with one core per client, so all cores work; the local engine in one process with one thread)\n"
    )
    columns = [
        "clients",
        "plain on Ray, s",
        "fedavg here, s",
        "Ray / here",
        "veil-secagg (always) here, s",
        "Ray / here",
        "load",
    ]
    yield markdown(columns, rows)
    yield "\nThe grid of the simulation looks for replies every 0.1 s, so its rounds come in steps of that."


def _load(store: Store) -> Iterator[str]:
    sizes = sorted({int(name.partition("/")[0]) for name in store.named("load/")})
    for clients in sizes:
        yield f"\n## {clients} clients on one machine, real SuperLink and SuperNodes\n"
        yield (
            "`python -m benchmarks.flower --parts load` (a cluster of its own; ten rounds of `veil-secagg` with two "
            "phases each, three of what it is held against; the first of each left out)\n"
        )
        taken = {name: found for name in ORDER if (found := store.get(f"load/{clients}/{name}")) is not None}
        rows = []
        for name, found in taken.items():
            if "skipped" in found:
                yield f"{name} was left out: {found['skipped']}.\n"
                continue
            used = found.get("processor")
            shown = "Flower alone, as many phases and bytes" if name == FLOOR else _SHOWN.get(name, f"FedVeil, {name}")
            cells = [shown, "1" if name == PLAIN_HERE else "2", *_figures([found])]
            rows.append([*cells, "" if used is None else f"{used:.1f}", str(found.get("short", 0)), _load_of([found])])
        if rows:
            columns = ["what", "phases", "seconds per round", "range", "rounds", "processor seconds"]
            yield markdown([*columns, "rounds with clients missing", "load"], rows)
        found = taken.get(OURS_HERE)
        if found is not None and "skipped" not in found:
            yield from _phases(found)
            yield from _memory(found)


def _phases(found: Measured) -> Iterator[str]:
    phases: list[Measured] = found["phases"]
    rows = []
    for what in dict.fromkeys(one["what"] for one in phases):
        seconds = [one["seconds"] for one in phases if one["what"] == what and one["seconds"] is not None]
        work = [one["in workers"] for one in phases if one["what"] == what]
        spread = f"{_seconds(min(seconds))}–{_seconds(max(seconds))}" if seconds else "–"
        middle = _seconds(statistics.median(seconds)) if seconds else "–"
        rows.append([what, str(len(work)), middle, spread, _seconds(statistics.median(work))])
    yield "\nThe phases of `veil-secagg`:\n"
    yield markdown(["phase", "how often", "seconds", "range", "of it in workers, summed over clients"], rows)
    yield (
        f"\nThe first round {_seconds(found['seconds'][0])} s, the whole run {found['whole']:.0f} s, starting the "
        f"cluster {found['started']:.0f} s.\n"
    )


def _memory(found: Measured) -> Iterator[str]:
    samples: list[dict[str, Any]] = found["memory"]
    ends = [one["ended"] for one in found["phases"] if one["what"] == "Unmask"]
    if len(ends) < 2:
        return
    first, last = _around(samples, ends[0]), _around(samples, ends[-1])
    peak = max(samples, key=lambda one: sum(kind["share"] for kind in one["kinds"].values()))
    rows = []
    for kind in sorted({kind for one in samples for kind in one["kinds"]}):
        most = max((one["kinds"].get(kind, {}).get("resident", 0) for one in samples), default=0)
        count = max(one["kinds"].get(kind, {}).get("processes", 0) for one in samples)
        early, late = (
            sum(s["kinds"].get(kind, {}).get("share", 0) for s in group) / len(group) for group in (first, last)
        )
        growth = (late - early) / (len(ends) - 1)
        steady = kind not in ("client app", "other")
        rows.append(
            [
                kind,
                str(count),
                f"{most / _MIB:,.0f}",
                f"{peak['kinds'].get(kind, {}).get('share', 0) / _MIB:,.0f}",
                f"{growth / _MIB:+,.1f}" if steady else "–",
            ]
        )
    total = sum(kind["share"] for kind in peak["kinds"].values())
    whole = max(sum(kind["resident"] for kind in one["kinds"].values()) for one in samples)
    columns = [
        "kind",
        "processes, at most",
        "resident, MiB, at most",
        "share at the peak, MiB",
        "growth per round, MiB",
    ]
    yield markdown(columns, rows)
    yield (
        f"\nAll together: {total / _MIB:,.0f} MiB at the peak with shared pages divided up, {whole / _MIB:,.0f} MiB as "
        "the sum of resident sizes. Growth is of the summed share, from the first round to the last. On disk "
        "afterwards: " + ", ".join(f"{what} {size / _MIB:.1f} MiB" for what, size in found["disk"].items()) + "."
    )


def _around(samples: list[dict[str, Any]], moment: float) -> list[dict[str, Any]]:
    return sorted(samples, key=lambda one: abs(one["at"] - moment))[:3]


def _crowd(store: Store) -> Iterator[str]:
    kinds = (("10", "crowd/"), ("1", "crowd-m1/"))
    every = [(int(name), m, one) for m, start in kinds for name, one in store.named(start).items()]
    measured = [one for one in every if "skipped" not in one[2]]
    if not measured:
        return
    yield "\n## Hundreds of clients: one round of veil-secagg through an in-process Grid\n"
    yield (
        "`python -m benchmarks.flower --parts crowd` (engine, messages, parcels, desks and sealed state are real; "
        "Flower's processes, network and serialisation are left out; all clients share one process, one after the "
        "other)\n"
    )
    names = [one["what"] for one in measured[0][2]["phases"]]
    rows = []
    for clients, groups, found in sorted(measured, key=lambda one: (-int(one[1]), one[0])):
        phases = [f"{one['all']:.1f} ({one['server after']:.1f})" for one in found["phases"]]
        each = 1000 * found["total"] / clients
        memory = (found["peak"] - found["resident before"]) / clients
        up, down = (sum(one[way] for one in found["phases"]) / clients for way in ("up", "down"))
        cells = [str(clients), groups, *phases, f"{found['total']:.1f}", f"{each:.0f}"]
        rows.append([*cells, f"{memory / _MIB:.1f}", f"{down / 1e6:.2f} / {up / 1e6:.2f}", _load_of([found])])
    columns = [
        "clients",
        "m",
        *names,
        "all, processor s",
        "ms a client",
        "MiB a client",
        "MB down / up a client",
        "load",
    ]
    yield markdown(columns, rows)
    yield (
        "\nProcessor seconds per phase, in brackets what the server then needs alone. Memory is the process's peak, "
        "desks and server together. m is the number of secret γ (`head_groups`), which sets how long an upload is."
    )
    for clients, groups, found in every:
        if "skipped" in found:
            yield f"\n{clients} clients with m = {groups} were left out: {found['skipped']}."
    for name, found in store.named("profile/").items():
        whole = f"cProfile, whose own cost is in it; {found['total']:.0f} s in all"
        yield f"\nWhere the time goes with {name} clients, m = 1 ({whole}):\n"
        top = [one for one in found["heaviest"] if one["own"] > 0.01 * found["total"]]
        rows = [
            [f"`{one['where']}`", f"{one['calls']:,}", f"{one['own']:.1f}", f"{one['within']:.1f}"]
            for one in sorted(top, key=lambda one: -one["own"])[:15]
        ]
        yield markdown(["where", "calls", "own seconds", "with what it calls"], rows)


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"
