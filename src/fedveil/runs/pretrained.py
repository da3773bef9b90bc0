"""Weights that a run begins with: from a file (safetensors, or a state_dict of PyTorch's, read as plain data), or from
elsewhere; and what a veil is worth where others know them."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.data.pickles import Built, Machine, Named, RefusedError, StandIns, TooMuchError, cut
from fedveil.downlink.scales import Coverage
from fedveil.errors import ConfigError, spelled

# A counter that decides nothing here, and the ε that FedVeil's own files keep beside a normalisation's weights.
_NO_WEIGHTS = ("num_batches_tracked", "epsilon")
_SHOWN = 3

HANDED = (
    "the model was handed over with its first weights: if PyTorch drew them after a seed, they have 32 bits, which a "
    "client searches in hours and then has the whole model; fedveil.secrets.drawn_from draws them from the operating "
    "system"
)
FROZEN = (
    "{:,} parameters are frozen: whoever knows them beforehand, as everybody knows published weights, divides what is "
    "received by them and has the scales of the layers beside, so that a veil hides nothing there"
)
PUBLISHED = (
    "the model begins with weights that others know: a client matches what it is sent with them and reads off the "
    "veil's secrets, exactly at first and nearly so later, so that 0 of the model is hidden"
)


def loaded_from(model: nn.Module) -> str:
    """Where a model's weights were loaded from, as far as its parts tell (`from_pretrained`); empty if they do not."""
    told = (getattr(getattr(part, "config", None), "name_or_path", None) for part in model.modules())
    return next((name for name in told if isinstance(name, str) and name), "")


def nothing_hidden(covered: Coverage) -> Coverage:
    """The cover of a model that others know beforehand."""
    parameters = tuple(
        replace(parameter, hidden=0, sides="visible", levels=(0, 0, 0, 0)) for parameter in covered.parameters
    )
    return replace(covered, parameters=parameters, head_noise=False, secrets=0, bits=0.0, reals=0, known=True)


def fill_from(model: nn.Module, path: Path) -> None:
    """Give a model the weights of a file, all of them.

    Raises:
        ConfigError: The file cannot be read, a name, a shape or a type in it is not the model's, or its numbers are
            NaN or infinite where the model's are not.
    """
    own = {name: value for name, value in model.state_dict(keep_vars=True).items() if _is_weight(name)}
    if not path.is_file():
        raise ConfigError(f"There are no weights at {path}: give a .safetensors file, or a state_dict (.pt, .pth).")
    if path.suffix == ".safetensors":
        _fill_from_safetensors(own, path)
    elif path.suffix in (".pt", ".pth", ".bin"):
        _fill_from_state_dict(own, path)
    else:
        raise ConfigError(f"{path} is no file of weights that can be read: give .safetensors, .pt or .pth.")


def _is_weight(name: str) -> bool:
    return name.rpartition(".")[2] not in _NO_WEIGHTS


