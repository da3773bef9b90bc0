"""Transitional layers: a public multiplication before every weight, so that its two sides scale independently.

Rescaling gives an edge one scale r: its producer multiplies by r, and whoever reads it divides by r. A
transitional layer multiplies channel i by 1/(r_i·s_i) directly before the weight that reads it, so that
the weight sees an edge of scale 1/s and is multiplied by s, a number of its own:

    R = r_out·s_in     for a weight, both factors independent
    R = r_out          for a bias, an affine parameter of a normalisation, a weight that reads the input
    R = s_in           for a weight that makes the output
    R = 1              for an output bias and whatever else is pinned

Each number serves many coordinates, so its law follows from all of them. A number that meets another
one in some coordinate has the law DN*(2), one that never does DN*(1). The two factors of a coordinate
are then two DN*(2), a single factor is DN*(1) or, where it meets another elsewhere, DN*(2); clients
know which it is, because the architecture alone decides, and draw the noise that makes R ∘ noise Gaussian.

No transitional layer hides more than plain rescaling: whoever multiplies its numbers into the weight
behind it holds r_out/r_in ∘ W.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import Blueprint, Weights
from fedveil.downlink.edges import PINNED, Classes
from fedveil.downlink.messages import Broadcast, Mean, Recovered
from fedveil.downlink.rescaling import (
    HeadNoise,
    Rescaling,
    ScaledVeil,
    head_tensors,
    scale_table,
    scaled_veil,
)
from fedveil.downlink.samplers import BOUNDED, BOUNDED_HALF, GAUSSIAN, Uniforms, half, secret_uniforms, whole
from fedveil.downlink.table import Scaled, ScaleTable
from fedveil.errors import TraceError
from fedveil.ledger.releases import Cover
from fedveil.secrets import Guarded, SecretStream

_BUFFER = "transitional"


@dataclass(frozen=True, eq=False)
class Transitional:
    """A scale table whose weights read edges of their own.

    `table` has one more class per channel that a weight reads, of scale 1/s. `before` and `after` are the
    classes of those channels on the two sides of the transitional layers, all layers in a row.
    """

    table: ScaleTable
    paths: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    before: Tensor
    after: Tensor
    inward: int
    halves: Tensor
    wholes: Tensor

    def scales(self, uniforms: Uniforms) -> Tensor:
        """Fresh scales for all classes: r ~ DN*(1) or DN*(2) as the module describes, 1/s on the new ones."""
        values = torch.ones(self.table.classes.count, dtype=torch.float64)
        values[self.halves] = torch.from_numpy(half(len(self.halves), uniforms))
        values[self.wholes] = torch.from_numpy(whole(len(self.wholes), uniforms))
        values[self.inward :] = 1.0 / values[self.inward :]
        return self.table.classes.scales(values.log())

    def multipliers(self, scales: Tensor) -> Tensor:
        """1/(r·s) for every channel of every transitional layer."""
        return scales[self.after] / scales[self.before]


@lru_cache(maxsize=8)
def transitional(table: ScaleTable) -> Transitional:
    """The table with transitional layers; refused where a weight is not read by a module's call."""
    for reader in table.readers:
        if reader.refusal:
            raise TraceError(
                f"Transitional layers cannot be used: {reader.refusal}, so there is no place before it. Call an "
                "nn.Linear or nn.Conv module instead of the function, or use a scheme that rescales only."
            )
    entries = {entry.name: entry for entry in table.parameters}
    inward = count = table.classes.count
    before, after = [], []
    for reader in table.readers:
        read = entries[reader.weight].into
        assert read is not None
        free = read != PINNED
        fresh = torch.zeros_like(read)
        fresh[free] = torch.arange(count, count + int(free.sum()), device=read.device)
        count += int(free.sum())
        entries[reader.weight] = dataclasses.replace(entries[reader.weight], into=fresh)
        before.append(read.reshape(-1))
        after.append(fresh.reshape(-1))
    classes = Classes(count, table.classes.products)
    derived = dataclasses.replace(table, classes=classes, parameters=tuple(entries.values()))
    nothing = torch.empty(0, dtype=torch.int64)
    shares = _shares(derived)
    return Transitional(
        table=derived,
        paths=tuple(reader.paths for reader in table.readers),
        sizes=tuple(len(one) for one in before),
        before=torch.cat(before) if before else nothing,
        after=torch.cat(after) if after else nothing,
        inward=inward,
        halves=torch.nonzero(shares == 1).reshape(-1),
        wholes=torch.nonzero(shares == 2).reshape(-1),
    )


def _ends(entry: Scaled) -> tuple[Tensor, Tensor]:
    """The classes of R's two factors, in shapes that broadcast; PINNED where there is none."""
    none = torch.full((1,) * len(entry.view), PINNED)
    out = none if entry.out is None else entry.out.cpu()
    return out, none if entry.into is None else entry.into.cpu()


def _shares(table: ScaleTable) -> Tensor:
    """For every class how much of DN*(1) it is, in halves: 1 for DN*(2), 2 for DN*(1), 0 if it is not drawn."""
    shares = torch.full((table.classes.count,), 2)
    for entry in table.parameters:
        out, into = torch.broadcast_tensors(*_ends(entry))  # type: ignore[no-untyped-call]
        met = (out != PINNED) & (into != PINNED)
        shares[out[met]] = 1
        shares[into[met]] = 1
    shares[PINNED] = 0
    for made, _, _ in table.classes.products:
        shares[made] = 0
    return shares


