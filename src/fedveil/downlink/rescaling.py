"""The rescaling downlink: a secret positive number per hidden channel, and noise on the head.

Every parameter becomes Ŵ = R ∘ W. With head noise the last layer also gets r·1ᵀ, r_i = γ_{s(i)}·a_i
(its bias + r): clients see ŷ = y + α·r with α = Σ_j ĥ_j (+ 1 with a bias). For the square loss

    L(W) = φ₀ − Σ_s γ_s·φ_s + v·φ_β,     v = Σ_i r_i²

so the m + 2 gradients that clients return combine into the true one. With unequal output weights
w_i (the true class counts k times) the last term splits by group: Σ_s γ_s²·φ_{β,s}.

Where the loss reads outputs through softmax alone, the last layer can get 1·uᵀ instead (its bias + c): the same number
is added to all logits of a sample, probabilities do not see it, and every gradient is what it was, G = G'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.downlink.architecture import (
    Architecture,
    TappedLinear,
    Weights,
    assemble,
    load_parameters,
    load_statistics,
)
from fedveil.downlink.messages import Broadcast, Downlink, Mean, PublicHead, Recovered
from fedveil.downlink.scales import HeadSite, ScaleTable
from fedveil.downlink.symmetry import FAMILIES, ROTATING, Basis, draw_basis, unmoved
from fedveil.errors import ConfigError, TraceError, spelled, unknown_name
from fedveil.ledger import caveats
from fedveil.ledger.releases import Caveats, Cover
from fedveil.secrets import Guarded, SecretStream

_PROBE_SAMPLES = 64
_SECRETS = {
    "signed": "secret orders and signs of hidden units, fresh every round",
    "isometry": "secret orders and signs of hidden units and rotations of attention heads, fresh every round",
    "full": "secret orders, signs and scales of hidden units and matrices on attention heads, fresh every round",
}


@dataclass(frozen=True)
class HeadNoise:
    """Additive noise on the last layer.

    `groups` is m, from 1 to the number of outputs (None: one group per output); `strength` s sets
    γ_s = ± s·u_s/√(2φ_β) with u_s uniform on [½, 3/2), so that α·r is s times the order of the outputs.
    A `partition` says of every output which γ it has; else outputs are dealt to the groups anew every round.
    """

    groups: int | None = 1
    strength: float = 1.0
    weighted_outputs: bool = False
    partition: tuple[int, ...] | None = None

    def count(self, outputs: int) -> int:
        """m for a model of `outputs` outputs; refused if it does not fit."""
        if self.partition is not None:
            if len(self.partition) != outputs:
                raise ConfigError(
                    f"head_partition names {len(self.partition)} outputs, and the model has {outputs}: give one number "
                    "for each."
                )
            return max(self.partition) + 1
        groups = outputs if self.groups is None else self.groups
        if not 1 <= groups <= outputs:
            raise ConfigError(
                f"head_groups = {groups} does not fit a model with {outputs} outputs: choose between 1 and {outputs}."
            )
        return groups


@dataclass(frozen=True)
class Rescaling(Downlink):
    """Secret scales, log r uniform on [−log spread, log spread], and optionally head noise.

    Other families than "scale" put orders, signs and matrices on attention heads beside the scales, or in their place.
    """

    spread: float = 4.0
    head: HeadNoise | None = None
    family: str = "scale"
    streams: bool = False
    """Gains of normalisations are folded into what reads them, so that residual streams can be rotated."""
    shifted: bool = False
    """The loss is softmax cross-entropy: a secret number is added to all logits of a sample."""

    traced = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.spread) and self.spread > 1.0):
            raise ConfigError(f"spread must be a number above 1 (got {self.spread}); 4 is the default.")
        if self.family not in FAMILIES:
            raise unknown_name("family", self.family, FAMILIES)
        if self.streams and self.family not in ROTATING:
            raise ConfigError(
                f"{spelled('stream_rotations', True)} needs a family with rotations: take "
                f"{spelled('family', 'full')} or {spelled('family', 'isometry')}."
            )

    @property
    def head_noise(self) -> bool:
        """Where it is given."""
        return self.head is not None

    def head_tensors(self, architecture: Architecture) -> int:
        """1 without head noise, m + 2 with it (2m + 1 with weighted outputs)."""
        return head_tensors(self.head, architecture)

    def covers(self) -> Mapping[str, Cover]:
        """Every layer up to secret scales, or to what else the family has."""
        if self.family != "scale":
            secrets = _SECRETS[self.family]
            if self.shifted:
                secrets = f"{secrets}, and a secret number on all logits"
            if self.streams:
                secrets = f"rotations of residual streams with gains folded into their readers; {secrets}"
            head = f"{secrets}, and γ·a on the last layer" if self.head else secrets
            return {
                "parameters": Cover(what="the parameters, in another basis", hiding=head),
                "statistics": Cover(what="running statistics, in another order and up to signs", hiding=secrets),
            }
        scales = "one secret scale per hidden channel, fresh every round"
        head = "secret scales and γ·a on the last layer" if self.head else scales
        return {
            "parameters": Cover(what="the parameters, rescaled", hiding=head),
            "epsilon": Cover(what="ε·k² of the normalisation layers", hiding=scales),
            "statistics": Cover(what="running statistics, rescaled", hiding=scales),
        }

    def caveats(self) -> Caveats:
        """A veil is measured, not proven, and falls to who aligns; outputs are open without head noise."""
        return self.caveats_as("" if self.head else self.family + ", streams rotated" * self.streams)

    def caveats_as(self, measured: str) -> Caveats:
        """The same with the figure of a veil as it was measured under that name, if it was."""
        veil = caveats.VEIL if self.family == "scale" else caveats.ORDERS
        outputs = () if self.head else (caveats.OUTPUTS,)
        return Caveats(unprotected=(veil, caveats.ALIGNED, *caveats.reached(measured), *outputs))

    def veil(
        self, architecture: Architecture, weights: Weights, *, stream: SecretStream, head_level: float | None
    ) -> ScaledVeil:
        """Fresh scales and, with head noise, a fresh γ, for one round."""
        table = scale_table(architecture)
        if table.symmetry is not None:
            basis = draw_basis(table.symmetry, table.classes, spread=self.spread, stream=stream)
        else:
            logs = (2.0 * stream.uniform(table.classes.count) - 1.0) * math.log(self.spread)
            basis = unmoved(table.classes.scales(logs))
        veil = scaled_veil(architecture, weights, basis, head=self.head, stream=stream, head_level=head_level)
        if self.shifted and table.head is not None:
            veil.shift = 2.0 * stream.uniform(table.head.features + 1).to(weights.parameters.device) - 1.0
        return veil


def scaled_veil(
    architecture: Architecture,
    weights: Weights,
    basis: Basis,
    *,
    head: HeadNoise | None,
    stream: SecretStream,
    head_level: float | None,
    multipliers: Tensor | None = None,
) -> ScaledVeil:
    """The veil of given secrets, for every class of the architecture's table, and of a freshly drawn γ."""
    device = weights.parameters.device
    if multipliers is None:
        multipliers = weights.parameters.new_empty(0)
    if head is None:
        return ScaledVeil(architecture, weights, basis.to(device), None, multipliers)
    secret = _draw_head(head, head_site(architecture).outputs, stream, device)
    veil = ScaledVeil(architecture, weights, basis.to(device), secret, multipliers)
    level = head_level if head_level else veil.probe_level()
    secret.gamma *= head.strength / level
    return veil


