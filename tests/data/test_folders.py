from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedveil.config import RunConfig
from fedveil.data import arrays, load, pictures
from fedveil.data.dataset import Options
from fedveil.data.lazy import LazyTensor
from fedveil.errors import ConfigError, DataError, MissingExtraError
from fedveil.runs.job import job_from_config
from fedveil.runs.loop import fresh_state, train_job

Image = pytest.importorskip("PIL.Image")


def write(path: Path, *, size: tuple[int, int] = (6, 4), colour: tuple[int, ...] | int = (255, 0, 0)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


@pytest.mark.parametrize("second", ["test", "val"])
def test_reads_both_parts(tmp_path: Path, second: str) -> None:
    for part in ("train", second):
        for number, name in enumerate(("cat", "dog")):
            for i in range(3):
                write(tmp_path / part / name / f"{i}.png", colour=(255 * number, 0, 0))
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not a picture")
    split = load(tmp_path, normalise=False)
    assert (len(split.train), len(split.test)) == (6, 6)
    assert split.train.labels == ("cat", "dog")
    assert split.train.input_shape == (3, 4, 6)
    assert torch.equal(split.train.x[:, 0, 0, 0], split.train.y.float())


@pytest.mark.parametrize("inside", ["", "train"])
def test_one_part_is_split(tmp_path: Path, inside: str) -> None:
    for name in ("cat", "dog"):
        for i in range(5):
            write(tmp_path / inside / name / f"{i}.jpg")
    split = load(tmp_path)
    assert (len(split.train), len(split.test), split.train.outputs) == (8, 2, 2)


def test_a_table_beside_the_pictures_says_whose_they_are(tmp_path: Path) -> None:
    lines = ["file_name,patient,hospital"]
    for name in ("cat", "dog"):
        for i in range(30):
            write(tmp_path / name / f"{i}.png", colour=i // 3)
            lines.append(f"{name}/{i}.png,p{i // 3},{'NS'[i // 3 % 2]}")
    (tmp_path / "metadata.csv").write_text("\n".join(lines) + "\n")
    split = load(tmp_path, group="patient", site="hospital", normalise=False)
    shades = [{round(float(shade) * 255) for shade in part.x[:, 0, 0, 0]} for part in (split.train, split.test)]
    assert not shades[0] & shades[1]
    assert split.train.sites is not None
    assert split.train.groups is not None
    assert split.train.site_names == ("N", "S")
    names = [split.train.group_names[group] for group in split.train.groups]
    assert names == [f"p{round(float(shade) * 255)}" for shade in split.train.x[:, 0, 0, 0]]
    with pytest.raises(ConfigError, match="Did you mean 'patient'"):
        load(tmp_path, group="patients")
    (tmp_path / "metadata.csv").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(DataError, match=r"dog/29\.png: .*does not say whose"):
        load(tmp_path, group="patient")
    (tmp_path / "metadata.csv").unlink()
    with pytest.raises(DataError, match=r"Put a table metadata\.csv there"):
        load(tmp_path, group="patient")


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["cat/0.png,1", "dog/0.png,2", "cat/0.png,2"], r"row 3 .*'cat/0.png' stands in column 'file_name' a second"),
        (["0.png,1"], r"'0.png' may be .*cat/0.png or .*dog/0.png"),
    ],
)
def test_a_picture_has_one_owner(tmp_path: Path, lines: list[str], complaint: str) -> None:
    for name in ("cat", "dog"):
        write(tmp_path / name / "0.png")
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,patient", *lines]))
    with pytest.raises(DataError, match=complaint):
        load(tmp_path, group="patient")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("train", "ship"):
        for i in range(3):
            write(tmp_path / name / f"{i}.png")
    assert load(tmp_path).train.labels == ("ship", "train")


def test_grey_pictures_have_one_channel_unless_mixed_with_colour(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path / "a" / f"{i}.png", colour=100)
        write(tmp_path / "b" / f"{i}.png", colour=200)
    assert load(tmp_path).train.input_shape == (1, 4, 6)
    write(tmp_path / "b" / "3.png")
    assert load(tmp_path).train.input_shape == (3, 4, 6)


