"""Three hospitals train one model on tumour records that none of them may give away.

    python examples/three_hospitals.py --out runs/hospitals

The records are scikit-learn's breast-cancer set (569 tumours, 30 measurements each), dealt to hospitals that see very
different patients. The story, step by step: docs/examples/three-hospitals.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import fedveil
from fedveil import data, models
from fedveil.audit.running import audit_run
from fedveil.config import RunConfig
from fedveil.runs import session

HOSPITALS = ("screening centre", "general hospital", "cancer clinic")
SKEW = 0.3  # of Dirichlet's distribution: the smaller, the more a hospital sees of one kind only
SEED = 1
NETWORK: dict[str, Any] = {"depth": 2, "width": 32}

# What each hospital's own file says. It is checked by the hospital's part of the program, whatever the server asks.
POLICY = """\
max_epsilon = 3.0
delta = 1e-5
min_cohort = 3
max_clip = 1.0
"""


def main() -> int:
    """Each alone, then together, then the ledger, then an attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=3.0, help="privacy budget of the whole run (default: 3)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of training (default: 40)")
    parser.add_argument("--out", type=Path, default=Path("runs/hospitals"), help="folder of the run; must be new")
    parser.add_argument("--no-audit", action="store_true", help="leave the attack out")
    asked = parser.parse_args()
    try:
        alone()
        together(asked.epsilon, asked.rounds, asked.out)
        if not asked.no_audit:
            attack(asked.out)
    except fedveil.FedVeilError as reason:
        print(f"error: {reason}", file=sys.stderr)
        return reason.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def alone() -> None:
    """What each hospital gets from its own records."""
    split = data.load("breast-cancer", seed=SEED)
    test = (split.test.x, split.test.y)
    parts = data.partition(split.train, clients=3, how="dirichlet", alpha=SKEW, seed=SEED)
    print(f"Each alone, tested on {len(split.test)} records that nobody trained on:")
    for name, rows in zip(HOSPITALS, parts, strict=True):
        net = models.build("mlp", input_shape=split.train.input_shape, outputs=2, seed=SEED, **NETWORK)
        own = [(split.train.x[rows], split.train.y[rows])]
        found = fedveil.train(net, own, test=test, scheme="fedavg", rounds=60, lr=0.5, seed=SEED, progress=False)
        malignant = int((split.train.y[rows] == 0).sum())
        right = f"{found.summary['test_accuracy']:.1%}"
        print(f"  {name:<17} {len(rows):>3} records, {malignant:>2} of them malignant: {right} right")


def together(epsilon: float, rounds: int, out: Path) -> None:
    """One model from all three, under a veil on the way down and proven privacy on the way up."""
    out.parent.mkdir(parents=True, exist_ok=True)
    policy = out.with_name(f"{out.name}-policy.toml")
    policy.write_text(POLICY, encoding="utf-8")
    config = RunConfig(
        scheme="veil-dp",
        epsilon=epsilon,
        dropouts="tolerate",  # nobody has to believe the server about who did not answer
        policy=str(policy),
        dataset="breast-cancer",
        clients=3,
        partition="dirichlet",
        alpha=SKEW,
        model_options=NETWORK,
        lr=0.3,
        rounds=rounds,
        seed=SEED,
        secrets="os",  # data repeat; first model, keys and noise do not
        record=True,
    )
    summary = session.run(config, out, quiet=not sys.stderr.isatty())
    print(f"\nTogether, {summary['rounds']} rounds of {config.scheme}: {summary['test_accuracy']:.1%} right")
    if "stopped" in summary:
        print(f"  ended early: {summary['stopped']}")
    print("What that proves, for the hospital that is worst off:")
    for line in summary["ledger"]["lines"]:
        guarantee = f"ε = {line['epsilon']:.2f} at δ = {line['delta']:g}"
        print(f"  against {line['adversary']:<28} {guarantee}, for {line['unit']}")
    print("What it takes for granted, and what it does not protect:")
    assumed = {text: None for line in summary["ledger"]["lines"] for text in line["assumptions"]}
    for text in (*assumed, *summary["ledger"]["unprotected"]):
        print(f"  – {text}")


def attack(out: Path) -> None:
    """Let the server, alone and with one hospital on its side, try to rebuild a record."""
    print("\nAnd if somebody tries? (first rounds replayed with one record per hospital: the worst case)", flush=True)
    found = audit_run(out, attacks=["closed-form"], quick=True)
    for sentence in found.adversaries.values():
        print(f"  – {sentence}")
    print(f"in full: {out / 'ledger.json'}, {found.folder / 'audit.json'}")


if __name__ == "__main__":
    sys.exit(main())