def head_site(architecture: Architecture) -> HeadSite:
    """Where the head noise goes; refused if the model has no such place."""
    table = scale_table(architecture)
    if table.head is None:
        raise TraceError(
            f"Head noise cannot be used: {table.head_refusal}. Use a model that ends in an "
            f"nn.Linear layer, or drop the head noise ({spelled('head_noise', False)})."
        )
    return table.head


def head_tensors(head: HeadNoise | None, architecture: Architecture) -> int:
    """How many gradients undo the head noise: 1 without it, m + 2 with it (2m + 1 with weighted outputs)."""
    if head is None:
        return 1
    groups = head.count(head_site(architecture).outputs)
    return 1 + 2 * groups if head.weighted_outputs else 2 + groups


def scale_table(architecture: Architecture) -> ScaleTable:
    """The architecture's table; refused if it was not traced."""
    if architecture.table is None:
        raise TraceError("This architecture was not traced; a rescaling downlink needs the scale table.")
    return architecture.table


class HeadSecret(Guarded):
    """γ_1 … γ_m, beside what clients are told."""

    __slots__ = ("gamma", "public")

    def __init__(self, public: PublicHead, gamma: Tensor) -> None:
        self.public = public
        self.gamma = gamma

    def noise(self) -> Tensor:
        """r_i = γ_{s(i)}·a_i."""
        return self.gamma[self.public.groups] * self.public.vector

    def coefficients(self) -> Tensor:
        """The numbers that combine the returned gradients into the true one."""
        unit = torch.ones(1, dtype=torch.float64, device=self.gamma.device)
        last = self.gamma**2 if self.public.per_group else (self.noise() ** 2).sum().reshape(1)
        return torch.cat([unit, -self.gamma, last])


