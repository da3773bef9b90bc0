"""Every scheme in one picture: what it makes of a comparison's figures, and labels that do not cover one another."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from fedveil.cli.compare import glance, glance_notes
from fedveil.errors import ConfigError
from fedveil.report.figures import Box, draw_overview, overview, placed
from fedveil.report.sources import Spot, spots_of, what_was_compared

RECORD, CLIENT = "one record of one client", "all data of a client"


def line(verdict: str, epsilon: float | None = None, unit: str = "") -> dict[str, Any]:
    return {"verdict": verdict, "epsilon": epsilon, "unit": unit}


def figures(accuracy: float, server: dict[str, Any], *, data: str | None = "nothing", **more: Any) -> dict[str, Any]:
    attacked: dict[str, Any] = {"the model's parameters": {"verdict": "in part", "exact": more.pop("exact", 1.0)}}
    if data is not None:
        attacked["data"] = {"verdict": data}
    return {
        "n": 1,
        "test_accuracy": {"mean": accuracy},
        "judged": {"accuracy": {"low": accuracy - 0.02, "high": accuracy + 0.02}},
        "bytes_up": {"mean": more.pop("up", 1000.0)},
        "bytes_down": {"mean": 500.0},
        "cost": more.pop("cost", {"seconds": 3.0}),
        "attacked": attacked,
        "privacy": {"server": server, "clients": more.pop("clients", line("none"))},
        **more,
    }


RESULTS: dict[str, Any] = {
    "common": {"dataset": "data/fashion", "model": "mlp", "clients": 10, "rounds": 5, "epsilon": 8.0},
    "runs": [{"ok": True, "summary": {"parameters": 1234}}],
    "schemes": {
        "fedavg": figures(0.8, line("none"), data="as if unprotected"),
        "lossless": figures(0.8, line("none"), data="as if unprotected", exact=0.0, up=9000.0),
        "cdp": figures(0.78, line("none"), clients=line("differential privacy", 8.0, RECORD), data="not effective"),
        "nadp": figures(0.77, line("differential privacy", 7.5, RECORD)),
        "dp-fedavg": figures(0.1, line("differential privacy", 8.0, CLIENT)),
        "secagg": figures(0.8, line("aggregate only"), data="in part"),
        "ckks-fedavg": figures(0.8, line("ciphertexts only"), data=None),
        "paraaegis": figures(0.79, line("conditional", 8.0, CLIENT), data=None),
        "pile": figures(
            0.8,
            line("aggregate only"),
            data="in part",
            cost={"seconds": 900.0, "bytes_up": 8e4, "bytes_down": 1e4, "slice": {}},
        ),
        "failed": {"n": 0, "failed": 1, "cannot": "why"},
        "not attacked": {"n": 1, "test_accuracy": {"mean": 0.5}, "privacy": {}},
    },
}


def test_a_spot_says_what_is_proven_got_and_hidden() -> None:
    spots = {spot.label: spot for spot in spots_of(RESULTS)}
    assert set(spots) == {*RESULTS["schemes"], "= pile"} - {"pile", "failed", "not attacked"}
    assert {name: spot.proven for name, spot in spots.items()} == {
        **dict.fromkeys(("fedavg", "lossless"), "none"),
        **dict.fromkeys(("secagg", "ckks-fedavg", "= pile"), "sums"),
        "cdp": "clients",
        "nadp": "record",
        "dp-fedavg": "client",
        "paraaegis": "conditional",
    }
    assert {name: spot.given for name, spot in spots.items()} == {
        **dict.fromkeys(("fedavg", "lossless"), "all"),
        **dict.fromkeys(("secagg", "= pile"), "part"),
        **dict.fromkeys(("ckks-fedavg", "paraaegis"), "unread"),
        "cdp": "open",
        "nadp": "nothing",
        "dp-fedavg": "nothing",
    }
    assert [name for name, spot in spots.items() if spot.hidden] == ["lossless"]
    assert spots["fedavg"].costs == {"bytes": 1500.0, "seconds": 3.0}
    assert spots["= pile"].costs == {"bytes": 9e4, "seconds": 900.0}, "of the cipher, not of what was trained"
    assert spots["nadp"] == Spot(
        "nadp", 0.77, 0.75, 0.79, {"bytes": 1500.0, "seconds": 3.0}, "record", "nothing", False
    )


def overlap(one: Box, other: Box) -> bool:
    return min(one[2], other[2]) > max(one[0], other[0]) and min(one[3], other[3]) > max(one[1], other[1])


@pytest.mark.parametrize("seed", range(5))
def test_labels_cover_neither_one_another_nor_points_and_stay_inside(seed: int) -> None:
    """Twenty-four points, half of them in a narrow band, as schemes are that lose no accuracy."""
    draw = random.Random(seed)
    points = [(draw.uniform(60, 900), draw.uniform(380, 400) if k % 2 else draw.uniform(60, 440)) for k in range(24)]
    sizes = [(draw.uniform(30, 80), 15.0) for _ in points]
    boxes = placed(points, sizes, (0, 0, 980, 520), dot=8.0)
    assert [(box[2] - box[0], box[3] - box[1]) for box in boxes] == [pytest.approx(size) for size in sizes]
    assert not [pair for pair in itertools.combinations(boxes, 2) if overlap(*pair)]
    assert all(box[0] >= 0 and box[1] >= 0 and box[2] <= 980 and box[3] <= 520 for box in boxes)
    covered = sum(overlap(box, (x - 4, y - 4, x + 4, y + 4)) for box in boxes for x, y in points)
    assert covered <= 2


def test_the_picture_names_every_scheme_in_both_panels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = draw_overview(RESULTS, tmp_path / "overview.png")
    assert file.read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "overview.svg").read_text()
    assert all(drawn.count(f'id="{spot.label}"') == 2 for spot in spots_of(RESULTS)), "one in each panel"
    assert what_was_compared(RESULTS) == "fashion, mlp, 1,234 parameters, 10 clients, 5 rounds"


def test_a_scheme_whose_training_came_off_is_marked_and_nothing_is_measured_by_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cheap = figures(0.05, line("none"), up=1.0, cost={"seconds": 0.1}, came_off=True)
    results = {**RESULTS, "schemes": {"ppdl": cheap, **RESULTS["schemes"]}}
    assert spots_of(results)[0].label == "ppdl †"
    draw_overview(results, tmp_path / "overview.png")
    draw_overview(RESULTS, tmp_path / "without.png")
    drawn, without = ((tmp_path / f"{name}.svg").read_text() for name in ("overview", "without"))
    assert "its training came off" in drawn
    assert "its training came off" not in without
    untried = {name: value for name, value in cheap.items() if name != "attacked"}
    assert glance("ppdl", untried)[1] == "5.0% †"
    assert [note for note in glance_notes({"ppdl": cheap}) if note.startswith("† the training of ppdl came off")]


def test_the_page_has_a_figure_for_each_cost_and_hides_labels_with_their_schemes() -> None:
    made = overview(RESULTS, {"fedavg": 0, "pile": 3})
    assert [figure.name for figure in made] == ["overview-bytes", "overview-seconds"]
    drawn = pytest.importorskip("plotly.graph_objects")
    for figure in made:
        drawn.Figure(json.loads(json.dumps(figure.drawing)))  # which refuses what plotly does not know
        traces, notes = figure.drawing["data"], figure.drawing["layout"]["annotations"]
        assert [trace["name"] for trace in traces] == [note["text"] for note in notes]
        assert {note["text"]: note["name"] for note in notes if note["name"]} == {"fedavg": "0", "= pile": "3"}
    assert overview({"schemes": {}}, {}) == []


def test_a_comparison_without_attacks_has_no_picture_and_says_so(tmp_path: Path) -> None:
    bare = {name: {key: one[key] for key in one if key != "attacked"} for name, one in RESULTS["schemes"].items()}
    with pytest.raises(ConfigError, match="attacked"):
        draw_overview({**RESULTS, "schemes": bare}, tmp_path / "overview.png")
    assert not list(tmp_path.iterdir())
