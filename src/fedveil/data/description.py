"""What was understood of data, for whoever has to say whether that is right: before anything is trained on them.

Everything is counted in one pass over samples that are in memory anyway; equal samples are found by their digests.
Nothing here decides about training: what looks wrong is said, with its place, and left to the owner of the data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedveil.data.dataset import Dataset, Split
from fedveil.data.lazy import spans

Kind = Literal["numbers", "words", "text", "nothing"]
Shared = dict[str, dict[str, int]]

_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""How a cell without a value is written, in lower case."""

_ALMOST_ALL, _HALF, _MANY = 0.9, 0.5, 20
_FEWEST_IDS = 20
_ID_NAME = re.compile(r"(?:^|[^a-z])(?:id|ids|uuid|guid)$", flags=re.IGNORECASE)
_CODE = re.compile(r"(?!\d{4}-\d\d-\d\d$)(?=.*\d\d)[A-Za-z]{0,6}[-_./ ]?[0-9A-Fa-f-]{2,36}")
_KEPT = ", and every one of them stands in the model file"
_CAMEL_ID = re.compile(r"[a-z]I[Dd]$")
_EXAMPLES, _LONGEST = 3, 40
_MOST_BYTES, _MOST_ROWS = 1 << 32, 5_000_000  # beyond, equal samples are not looked for
_MOST_CLIENTS = 1000
_FEWEST_PIXELS, _HALF_BYTE, _BYTE = 64, 127.0, 255.0
_SHOWN = 12
_CHUNK = 4096


def _nearly_numbers(numbers: int, present: int, distinct: int) -> bool:
    """Whether a column of words was probably meant to hold numbers."""
    share = numbers / max(present, 1)
    return share >= _ALMOST_ALL or (share >= _HALF and distinct > _MANY)


@dataclass(frozen=True)
class Column:
    """One column of a table as it was read.

    `role` is input, target, text, group, site or not used. In a column of words, `numbers` of the values would be
    numbers, `commas` ones with a decimal comma, and `strange` are the first of the others, each with its place;
    `categories` are its most frequent values with their counts, except of groups. `span` is the least and the largest
    of a column of numbers.
    """

    name: str
    role: str
    kind: Kind
    missing: int
    distinct: int
    numbers: int = 0
    commas: int = 0
    strange: tuple[str, ...] = ()
    categories: dict[str, int] = field(default_factory=dict)
    span: tuple[float, float] | None = None

    @staticmethod
    def of(name: str, values: Sequence[str], *, role: str, place: Callable[[int], str]) -> Column:
        """Count what a column holds; `place` says where a row stands."""
        if role == "text":
            return Column(name, role, "text", sum(map(is_missing, values)), len({*values}))
        missing = numbers = commas = 0
        strange: list[int] = []
        distinct: Counter[str] = Counter()
        for row, raw in enumerate(values):
            text = raw.strip()
            if is_missing(text):
                missing += 1
                continue
            distinct[text] += 1
            if is_number(text):
                numbers += 1
            elif text.count(",") == 1 and is_number(text.replace(",", ".")):
                commas += 1
            elif len(strange) < _EXAMPLES:
                strange.append(row)
        present = len(values) - missing
        kind: Kind = "nothing" if not present else "numbers" if numbers == present else "words"
        if kind == "numbers":
            known = {float(text) for text in distinct}
            return Column(name, role, kind, missing, len(known), numbers, span=(min(known), max(known)))
        # Examples of words in a column of words would only spread what is somebody's.
        told = strange if role == "input" and _nearly_numbers(numbers, present, len(distinct)) else []
        examples = tuple(f"{values[row].strip()[:_LONGEST]!r} ({place(row)})" for row in told)
        frequent = [] if role == "group" else distinct.most_common(_SHOWN)
        categories = {text[:_LONGEST]: count for text, count in frequent}
        return Column(name, role, kind, missing, len(distinct), numbers, commas, examples, categories)

    def warnings(self, rows: int) -> Iterator[str]:
        """What somebody should look at, of a column of so many rows."""
        if self.role != "input":
            return
        present = rows - self.missing
        if self.kind == "words" and _nearly_numbers(self.numbers, present, self.distinct):
            odd = present - self.numbers
            more = "" if odd <= len(self.strange) else ", …"
            yield (
                f"column {self.name!r} is taken for words and not for numbers: {self.numbers:,} of its {present:,} "
                f"values are numbers, {odd:,} {'is' if odd == 1 else 'are'} not: {'; '.join(self.strange)}{more}. It "
                f"becomes up to {self.distinct:,} inputs instead of one. Correct what is no number, or leave it empty "
                "if it is not known."
            )
        elif self.kind == "words" and self.commas >= _HALF * present:
            yield (
                f"column {self.name!r} is taken for words and not for numbers: {self.commas:,} of its {present:,} "
                "values are written with a decimal comma. Write them with a point."
            )
        elif self._looks_like_ids(present):
            yield (
                f"column {self.name!r} looks like ids ({self.distinct:,} different values in {present:,} rows) and is "
                f"learned from as it is{_KEPT if self.kind == 'words' else ''}. Leave it out; if it says which rows "
                "belong together, name it as the group."
            )
        if self.distinct == 1 and not self.missing:
            yield f"column {self.name!r} is the same in every row: nothing can be learned from it."
        if self.missing > _HALF * rows:
            yield f"column {self.name!r} has no value in {self.missing:,} of {rows:,} rows."

    def _looks_like_ids(self, present: int) -> bool:
        if present < _FEWEST_IDS or self.distinct <= _MANY:
            return False
        named = bool(_ID_NAME.search(self.name) or _CAMEL_ID.search(self.name))
        coded = self.kind == "words" and all(_CODE.fullmatch(text) for text in self.categories)
        return named or (self.kind == "words" and self.distinct == present) or (coded and bool(self.categories))