def test_a_picture_of_another_size_is_named_with_the_remedy(tmp_path: Path) -> None:
    write(tmp_path / "a" / "0.png")
    write(tmp_path / "a" / "1.png")
    write(tmp_path / "b" / "0.png", size=(7, 4))
    with pytest.raises(DataError, match=r"b/0\.png: 7×4 pixels, but .*a/0\.png has 6×4.*resize"):
        load(tmp_path)


def test_parts_of_different_sizes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "train" / "a" / "0.png")
    write(tmp_path / "test" / "a" / "0.png", size=(7, 4))
    with pytest.raises(DataError, match="same shape"):
        load(tmp_path)


def test_parts_with_different_classes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "train" / "a" / "0.png")
    write(tmp_path / "train" / "b" / "0.png")
    write(tmp_path / "test" / "a" / "0.png")
    with pytest.raises(DataError, match="b on one side only"):
        load(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"not a picture"])
def test_a_damaged_picture_is_named(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path / "a" / "0.png")
    (tmp_path / "a" / "1.png").write_bytes(damage)
    with pytest.raises(DataError, match=r"a/1\.png: not a readable picture"):
        load(tmp_path)


def test_a_cut_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8)
    path = tmp_path / "a" / "0.png"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"a/0\.png"):
        load(tmp_path)


def test_without_pillow_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a" / "0.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"fedveil\[images\]"):
        load(tmp_path)


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """Twelve grey pictures, and one in colour that comes late."""
    random = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "noise" / ("cat" if number < 6 else "dog") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (9, 8, 3) if number == 7 else (9, 8)
        Image.fromarray(random.integers(0, 256, shape).astype(np.uint8)).save(path)
    return tmp_path / "noise"


def test_pictures_that_stay_bytes_give_the_same_numbers_bit_for_bit(
    noise: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = load(noise)
    monkeypatch.setattr(arrays, "MOST_NUMBERS", 12 * 3 * 9 * 8 - 1)
    lazy = load(noise)
    for ours, theirs in ((lazy.train, kept.train), (lazy.test, kept.test)):
        assert (type(ours.x), type(theirs.x)) == (LazyTensor, torch.Tensor)
        assert torch.equal(ours.x[:], theirs.x)
        assert torch.equal(ours.to(dtype=torch.float64).x[1:3], theirs.x.double()[1:3])
    raw = load(noise, normalise=False).train.x
    deviation, mean = torch.std_mean(raw[:], dim=[0, 2, 3], correction=0, keepdim=True)
    assert torch.equal(kept.train.x, raw[:].sub(mean).div(deviation))


def test_a_run_on_pictures_that_stay_bytes_ends_in_the_same_model(noise: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> tuple[torch.Tensor, float]:
        options = {"depth": 2, "width": 4}
        settings = {"clients": 2, "rounds": 2, "batch_size": 3, "seed": 1, "lr": 0.01}
        job = job_from_config(
            RunConfig(scheme="lossless", dataset=str(noise), model="mlp", model_options=options, **settings)
        )
        outcome = train_job(job, state=fresh_state(job))
        assert outcome.scores is not None
        return outcome.state.weights.parameters, outcome.scores.loss

    kept, loss = model()
    monkeypatch.setattr(arrays, "MOST_NUMBERS", 0)
    lazy, lazy_loss = model()
    assert torch.equal(lazy, kept)
    assert lazy_loss == loss


def test_pictures_beyond_memory_lie_in_a_file_that_nobody_sees(noise: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pictures.read_pictures(noise, Options()).train.x
    monkeypatch.setattr(pictures, "_MOST_IN_MEMORY", 1000)
    mapped = pictures.read_pictures(noise, Options()).train.x
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(mapped, expected)
    monkeypatch.setattr(pictures.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 10))
    with pytest.raises(DataError, match=r"pictures take 0 MiB in .*, where they cannot be kept .* TMPDIR"):
        pictures.read_pictures(noise, Options())