def noise_kinds(blueprint: Blueprint) -> Tensor:
    """For every parameter coordinate the kind of client noise that R makes Gaussian (uint8, flat).

    0: N(0, σ²), where R = 1. 1: DN(σ, 1), where R is DN*(1) or a product of two DN*(2). 2: DN(σ, 1)·DN*(2),
    where R is a single DN*(2). Nothing but the architecture decides.
    """
    if blueprint.table is None:
        raise TraceError("This blueprint was not traced; the kinds of client noise follow from the scale table.")
    table = transitional(blueprint.table).table
    shares = _shares(table)
    for made, left, right in table.classes.products:
        shares[made] = shares[left] + shares[right]
    by_share = torch.tensor([GAUSSIAN, BOUNDED_HALF, BOUNDED], dtype=torch.uint8)
    kinds = []
    for entry in table.parameters:
        out, into = _ends(entry)
        total = shares[out] + shares[into]
        if bool((total > 2).any()):
            raise TraceError(f"No client noise becomes Gaussian under the secret factors of {entry.name}.")
        kinds.append(by_share[total].expand(entry.view).reshape(-1))
    return torch.cat(kinds) if kinds else torch.empty(0, dtype=torch.uint8)


def load_multipliers(blueprint: Blueprint, module: nn.Module, flat: Tensor) -> None:
    """Put the transitional layers' numbers before the modules that they belong to; none at all count as 1."""
    if not flat.numel():
        for one in module.modules():
            if _BUFFER in one._buffers:
                one.get_buffer(_BUFFER).fill_(1.0)
        return
    assert blueprint.table is not None
    layers = transitional(blueprint.table)
    for paths, part in zip(layers.paths, torch.split(flat, list(layers.sizes)), strict=True):
        for path in paths:
            reader = module.get_submodule(path)
            if _BUFFER not in reader._buffers:
                _attach(reader)
            buffer = reader.get_buffer(_BUFFER)
            buffer.copy_(part.view_as(buffer))


def has_multipliers(module: nn.Module) -> bool:
    """Whether transitional layers were put into a module."""
    return any(_BUFFER in one._buffers for one in module.modules())


def _attach(reader: nn.Module) -> None:
    weight = reader.weight
    assert isinstance(weight, Tensor)
    # Trailing dimensions broadcast: the features of a linear layer, the channels of a convolution.
    channels = reader.in_features if isinstance(reader, nn.Linear) else reader.in_channels
    shape = (channels, *(1,) * (weight.dim() - 2))
    ones = torch.ones(shape, dtype=weight.dtype, device=weight.device)  # type: ignore[arg-type]
    reader.register_buffer(_BUFFER, ones, persistent=False)
    reader.register_forward_pre_hook(_multiply)


def _multiply(reader: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * reader.get_buffer(_BUFFER), *args[1:])


@dataclass(frozen=True)
class Decomposed:
    """Transitional layers, secret scales by the laws DN*(1) and DN*(2), and optionally head noise."""

    head: HeadNoise | None = None

    traced = True

    @property
    def head_noise(self) -> bool:
        """Where it is given."""
        return self.head is not None

    def noise_factors(self, blueprint: Blueprint, *, stream: SecretStream) -> Tensor | None:
        """|r/r′| of every parameter on which clients draw bounded noise."""
        cpu = blueprint.to(device=torch.device("cpu"))
        layers = transitional(scale_table(cpu))
        factors = layers.table.rescale(
            torch.ones(cpu.size, dtype=torch.float64), layers.scales(secret_uniforms(stream))
        )
        return factors[noise_kinds(cpu) == BOUNDED].abs()

    def head_tensors(self, blueprint: Blueprint) -> int:
        """1 without head noise, m + 2 with it (2m + 1 with weighted outputs)."""
        transitional(scale_table(blueprint))  # what cannot be veiled is refused before the first round
        return head_tensors(self.head, blueprint)

    def covers(self) -> Mapping[str, Cover]:
        """As rescaling has it; and what the transitional layers' numbers are."""
        what = "1/(r·s) for every channel that a weight reads; with the parameters it gives r/r′ ∘ W"
        return {**Rescaling(head=self.head).covers(), "multipliers": Cover(what=what)}

    def veil(
        self, blueprint: Blueprint, weights: Weights, *, stream: SecretStream, head_level: float | None
    ) -> DecomposedVeil:
        """Fresh scales on both sides of every transitional layer and, with head noise, a fresh γ."""
        layers = transitional(scale_table(blueprint))
        scales = layers.scales(secret_uniforms(stream)).to(weights.parameters.device)
        scaled = scaled_veil(
            dataclasses.replace(blueprint, table=layers.table),
            weights,
            scales,
            head=self.head,
            stream=stream,
            head_level=head_level,
        )
        return DecomposedVeil(scaled, layers.multipliers(scales).to(weights.parameters.dtype))


class DecomposedVeil(Guarded):
    """One round's secrets: a rescaling of the network with transitional layers, and their public numbers."""

    __slots__ = ("_multipliers", "_scaled")

    def __init__(self, scaled: ScaledVeil, multipliers: Tensor) -> None:
        self._scaled = scaled
        self._multipliers = multipliers

    def broadcast(self) -> Broadcast:
        """Ŵ = R ∘ W (+ r·1ᵀ on the head), ε·k², running statistics, and 1/(r·s)."""
        return dataclasses.replace(self._scaled.broadcast(), multipliers=self._multipliers)

    def veiled_statistics(self) -> Tensor:
        """Running mean·k and variance·k², in float64."""
        return self._scaled.veiled_statistics()

    def recover(self, mean: Mean) -> Recovered:
        """∇_W L = R ∘ (G₀ − Σ_s γ_s·G_s + v·G_β), in float64; noise in G₀ comes out as R ∘ noise."""
        return self._scaled.recover(mean)