def is_missing(text: str) -> bool:
    """Whether a cell says that its value is not known."""
    return text.strip().lower() in _MISSING


def is_number(text: str) -> bool:
    """Whether a cell is written as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Counts:
    """How many rows there are, of each class in the order of the labels, and of how many groups and sites."""

    rows: int
    classes: tuple[int, ...] = ()
    groups: int | None = None
    sites: dict[str, int] = field(default_factory=dict)
    target: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """What was understood of a data set, part by part and client by client.

    `duplicates` says for a part how many of its samples have an equal input in another part, or once more in the same;
    None where there were too many samples to look. `shared_groups` says the same of groups. `digest` is of all values,
    and empty where there were too many.
    """

    name: str
    task: str
    input_shape: tuple[int, ...]
    outputs: int
    labels: tuple[str, ...]
    parts: dict[str, Counts]
    clients: tuple[Counts, ...] = ()
    client_names: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    constant: int = 0
    duplicates: Shared | None = None
    shared_groups: Shared = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    digest: str = ""

    @property
    def rows(self) -> int:
        """Of all parts."""
        return sum(part.rows for part in self.parts.values())

    def as_data(self) -> dict[str, Any]:
        """The content of data.json."""
        data = {"rows": self.rows, **dataclasses.asdict(self)}
        if len(self.clients) > _MOST_CLIENTS:
            data["clients"], data["client_names"] = (
                data["clients"][:_MOST_CLIENTS],
                data["client_names"][:_MOST_CLIENTS],
            )
            data["clients_left_out"] = len(self.clients) - _MOST_CLIENTS
        return data

    def summary(self) -> dict[str, Any]:
        """What the run's summary says of it: counts, and no value of anybody's."""
        return {
            "rows": {name: part.rows for name, part in self.parts.items()},
            "classes": {name: list(part.classes) for name, part in self.parts.items()},
            "labels": list(self.labels),
            "groups": {name: part.groups for name, part in self.parts.items() if part.groups is not None},
            "client_rows": [client.rows for client in self.clients[:_MOST_CLIENTS]],
            "duplicates": self.duplicates,
            "shared_groups": self.shared_groups,
            "warnings": len(self.warnings),
        }

    def class_name(self, code: int) -> str:
        """What a class is called."""
        return self.labels[code] if self.labels else str(code)

    def lines(self) -> list[str]:
        """The whole in a few lines of text, without the warnings."""
        shape = "×".join(map(str, self.input_shape))
        of = ""
        if self.columns:
            roles = [column.role for column in self.columns]
            learned = roles.count("input") + roles.count("text")
            of = f", {len(self.columns)} columns, {learned} to learn from"
        said = [f"data: {self.name}, {self.task}, {self.rows:,} rows{of}; a sample is {shape} numbers"]
        said.append("parts: " + ", ".join(f"{name} {_counted(part)}" for name, part in self.parts.items()))
        words = [column for column in self.columns if column.kind == "words" and column.role == "input"]
        if words:
            said.append("words: " + _listed([f"{column.name} ({column.distinct:,})" for column in words]))
        gaps = [column for column in self.columns if column.missing]
        if gaps:
            said.append("missing: " + _listed([f"{column.name} {column.missing:,}" for column in gaps]))
        if self.task == "classification":
            counts = [sum(part.classes[code] for part in self.parts.values()) for code in range(self.outputs)]
            said.append(
                "classes: " + _listed([f"{self.class_name(code)} {count:,}" for code, count in enumerate(counts)])
            )
        if self.clients:
            sizes = [client.rows for client in self.clients]
            named = [f"{name} {size:,}" for name, size in zip(self.client_names, sizes, strict=False)]
            spread = _listed(named) if named else f"{min(sizes):,} to {max(sizes):,} rows each"
            said.append(f"clients: {len(sizes):,} ({spread})")
        return said


def _counted(part: Counts) -> str:
    return f"{part.rows:,} rows" + ("" if part.groups is None else f" of {part.groups:,} groups")


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else "")


def describe_split(split: Split, clients: Sequence[Tensor] = (), client_names: tuple[str, ...] = ()) -> Description:
    """What was understood of a data set; `clients` are the training rows of each."""
    train = split.train
    owned = tuple(_counts(train, rows) for rows in clients)
    parts = {name: [part] for name, part in split.parts.items()}
    return _described(parts, owned, client_names, split.columns)


def describe_parts(
    clients: Sequence[Dataset], *, test: Dataset | None = None, validation: Dataset | None = None
) -> Description:
    """The same of data that come as one set a client."""
    held = {"validation": validation, "test": test}
    parts = {"train": list(clients)} | {name: [part] for name, part in held.items() if part is not None}
    return _described(parts, tuple(_counts(client) for client in clients), (), ())


def _described(
    parts: Mapping[str, Sequence[Dataset]],
    clients: tuple[Counts, ...],
    names: tuple[str, ...],
    columns: tuple[Column, ...],
) -> Description:
    first, digests = parts["train"][0], _digests(parts)
    made = Description(
        name=first.name,
        task=first.task,
        input_shape=first.input_shape,
        outputs=first.outputs,
        labels=first.labels,
        parts={name: _summed([_counts(piece) for piece in pieces]) for name, pieces in parts.items()},
        clients=clients,
        client_names=names,
        columns=columns,
        constant=_constant(parts["train"]),
        duplicates=None if digests is None else _duplicates(digests),
        shared_groups=_shared_groups(parts),
        digest="" if digests is None else _digest(digests, parts),
    )
    told = [*_warnings(made), *_raw_pixels(parts["train"])]
    named = {"group": first.group_names, "site": first.site_names}
    alike = [text for role, names in named.items() for text in _alike(role, names)]
    return dataclasses.replace(made, warnings=(*told, *alike))


def _raw_pixels(pieces: Sequence[Dataset]) -> Iterator[str]:
    """A warning where inputs are pixels as they are stored: whole numbers up to 255, and many a sample."""
    first = pieces[0]
    if first.is_text or (len(first.input_shape) == 1 and first.input_shape[0] < _FEWEST_PIXELS):
        return
    looked_at = [piece.x[:_FEWEST_PIXELS] for piece in pieces]
    least, most = min(float(x.min()) for x in looked_at), max(float(x.max()) for x in looked_at)
    if least >= 0 and _HALF_BYTE < most <= _BYTE and all(torch.equal(x, x.round()) for x in looked_at):
        yield (
            f"the inputs are whole numbers up to {most:g}, as pixels are stored, and are trained on as they are. Store "
            "them as bytes (uint8), which are scaled and standardised, or divide them by 255."
        )


def _alike(role: str, names: Sequence[str]) -> Iterator[str]:
    """A warning where names of groups or sites differ in nothing but how they are written."""
    by_sight: dict[str, list[str]] = {}
    for name in names:
        by_sight.setdefault(unicodedata.normalize("NFKC", name).casefold(), []).append(name)
    pairs = [" and ".join(repr(name[:_LONGEST]) for name in written) for written in by_sight.values() if written[1:]]
    if pairs:
        yield (
            f"{role}s that differ only in upper and lower case, or in kinds of letters, count as different: "
            f"{_listed(pairs)}. If they are one {role}, write them alike: now one may be in two parts."
        )


def _counts(data: Dataset, rows: Tensor | None = None) -> Counts:
    y, groups, sites = (
        codes if codes is None or rows is None else codes[rows.to(codes.device)]
        for codes in (data.y, data.groups, data.sites)
    )
    assert y is not None
    classes: tuple[int, ...] = ()
    target: dict[str, float] = {}
    if data.task == "classification":
        classes = tuple(torch.bincount(y, minlength=data.outputs).tolist())
    elif data.outputs == 1:
        target = {"least": float(y.min()), "mean": float(y.double().mean()), "most": float(y.max())}
    by_site: dict[str, int] = {}
    if sites is not None:
        for site, count in zip(*(part.tolist() for part in torch.unique(sites, return_counts=True)), strict=True):
            by_site[data.site_names[site] if data.site_names else str(site)] = count
    return Counts(len(y), classes, None if groups is None else len(torch.unique(groups)), by_site, target)


def _summed(counts: Sequence[Counts]) -> Counts:
    """The counts of a part that comes in pieces."""
    if len(counts) == 1:
        return counts[0]
    classes = tuple(map(sum, zip(*(piece.classes for piece in counts), strict=True)))
    target: dict[str, float] = {}
    if counts[0].target:
        rows = sum(piece.rows for piece in counts)
        target = {
            "least": min(piece.target["least"] for piece in counts),
            "mean": sum(piece.target["mean"] * piece.rows for piece in counts) / rows,
            "most": max(piece.target["most"] for piece in counts),
        }
    return Counts(sum(piece.rows for piece in counts), classes, None, {}, target)


def _constant(pieces: Sequence[Dataset]) -> int:
    """How many of the inputs never vary in the training part."""
    if pieces[0].is_text:
        return 0
    first = pieces[0].x[0]
    varies = torch.zeros_like(first, dtype=torch.bool)
    for piece in pieces:
        for span in spans(piece.x):
            varies |= (piece.x[span] != first).any(0)
    return int((~varies).sum())


def _digests(parts: Mapping[str, Sequence[Dataset]]) -> dict[str, list[bytes]] | None:
    """One of every sample's input, part by part; None where there are too many to look."""
    pieces = [piece for part in parts.values() for piece in part]
    whole = sum(piece.x.numel() * piece.x.element_size() for piece in pieces)
    if whole > _MOST_BYTES or sum(map(len, pieces)) > _MOST_ROWS:
        return None
    return {name: [digest for piece in part for digest in _of_rows(piece.x)] for name, part in parts.items()}


