"""What attacks get from every scheme on digits: the figures of docs/security.md.

`OMP_NUM_THREADS=1 python -m benchmarks.audits --out runs/audits` trains each scheme twice, once as usual and once on so
few samples that the model learns them by heart, audits both, and writes audits.json and audits.md. Runs and audits that
are there already are not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from fedveil.audit.findings import SHORT, Finding, best_of, finding_from, read_audit
from fedveil.audit.running import audit_run
from fedveil.config import RunConfig
from fedveil.runs import session

NOISE: dict[str, Any] = {"epsilon": 8.0, "clip": 1.0}
SMALL_STEPS: dict[str, Any] = {"lr": 0.01, "momentum": 0.0}
LOCAL: dict[str, Any] = {"clip": 0.001, "local_epochs": 3, "lr": 0.1, "momentum": 0.0}
SCHEMES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "pbpfl": {},
    "lossless": {},
    "veil-secagg": {},
    "ldp": NOISE,
    "cdp": NOISE,
    "nadp": NOISE,
    "veil-dp": NOISE,
    "mpdp": {"epsilon": 3.0, **SMALL_STEPS},
    "mp-cdp": {"epsilon": 3.0, **SMALL_STEPS},
    "dp-fedavg": LOCAL,
    "paraaegis": {**LOCAL, "share": 0.1, "cipher": "pads"},
}
USUAL: dict[str, Any] = {"dataset": "digits", "seed": 1, "clients": 10, "rounds": 100, "lr": 0.05, "momentum": 0.9}
BY_HEART: dict[str, Any] = {**USUAL, "test_fraction": 0.95, "rounds": 400, "clients": 4}
ON_MEMBERS = ("membership", "membership-layers", "likelihood", "received")


def settings_of(scheme: str, *, by_heart: bool) -> dict[str, Any]:
    """One run's settings; gradient schemes train with the square loss, which head noise needs."""
    loss = {} if "local_epochs" in SCHEMES[scheme] else {"loss": "square"}
    base = BY_HEART if by_heart else USUAL
    quiet = {"evaluate_every": 0, "checkpoint_every": 0, "record": True}
    return {**base, **loss, **quiet, **SCHEMES[scheme], "scheme": scheme}


def audited(scheme: str, folder: Path, *, by_heart: bool, quick: bool) -> None:
    """Train and audit one scheme, unless that was done."""
    run = folder / (f"{scheme}-by-heart" if by_heart else scheme)
    if not (run / "summary.json").exists():
        session.run(RunConfig.from_mapping(settings_of(scheme, by_heart=by_heart), where=scheme), run, quiet=True)
    audit_run(run, attacks=ON_MEMBERS if by_heart else (), quick=quick, workers=1)


def in_processes(folder: Path, schemes: Sequence[str], *, jobs: int, quick: bool) -> None:
    """Every scheme, usual and by heart, in processes of their own."""

    def one(scheme: str, by_heart: bool) -> str:
        command = [sys.executable, "-m", "benchmarks.audits", "--out", str(folder), "--one", scheme]
        command += ["--by-heart"] * by_heart + ["--quick"] * quick
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = "" if done.returncode == 0 else f": {done.stderr.strip().splitlines()[-1:]}"
        return f"{scheme}{' by heart' * by_heart}{said or ' done'}"

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, name, flag) for flag in (False, True) for name in schemes]
        for done in as_completed(waiting):
            print(done.result(), flush=True)
            written(folder, schemes, quick=quick)


def found_in(run: Path) -> list[Finding]:
    """An audit's findings; none where there is no audit."""
    path = run / "audit" / "audit.json"
    return [finding_from(one) for one in read_audit(path)["findings"]] if path.exists() else []


def tables(folder: Path, schemes: Sequence[str]) -> Iterator[str]:
    """One table per scheme: by adversary and asset, the attack that got most."""
    columns = ("who", "after", "from", "best attack", "gets", "by chance", "unprotected", "verdict")
    for scheme in schemes:
        usual = found_in(folder / scheme)
        members = [one for one in found_in(folder / f"{scheme}-by-heart") if one.asset == "members"]
        if not usual and not members:
            continue
        yield f"\n## {scheme}\n"
        yield "| " + " | ".join(columns) + " |"
        yield "| " + " | ".join("---" for _ in columns) + " |"
        for one in (*best_of(usual), *best_of(members)):
            learned = ", learned by heart" if one in members else ""
            shown = [one.shown.get(name, "–") for name in ("value", "chance", "unprotected")]
            cells = (one.adversary, one.asset + learned, one.seen, one.attack + " (adaptive)" * one.adaptive, *shown)
            yield "| " + " | ".join((*cells, SHORT[one.verdict])) + " |"


def written(folder: Path, schemes: Sequence[str], *, quick: bool) -> None:
    """Write audits.md and audits.json from the audits there are."""
    title = f"# What attacks got on digits ({'quick' if quick else 'full'} audits)\n"
    (folder / "audits.md").write_text("\n".join([title, *tables(folder, schemes)]) + "\n", encoding="utf-8")
    kept = {
        scheme: {
            kind: read_audit(path)["findings"]
            for kind, run in (("usual", scheme), ("by heart", f"{scheme}-by-heart"))
            if (path := folder / run / "audit" / "audit.json").exists()
        }
        for scheme in schemes
    }
    (folder / "audits.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/audits"))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--by-heart", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        audited(given.one, given.out, by_heart=given.by_heart, quick=given.quick)
        return
    in_processes(given.out, given.schemes.split(","), jobs=given.jobs, quick=given.quick)


if __name__ == "__main__":
    main()