def _draw_head(settings: HeadNoise, outputs: int, stream: SecretStream, device: torch.device) -> HeadSecret:
    groups = settings.count(outputs)
    # Distinct magnitudes in [½, 3/2) with random signs: pairwise different, none near zero.
    vector = (0.5 + stream.uniform(outputs)) * stream.signs(outputs)
    order = torch.argsort(stream.uniform(outputs))
    group_of = torch.empty(outputs, dtype=torch.int64)
    group_of[order] = torch.arange(outputs) % groups
    if settings.partition is not None:
        group_of = torch.tensor(settings.partition)
    public = PublicHead(vector.to(device), group_of.to(device), groups, settings.weighted_outputs)
    # Sign and size are both secret: with a public, a known size would leave one bit per group.
    gamma = stream.signs(groups) * (0.5 + stream.uniform(groups))
    return HeadSecret(public, gamma.to(device))


class ScaledVeil(Guarded):
    """One round's secrets: the scales, γ, and the model they hide; and the transitional layers' public numbers."""

    __slots__ = ("_architecture", "_basis", "_head", "_multipliers", "_table", "_weights", "shift")

    def __init__(
        self, architecture: Architecture, weights: Weights, basis: Basis, head: HeadSecret | None, multipliers: Tensor
    ) -> None:
        self._architecture = architecture
        self._table = scale_table(architecture)
        self._weights = weights
        self._basis = basis
        self._head = head
        self._multipliers = multipliers
        self.shift: Tensor | None = None
        """u and c beside the weights' size, between −1 and 1."""

    def broadcast(self) -> Broadcast:
        """Ŵ = R ∘ W (+ r·1ᵀ or 1·uᵀ on the head), ε·k², running mean·k and variance·k², and 1/(r·s)."""
        dtype = self._weights.parameters.dtype
        veiled = self._table.hide(self._weights.parameters, self._basis)
        public = None
        if self._head is not None:
            site = self._table.head
            assert site is not None
            noise = self._head.noise()
            for name in (site.weight, *([] if site.bias is None else [site.bias])):
                part = self._architecture.parameters.part(veiled, name)
                part += noise.reshape([-1] + [1] * (part.dim() - 1))
            public = self._head.public
        if self.shift is not None:
            self._shift_logits(veiled, self.shift)
        epsilon = self._weights.epsilon.to(torch.float64)
        if self._table.symmetry is not None:
            epsilon = epsilon[self._architecture.followed[0].of(self._basis)]
        epsilon = epsilon * self._norm_factor()
        statistics = torch.empty(0, dtype=torch.float64, device=veiled.device)
        if self._architecture.frozen_statistics:
            statistics = self.veiled_statistics()
        return Broadcast(veiled.to(dtype), epsilon.to(dtype), statistics.to(dtype), self._multipliers, public)

    def _shift_logits(self, veiled: Tensor, shift: Tensor) -> None:
        """1·uᵀ on the head's weight and c on its bias, in place; of the weights' size, so that rounding stays small."""
        site = self._table.head
        assert site is not None
        weight = self._architecture.parameters.part(veiled, site.weight)
        shift = shift * math.sqrt(3.0) * weight.square().mean().sqrt()
        weight += shift[:-1]
        if site.bias is not None:
            self._architecture.parameters.part(veiled, site.bias).add_(shift[-1])

    def veiled_statistics(self) -> Tensor:
        """Running mean·k and variance·k², in float64."""
        statistics = self._weights.statistics.to(torch.float64)
        if self._table.symmetry is not None and statistics.numel():
            statistics = statistics[self._architecture.followed[1].of(self._basis)]
        return statistics * self._statistics_factor()

    def recover(self, mean: Mean) -> Recovered:
        """∇_W L = R ∘ (G₀ − Σ_s γ_s·G_s + v·G_β), in float64; the loss by the same combination."""
        gradients, values = mean.gradients.to(torch.float64), mean.values.to(torch.float64)
        level, loss = None, None
        if self._head is None:
            combined = gradients[0]
            if values.numel():
                loss = float(values[0])
        else:
            coefficients = self._head.coefficients()
            combined, loss = coefficients @ gradients, float(coefficients @ values)
            level = self._level(values)
        statistics = mean.statistics.to(torch.float64)
        if statistics.numel():
            statistics = statistics / self._statistics_factor()
            if self._table.symmetry is not None:
                place = self._architecture.followed[1].of(self._basis)
                statistics = torch.empty_like(statistics).scatter_(0, place, statistics)
        return Recovered(self._table.pull(combined, self._basis, at=self._weights.parameters), loss, statistics, level)

    def _level(self, values: Tensor) -> float:
        assert self._head is not None
        public = self._head.public
        if not public.per_group:
            return math.sqrt(max(2.0 * float(values[-1]), 1e-24))
        # Σ_s φ_{β,s} = ½α²·Σ_i w_i a_i²; dividing by Σ a² gives ½α² up to the weights' order.
        total = float(values[-public.count :].sum()) / float((public.vector**2).sum())
        return math.sqrt(max(2.0 * total, 1e-24))

    def probe_level(self) -> float:
        """√(mean α²) of a forward pass on standard-normal input: the first round's yardstick."""
        table, site = self._table, self._table.head
        assert site is not None
        model = assemble(self._architecture, self._weights).eval()
        if table.symmetry is not None:  # what a client's layer reads; a scale is looked up below
            hidden = table.hide(self._weights.parameters, self._basis).to(self._weights.parameters)
            load_parameters(model, hidden)
            if self._weights.statistics.numel():
                load_statistics(model, self.veiled_statistics().to(self._weights.parameters))
        generator = torch.Generator().manual_seed(0)
        shape = (_PROBE_SAMPLES, *self._architecture.input_shape)
        if self._architecture.input_dtype.is_floating_point:
            probe = torch.randn(shape, generator=generator).to(self._weights.parameters)
        else:  # token ids: the two smallest exist in every vocabulary
            probe = torch.randint(0, 2, shape, generator=generator).to(self._weights.parameters.device)
        with torch.no_grad():
            model(probe)
        layer = model.get_submodule(site.path)
        assert isinstance(layer, TappedLinear)
        entry = next(parameter for parameter in table.parameters if parameter.name == site.weight)
        tap = layer.tap.to(torch.float64)
        if entry.into is not None and table.symmetry is None:
            tap = tap * self._basis.scales[entry.into.reshape(-1)]
        alpha = tap.sum(1) + (1.0 if site.bias is not None else 0.0)
        return max(float(alpha.square().mean().sqrt()), 1e-12)

    def _norm_factor(self) -> Tensor:
        return self._basis.scales[self._architecture.norm_reads] ** 2

    def _statistics_factor(self) -> Tensor:
        reads, variances = self._architecture.statistics_reads
        read = self._basis.scales[reads]
        return torch.where(variances, read**2, read)
