"""`fedveil compare`: tables, exit codes, Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedveil.cli import judged
from fedveil.config import RunConfig
from shell import Done, fedveil

SMALL = (
    "--rounds",
    3,
    "--clients",
    3,
    "--batch-size",
    16,
    "--no-vectorise",
    "-o",
    "depth=2",
    "-o",
    "width=8",
    "--jobs",
    1,
)


TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    out = tmp_path_factory.mktemp("cli") / "c"
    schemes = ("--schemes", "lossless,nadp,paraaegis", "--cipher", "pads", "--loss", "cross-entropy")
    own = ("--set", "nadp.lr=3", "--set", "lossless.loss=square", "--set", "paraaegis.loss=square")
    # paraaegis is told to hide more than everything, and fails.
    tracked = ("--tensorboard", out.parent / "events") if TENSORBOARD else ()
    flags = (*schemes, *own, "--set", "paraaegis.share=2", "--repeats", 1, *tracked, "--out", out)
    return out, fedveil("compare", *SMALL, *flags)


def test_the_closing_tables_show_every_scheme(compared: tuple[Path, Done]) -> None:
    out, done = compared
    for scheme in ("lossless", "nadp"):
        summary = json.loads((out / scheme / "seed-1" / "summary.json").read_text())
        assert f"{100 * summary['test_accuracy']:.1f} %" in done.output
        assert summary["rounds"] == 3
    assert "│ always " in done.output
    assert "0, 1 failed" in done.output
    assert "Against whom what is proven" in done.output
    assert "(ε = " in done.output
    results = json.loads((out / "compare.json").read_text())
    other = results["schemes"]["nadp"]["privacy"]["server"]["add_remove_epsilon"]
    assert f"add/remove: ε = {other:.4g}" in done.output
    assert other < results["schemes"]["nadp"]["privacy"]["server"]["epsilon"] / 2
    assert "schemes train on different losses" in done.output
    assert "nadp has lr = 3 of its own" in done.output
    assert str(out / "compare.json") in done.output.replace("\n", "")


def test_no_interval_is_cut_in_two_on_a_narrow_terminal(
    compared: tuple[Path, Done], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from fedveil.cli import compare, tables

    results = json.loads((compared[0] / "compare.json").read_text())
    for figures in results["schemes"].values():  # as comparisons had it before
        for line in figures.get("privacy", {}).values():
            del line["add_remove_epsilon"]
    monkeypatch.setattr(tables, "console", Console(width=80))
    compare.show_comparison(SimpleNamespace(results=results), ["accuracy", "auroc"])  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    for figures in results["schemes"].values():
        for metric in ("accuracy", "auroc"):
            if "judged" in figures:
                assert judged.measured(figures, metric) in shown
    assert "What it cost" in shown


def test_a_failure_is_said_and_gives_the_exit_code(compared: tuple[Path, Done]) -> None:
    out, done = compared
    assert done.code == 2
    assert done.error.splitlines()[-1].startswith("error: paraaegis, seed 1: share")
    assert "lossless, nadp: left out cipher, which they do not have" in done.error
    runs = json.loads((out / "compare.json").read_text())["runs"]
    assert [one["ok"] for one in runs] == [True, True, False]


def test_without_a_terminal_every_run_has_a_line_for_its_beginning_and_its_end(compared: tuple[Path, Done]) -> None:
    _, done = compared
    lines = done.error.splitlines()
    assert [one for one in lines if one.endswith("started")] == [
        f"{scheme}, seed 1: started" for scheme in ("lossless", "nadp", "paraaegis")
    ]
    assert any(one.startswith("nadp, seed 1: ") and "after 3 rounds in" in one for one in lines)
    assert "[3/3]" in lines[-2]


def test_resuming_needs_no_other_flag_and_trains_nothing_twice(compared: tuple[Path, Done]) -> None:
    out, _ = compared
    done = fedveil("compare", "--resume", "--out", out, "--jobs", 1, "--quiet")
    assert done.code == 2
    assert done.output == ""
    assert "share" in done.error
    assert fedveil("compare", "--resume", "--out", out, "--lr", 0.7).code == 2


@pytest.mark.skipif(not TENSORBOARD, reason="needs the extra tensorboard")
def test_every_run_is_tracked_in_a_folder_of_its_own(compared: tuple[Path, Done]) -> None:
    from fedveil.tracking import rounds_in

    out, _ = compared
    for scheme in ("lossless", "nadp"):
        assert rounds_in(out.parent / "events" / scheme / "seed-1") == {1, 2, 3}


def test_every_setting_of_a_run_but_the_scheme_has_a_flag() -> None:
    output = fedveil("compare", "--help").output
    others = {"model_options", "options", "scheme"}  # -o, --set, --schemes
    flags = {name.replace("_", "-") for name in RunConfig.__dataclass_fields__ if name not in others}
    assert [flag for flag in sorted(flags) if f"--{flag}" not in output] == []
    for flag in ("--schemes", "--seeds", "--repeats", "--set", "--jobs", "--resume", "--tensorboard", "--mlflow"):
        assert flag in output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--seeds", "1,2", "--repeats", 2), "not both"),
        (("--seeds", "a"), "seeds is a list of whole numbers"),
        (("--repeats", 0), "repeats must be at least 1"),
        (("--schemes", "nadpp"), "Did you mean 'nadp'"),
        (("--schemes", "nadp", "--set", "lr=3"), "scheme.option=value"),
        (("--rounds", 0), "rounds must be positive"),
    ],
    ids=["seeds twice", "no numbers", "no repeats", "scheme", "set", "setting"],
)
def test_wrong_flags_are_refused_in_one_line(tmp_path: Path, given: tuple[Any, ...], said: str) -> None:
    done = fedveil("compare", *given, "--out", tmp_path / "c")
    assert done.code == 2
    assert said in done.error
    assert len(done.error.splitlines()) == 1
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        (("--seed", 7), [7]),
        (("--repeats", 2), [1, 2]),
        (("--seed", 7, "--repeats", 3), [7, 8, 9]),
        (("--seeds", "4-5"), [4, 5]),
    ],
    ids=["one", "repeats", "from one on", "list"],
)
def test_seeds_as_they_are_typed(tmp_path: Path, given: tuple[Any, ...], seeds: list[int]) -> None:
    from fedveil.cli.compare import _seeds

    named = {str(key).removeprefix("--"): value for key, value in zip(given[::2], given[1::2], strict=True)}
    assert _seeds(named.get("seeds"), named.get("seed"), named.get("repeats")) == seeds


def test_a_file_of_settings_holds_for_all(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('scheme = "nadp"\nrounds = 2\n')
    done = fedveil("compare", "-c", file, "--out", tmp_path / "c")
    assert done.code == 2
    assert "leave scheme out of the file" in done.error


OWN = """
from fedveil.downlink import Rescaling
from fedveil.protocol.parts import Scheme
from fedveil.uplink.plain import Bare
from fedveil.work import Gradients

