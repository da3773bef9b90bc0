"""Numbers as the papers print them, to compare with."""

from __future__ import annotations

import math

COLLUDING = (0.1, 0.2, 0.3, 0.4, 0.5)

TABLE3: dict[tuple[float, float], tuple[float, ...]] = {
    (1.0, 25): (1.0565, 1.1239, 1.2060, 1.3093, 1.4446),
    (1.0, 50): (1.0553, 1.1209, 1.2005, 1.2999, 1.4289),
    (1.0, 100): (1.0547, 1.1194, 1.1978, 1.2954, 1.4214),
    (1.0, math.inf): (1.0541, 1.1180, 1.1952, 1.2910, 1.4142),
    (1.5, 25): (1.3029, 1.3860, 1.4873, 1.6147, 1.7815),
    (1.5, 50): (1.2968, 1.3775, 1.4753, 1.5974, 1.7559),
    (1.5, 100): (1.2939, 1.3733, 1.4695, 1.5892, 1.7438),
    (1.5, math.inf): (1.2910, 1.3693, 1.4639, 1.5811, 1.7321),
    (2.0, 25): (1.5097, 1.6059, 1.7233, 1.8708, 2.0642),
    (2.0, 50): (1.5000, 1.5933, 1.7064, 1.8476, 2.0310),
    (2.0, 100): (1.4953, 1.5871, 1.6983, 1.8365, 2.0152),
    (2.0, math.inf): (1.4907, 1.5811, 1.6903, 1.8257, 2.0000),
}
"""NADP-FL, Table 3: λ by ((|D_max|/|D_min|)², number of clients), one number per share of colluders."""

TABLE1_EPSILONS = (3.0, 2.0, 1.0, 0.5)

TABLE1: dict[tuple[str, int], tuple[float, tuple[tuple[float, float], ...]]] = {
    ("mnist", 10): (92.94, ((81.76, 82.20), (80.27, 82.05), (77.23, 81.65), (67.44, 78.41))),
    ("mnist", 50): (93.30, ((83.94, 85.55), (81.52, 85.58), (65.47, 85.19), (29.97, 80.39))),
    ("mnist", 100): (92.91, ((85.09, 87.37), (76.69, 87.33), (46.97, 86.84), (10.44, 80.58))),
    ("imdb", 10): (89.71, ((85.32, 87.24), (82.93, 85.29), (79.46, 83.79), (59.32, 78.22))),
    ("imdb", 50): (88.56, ((84.97, 86.68), (79.86, 84.80), (68.37, 84.61), (50.68, 80.29))),
    ("imdb", 100): (90.87, ((84.25, 87.09), (78.19, 84.14), (61.89, 83.98), (49.19, 79.63))),
    ("fashion-mnist", 10): (80.46, ((80.02, 80.84), (79.08, 80.48), (76.34, 79.29), (70.76, 76.88))),
    ("fashion-mnist", 50): (82.44, ((78.90, 81.61), (77.12, 81.36), (71.16, 80.17), (60.21, 77.19))),
    ("fashion-mnist", 100): (83.23, ((77.97, 82.33), (74.88, 82.02), (67.41, 81.08), (52.81, 77.71))),
}
"""NADP-FL, Table 1: accuracy in percent by (data, N): without DP, then (LDP, NADP) for each ε."""

MPDP_CIFAR10 = {"fedavg": 84.60, "mp-cdp": 84.21, "mpdp": 83.15}
"""MP-DP, Table 2: accuracy in percent at ε = 3 (per round), CIFAR-10, ResNet-20."""


def table1(data: str, clients: int, *, scheme: str, epsilon: float | None = None) -> float | None:
    """NADP-FL's Table 1: the accuracy of "fedavg" (no DP), "ldp" or "nadp"; None where the table has no such cell."""
    row = TABLE1.get((data, clients))
    if row is None:
        return None
    if scheme == "fedavg":
        return row[0]
    if epsilon not in TABLE1_EPSILONS or scheme not in ("ldp", "nadp"):
        return None
    return row[1][TABLE1_EPSILONS.index(epsilon)][scheme == "nadp"]


PARAAEGIS_PARTITIONS = ("iid", "dirichlet-1", "dirichlet-0.5")

_Three = tuple[float, float, float]

PARAAEGIS_TABLE1: dict[str, tuple[_Three, _Three, _Three]] = {
    "fedavg": ((80.93, 79.38, 77.98), (3571, 3665, 3699), (2.27, 2.17, 2.11)),
    "dp-fedavg": ((20.28, 17.12, 12.87), (3007, 3084, 3112), (0.67, 0.56, 0.41)),
    "ckks-fedavg": ((81.14, 79.28, 77.63), (18527, 14971, 14568), (0.44, 0.53, 0.53)),
    "serial": ((10.54, 11.29, 12.35), (19956, 16718, 16370), (0.05, 0.07, 0.08)),
    "varying-dp": ((24.21, 21.76, 19.85), (2494, 2534, 2789), (0.97, 0.86, 0.71)),
    "stevens": ((18.78, 17.07, 13.75), (3635, 3708, 3543), (0.52, 0.46, 0.39)),
    "r1": ((67.85, 63.48, 57.16), (6149, 6006, 5577), (1.1, 1.06, 1.02)),
    "r5": ((73.03, 70.07, 66.19), (6888, 6962, 6099), (1.06, 1.01, 1.09)),
    "r10": ((75.63, 73.63, 71.1), (7776, 7706, 6379), (0.97, 0.96, 1.11)),
    "r20": ((77.53, 75.37, 73.39), (9530, 9565, 7153), (0.81, 0.79, 1.03)),
    "r5-x0.99": ((72.09, 68.91, 64.4), (5561, 5536, 5299), (1.3, 1.24, 1.22)),
    "r10-x0.99": ((74.5, 71.75, 68.5), (6238, 6210, 5679), (1.19, 1.16, 1.21)),
    "r10-x0.95": ((68.82, 65.13, 58.97), (5619, 5628, 5400), (1.22, 1.16, 1.09)),
    "r10-x0.9": ((70.87, 67.01, 60.33), (8762, 8732, 7073), (0.81, 0.77, 0.85)),
}
"""ParaAegis, Table 1: accuracy in percent, seconds, and 100 × accuracy / seconds, each by partition.

rP encrypts P percent of the parameters, rP-xL a share that starts there and shrinks by the factor L per round.
"""

PARAAEGIS_TABLE2 = {"max": 63.64, "min": 12.40, "random": 15.78}
"""ParaAegis, Table 2: accuracy in percent by which parameters are encrypted (r = 10 %, T = 20)."""


def paraaegis_table1(row: str, partition: str, *, what: str = "accuracy") -> float | None:
    """ParaAegis's Table 1: "accuracy", "seconds" or "efficiency"; None where the table has no such cell."""
    if row not in PARAAEGIS_TABLE1 or partition not in PARAAEGIS_PARTITIONS:
        return None
    figures = PARAAEGIS_TABLE1[row][("accuracy", "seconds", "efficiency").index(what)]
    return float(figures[PARAAEGIS_PARTITIONS.index(partition)])