def _of_rows(x: Tensor) -> Iterator[bytes]:
    for span in spans(x, most=_CHUNK):
        chunk = x[span]
        rows = np.ascontiguousarray(chunk.cpu().numpy()).reshape(len(chunk), -1)
        for row in rows:
            yield hashlib.blake2b(row.data, digest_size=16).digest()


def _digest(digests: Mapping[str, Sequence[bytes]], parts: Mapping[str, Sequence[Dataset]]) -> str:
    """One of all samples and their targets, in order."""
    whole = hashlib.blake2b(digest_size=16)
    for name, part in parts.items():
        whole.update(b"".join([name.encode(), *digests[name]]))
        for piece in part:
            whole.update(b"".join(_of_rows(piece.y)))
    return whole.hexdigest()


_PARTS = {"train": "training", "validation": "validation", "test": "test"}
_PAIRS = (("validation", "train"), ("test", "train"), ("test", "validation"))


def _duplicates(digests: Mapping[str, Sequence[bytes]]) -> Shared:
    seen = {name: set(listed) for name, listed in digests.items()}
    counted: Shared = {name: {name: len(listed) - len(seen[name])} for name, listed in digests.items()}
    for one, other in _PAIRS:
        if one in digests and other in digests:
            counted[one][other] = sum(digest in seen[other] for digest in digests[one])
    return counted