def veil(setting, *, keep: float = 2.0):
    work = Gradients(setting.loss, setting.batches, setting.vectorise)
    return Scheme(name="veil", downlink=Rescaling(keep), work=work, uplink=Bare())
"""


def test_a_scheme_of_ones_own_is_compared_under_the_name_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    named = ("--schemes", "mine.py:veil,fedavg")
    done = fedveil("compare", *SMALL, *named, "--set", "mine.py:veil.keep=1.5", "--epsilon", 3, "--out", "c")
    assert done.code == 0, done
    assert "mine.py:veil" in done.output
    assert "mine.py:veil has keep = 1.5 of its own" in done.output
    assert "mine.py:veil, fedavg: left out epsilon, which they do not have" in done.error
    assert "keep = 1.5" in (tmp_path / "c" / "mine.py-veil" / "seed-1" / "config.toml").read_text()
    (tmp_path / "c" / "mine.py-veil" / "seed-1" / "summary.json").unlink()
    again = ("compare", "--resume", "--out", "c", "--jobs", 1)
    done = fedveil(*again)
    assert done.code == 2
    assert "nothing was run" in done.error
    assert "--schemes mine.py:veil" in done.error
    done = fedveil(*again, "--schemes", "mine.py:veil")
    assert done.code == 0, done
    assert "1 of 2 runs are there already" in done.error


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("mine.py:viel",), "has no 'viel'"),
        (("yours.py:veil",), "there is no such file"),
        (("mine.py:veil,./mine.py:veil",), "The scheme mine.py:veil is named twice"),
        (("mine.py:veil", "--set", "mine.py:veil.kep=1"), "Did you mean 'keep'"),
        (("mine.py:veil", "--set", "mine.py:veil.epsilon=1"), "Scheme 'mine.py:veil' has no option 'epsilon'"),
        (("mine.py:veil", "--set", "yours.py:veil.keep=1"), "Only schemes of the comparison"),
    ],
    ids=["function", "file", "twice", "option", "another's option", "another scheme"],
)
def test_what_does_not_fit_a_scheme_of_ones_own_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], said: str
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    done = fedveil("compare", "--schemes", *given, "--out", "c")
    assert done.code == 2
    assert said in done.error
    assert len(done.error.splitlines()) == 1
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_ctrl_c_stops_every_process_and_leaves_all_of_it_resumable(tmp_path: Path) -> None:
    out = tmp_path / "c"
    words = ["compare", "--schemes", "fedavg,lossless", "--rounds", "5000", "--clients", "3", "--evaluate-every", "0"]
    words += [
        "--no-vectorise",
        "-o",
        "depth=2",
        "-o",
        "width=8",
        "--jobs",
        "2",
        "--checkpoint-every",
        "20",
        "--out",
        str(out),
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "fedveil", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        checkpoints = [out / scheme / "seed-1" / "checkpoints" for scheme in ("fedavg", "lossless")]
        deadline = time.monotonic() + 600
        while not all(any(one.glob("round-*")) for one in checkpoints):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        workers = [int(one) for one in _children(process.pid)]
        assert len(workers) == 2
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "stopped" in error
    assert "Traceback" not in error + (out / "workers.log").read_text()
    for one in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(one, 0)
    runs = json.loads((out / "compare.json").read_text())["runs"]
    assert [(one["ok"], one["reason"]) for one in runs] == [(False, "has not ended")] * 2


def _children(parent: int) -> list[str]:
    file = Path(f"/proc/{parent}/task/{parent}/children")
    if not file.exists():
        pytest.skip("needs /proc")
    return file.read_text().split()