def _fill_from_safetensors(own: Mapping[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _check(own, shapes, path)
            _copy(own, file.get_tensor, path)
    except (SafetensorError, OSError, ValueError, AttributeError) as reason:
        raise ConfigError(f"{path} is damaged or not a safetensors file: {reason}") from reason


_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_MOST_SAID = 32 << 20  # of names and shapes; that of a model of a billion parameters takes a few hundred kB


@dataclass(frozen=True)
class _Storage:
    """Numbers that lie in a member of the archive."""

    dtype: torch.dtype
    key: str
    count: int


@dataclass(frozen=True)
class _Saved:
    """A tensor as a file describes it, not yet read."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    negated: bool

    def read(self, content: bytearray) -> Tensor:
        """The tensor, from its storage's bytes."""
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        if len(content) != self.storage.count * self.storage.dtype.itemsize or (
            0 not in self.shape and last >= self.storage.count
        ):
            raise ValueError("a tensor that is not where the file says")
        if not content:
            return torch.empty(self.shape, dtype=self.storage.dtype)
        numbers = torch.frombuffer(content, dtype=self.storage.dtype)
        value = numbers.as_strided(self.shape, self.strides, self.offset)
        return -value if self.negated else value


class _Ordered(dict[str, object], Built):
    """Stands in for OrderedDict, to which PyTorch gives the versions of its layers as an attribute.

    It begins empty, as pickles make it: what it were given would be copied, and its keys hashed, unseen.
    """

    def __init__(self) -> None:
        super().__init__()

    def built(self, state: object) -> None:
        """Versions decide nothing here."""


def _tensor(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    _grad: object = None,
    _hooks: object = None,
    bits: object = None,
) -> _Saved:
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("a tensor of nothing")
    sizes = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        raise ValueError("a tensor of no shape")
    assert isinstance(offset, int)
    if bits not in (None, {}, {"neg": False}, {"neg": True}):  # that of conjugates belongs to complex numbers
        raise ValueError("a tensor that is read in a way of its own")
    return _Saved(storage, offset, shape, strides, negated=bits == {"neg": True})


def _parameter(tensor: object, *_: object) -> object:
    return tensor


def _stored(named: object) -> _Storage:
    kind, storage, key, _, count = named if isinstance(named, tuple) and len(named) == 5 else (None,) * 5
    name = storage.name.removeprefix("torch.") if isinstance(storage, Named) else ""
    if kind != "storage" or name not in _STORAGES or not isinstance(key, str) or type(count) is not int or count < 0:
        raise ValueError("numbers of a kind that weights are not")
    return _Storage(_STORAGES[name], key, count)


_STAND_INS: StandIns = {
    ("collections", "OrderedDict"): _Ordered,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    **{("torch", name): _parameter for name in _STORAGES},
}


def _fill_from_state_dict(own: Mapping[str, Tensor], path: Path) -> None:
    """A state_dict as torch.save writes it, read without Python's unpickler: dense tensors by name, nothing else."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist()}
            plain = all(member.compress_type == zipfile.ZIP_STORED for member in members.values())
            if not plain or sum(member.file_size for member in members.values()) > path.stat().st_size:
                raise ConfigError(f"{path} is compressed, which torch.save never does: save it again.")
            (folder,) = {name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl")}
            if members[f"{folder}data.pkl"].file_size > _MOST_SAID:
                raise ValueError("too many names")
            order = members.get(f"{folder}byteorder")
            if order is not None and archive.read(order) != b"little":
                raise ValueError("numbers with their largest byte first")
            given = Machine(archive.read(f"{folder}data.pkl"), _STAND_INS, stored=_stored).run()
            if not isinstance(given, dict) or not all(isinstance(value, _Saved) for value in given.values()):
                raise ConfigError(f"{path} holds something else than tensors by name: save model.state_dict() alone.")
            _check(own, {name: value.shape for name, value in given.items()}, path)
            _copy(own, _reader(given, own, lambda key: archive.read(f"{folder}data/{key}")), path)
    except ConfigError:
        raise
    except TooMuchError as reason:
        raise ConfigError(
            f"{path} cannot be read as weights alone: it asks for {reason}. Save a state_dict, or the tensors as "
            ".safetensors, which may be as many as you like."
        ) from reason
    except RefusedError as reason:
        raise ConfigError(
            f"{path} cannot be read as weights alone: it names {reason}, and nothing was run. Save a state_dict of "
            "dense tensors, torch.save(model.state_dict(), …), and not a whole model."
        ) from reason
    except Exception as reason:  # whatever is wrong with the file, or in it
        raise ConfigError(
            f"{path} cannot be read as weights alone: save a state_dict, torch.save(model.state_dict(), …), with a "
            "PyTorch of this decade, and not a whole model."
        ) from reason


def _reader(
    given: Mapping[str, _Saved], wanted: Iterable[str], stored: Callable[[str], bytes]
) -> Callable[[str], Tensor]:
    """Reads tensors by name, each once; a storage that several are views of is kept until the last of them."""
    uses = Counter(given[name].storage.key for name in wanted)
    kept: dict[str, bytearray] = {}

    def read(name: str) -> Tensor:
        key = given[name].storage.key
        uses[key] -= 1
        content = kept[key] if key in kept else bytearray(stored(key))
        if uses[key]:
            kept[key] = content
        else:
            kept.pop(key, None)
        return given[name].read(content)

    return read


def _check(own: Mapping[str, Tensor], given: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Refuse weights of another model, by name, before any is read."""
    there = {name: shape for name, shape in given.items() if _is_weight(name)}
    wrong = [
        f"{name} has shape {cut(str(there[name]))} there and {tuple(own[name].shape)} in the model"
        for name in own
        if name in there and there[name] != tuple(own[name].shape)
    ]
    wrong += [f"{name} is missing there" for name in own if name not in there]
    wrong += [f"{cut(name)} is not in the model" for name in there if name not in own]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ConfigError(
            f"The weights in {path} are not this model's: {'; '.join(wrong[:_SHOWN])}{more}. Give the model's settings "
            f"as they were (-o), or fill the model in code of your own ({spelled('model', 'file.py:factory')})."
        )


def _copy(own: Mapping[str, Tensor], read: Callable[[str], Tensor], path: Path) -> None:
    with torch.no_grad():
        for name, target in own.items():
            value = read(name)
            if value.is_floating_point() != target.is_floating_point():
                raise ConfigError(f"The weights of {name} are {value.dtype}, the model's {target.dtype}.")
            value = value.to(target.dtype)
            if not bool(value.isfinite().all()) and bool(target.isfinite().all()):  # a mask may well hold −∞
                raise ConfigError(
                    f"The weights of {name} in {path} hold NaN or infinity, from which nothing can be trained: give a "
                    "file from before that happened."
                )
            target.copy_(value)