def _shared_groups(parts: Mapping[str, Sequence[Dataset]]) -> Shared:
    groups = {
        name: {int(code) for piece in pieces if piece.groups is not None for code in torch.unique(piece.groups)}
        for name, pieces in parts.items()
        if all(piece.groups is not None for piece in pieces)
    }
    shared: Shared = {}
    for one, other in _PAIRS:
        if one in groups and other in groups:
            shared.setdefault(one, {})[other] = len(groups[one] & groups[other])
    return shared


def _warnings(made: Description) -> Iterator[str]:
    for column in made.columns:
        yield from column.warnings(made.rows)
    for one, others in made.shared_groups.items():
        for other, count in others.items():
            if count:
                yield (
                    f"{count:,} of {made.parts[one].groups:,} groups of the {_PARTS[one]} part are in the "
                    f"{_PARTS[other]} part too: figures will be better than on groups that the model has never seen."
                )
    for one, others in (made.duplicates or {}).items():
        for other, count in others.items():
            if count and one != other:
                yield (
                    f"{count:,} of {made.parts[one].rows:,} samples of the {_PARTS[one]} part "
                    f"{'has' if count == 1 else 'have'} an equal input in the {_PARTS[other]} part."
                )
    if made.duplicates is None:
        yield "there are too many samples to look for equal ones in two parts."
    if not made.columns and made.constant and len(made.input_shape) == 1:
        yield f"{made.constant:,} of {made.input_shape[0]:,} inputs never vary in the training part."
    if made.task == "classification":
        for name, part in made.parts.items():
            lacking = [made.class_name(code) for code, count in enumerate(part.classes) if not count]
            if lacking:
                yield f"the {_PARTS[name]} part has no sample of class {_listed(lacking)}."
    sites = {site for part in made.parts.values() for site in part.sites}
    for name, part in made.parts.items():
        without = sorted(sites - {*part.sites})
        if without:
            yield f"the {_PARTS[name]} part has no sample of site {_listed(without)}."
