"""Local work whose contribution is bounded: what a differential-privacy claim needs of a client."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import Architecture, VectorBatchNorm, batch_norms
from fedveil.downlink.messages import Broadcast, ClipBroadcast
from fedveil.errors import Code, ConfigError, NumericError, ProtocolError, spelled
from fedveil.tensors import LARGEST, STATISTICS_CUT, Layout, statistics_in
from fedveil.work.batches import Batches, has_random_layers, mixed_seed, seeded_dropout
from fedveil.work.gradients import contribution_layout, weighted
from fedveil.work.local_sgd import LocalSteps
from fedveil.work.losses import Loss
from fedveil.work.messages import ClientData, ManyAtOnce, Units, Workspace, prepare
from fedveil.work.own_loss import (
    generators_at,
    is_own,
    nothing_kept,
    one_by_one,
    own_code,
    refuse_changed,
)
from fedveil.work.per_sample import (
    Dense,
    PerSample,
    Sums,
    clip_weights,
    clipped,
    joined,
    measured,
    placed,
    safe_bound,
    scaled_norms,
    trained_names,
    working,
)

# --- a clip that follows the updates (Andrew et al. 2021), by one number a round that is under noise like all the rest
#
# Beside its update, a client of n samples tells whether that was within the round's clip: + or − n·τ·C, one number more
# in the same vector. Updates travel in units of the clip: what is sent is u·C/C_t, shortened to C, where C is the clip
# of the settings and C_t that of the round. So noise, its grid and its price are those of C in every round, and the
# server multiplies what it gets by C_t/C.
#
# Replacing a client's data moves its vector by 2nC·√(1 + τ²) at most. Noise that meets the target for that is z times
# as large; on updates it is z_Δ = z·√(1 + τ²) times their 2nC, on the answers σ_b = z·√(1 + τ²)/τ times their 2nτC, and
#
#     z⁻² = z_Δ⁻² + σ_b⁻²
#
# which is the paper's z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2), whose answers are half as far apart. τ² = s/(1 − s) gives the
# answers the share s of what a round may cost, as μ².

_SMALLEST, _LARGEST = 1e-12, 2.0**36
_WIDEST = 1e6
# So that what single precision rounds up is still within the bound.
_BELOW = 1 - 2.0**-20


@dataclass(frozen=True)
class AdaptiveClip:
    """C ← C·e^(−rate·(b − quantile)), b being the noised share, by samples, of updates within the clip.

    `share` is how much of a round's μ² pays for b. Under noise one client can answer for many, so that a liar moves the
    clip as fast as the rule allows: it stays within `range` times the first, up and down.
    """

    quantile: float = 0.5
    rate: float = 0.2
    share: float = 0.1
    range: float = 10.0

    def __post_init__(self) -> None:
        for name, value in (("clip_quantile", self.quantile), ("clip_share", self.share)):
            if not 0 < value < 1:
                raise ConfigError(f"{name} must lie strictly between 0 and 1 (got {value}).")
        if not 0 < self.rate <= 1:
            raise ConfigError(f"clip_rate must lie in (0, 1] (got {self.rate}).")
        if not 1 < self.range <= _WIDEST:
            raise ConfigError(f"clip_range must be more than 1, and at most {_WIDEST:g} (got {self.range}).")

    @property
    def _mark(self) -> float:
        return math.sqrt(self.share / (1 - self.share))

    @property
    def mark(self) -> float:
        """What stands for "within", over the clip of the settings and the client's number of samples."""
        return self._mark * _BELOW

    @property
    def longer(self) -> float:
        """√(1 + τ²): by how much the answer lengthens a contribution, and with it the noise on updates."""
        return math.sqrt(1 + self._mark**2)

    def following(self, clip: float, answers: float, *, start: float) -> float:
        """The next round's clip, by the mean of answers under noise, over what stands for "within"."""
        within = min(max((answers + 1) / 2, 0.0), 1.0)
        low, high = max(start / self.range, _SMALLEST), min(start * self.range, _LARGEST)
        return min(max(clip * math.exp(-self.rate * (within - self.quantile)), low), high)

    def check(self, clip: float, *, start: float, round: int) -> None:
        """Refuse a clip that this rule cannot have reached by a round (counted from 0), whatever clients answered."""
        most = math.log(self.range)
        up, down = (min(self.rate * round * share, most) for share in (self.quantile, 1 - self.quantile))
        if not (clip > 0 and -down - 1e-6 <= math.log(clip / start) <= up + 1e-6):
            raise ProtocolError(
                f"a clip of {clip:g} in round {round + 1} cannot follow from {start:g} in the first, with a clip_rate "
                f"of {self.rate:g} and a clip_range of {self.range:g}"
            )


_RESULT_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
_UPDATES_HELD = 16
_SAMPLES_TOGETHER = {"cpu": 1 << 10, "cuda": 1 << 16}


def refuse_batch_norm(architecture: Architecture) -> None:
    """Refuse a model with a batch normalisation that computes with its batch."""
    for path, layer in architecture.skeleton.named_modules():
        if isinstance(layer, VectorBatchNorm):
            mixes = layer.training or not layer.track
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
            mixes = layer.training or layer.running_mean is None
        else:
            continue
        if mixes:
            raise ConfigError(
                f"The batch normalisation {path or 'that is the model'!r} cannot be trained under a "
                "differential-privacy claim: it mixes the samples of a batch, so that no sample has a gradient of "
                "its own to clip, and the batch statistics it sends would be releases without noise. Use GroupNorm "
                "(for the built-in models: -o norm=group), or freeze it with model.eval() and running statistics."
            )


def refuse_renormed(architecture: Architecture) -> None:
    """Refuse an embedding that shortens its rows while it reads them: the next sample would meet other parameters."""
    for path, layer in architecture.skeleton.named_modules():
        if getattr(layer, "max_norm", None) is not None:
            raise ConfigError(
                f"The embedding {path or 'that is the model'!r} has max_norm, and so changes its weights with every "
                "sample it reads: what one leaves behind for the next is clipped by nobody. Leave max_norm out, or "
                "take a scheme without noise.",
                code=Code.STATEFUL,
            )


def bounded_layout(architecture: Architecture, *, tensors: int, statistics: bool = False) -> Layout:
    """gradients (1 × parameters) and weight; values and statistics are empty, for nothing would bound them.

    With `statistics` those of batch normalisations are there all the same: nothing is then proven.
    """
    if tensors != 1:
        raise ConfigError(
            f"Clipping bounds one gradient, and this downlink asks for {tensors} (head noise). Drop the head noise "
            "or the differential-privacy claim."
        )
    carried = statistics_in(contribution_layout(architecture, tensors=1)) if statistics else 0
    if not carried:
        refuse_batch_norm(architecture)
    refuse_renormed(architecture)
    sizes = (("gradients", (1, architecture.size)), ("values", (0,)), ("statistics", (carried,)), ("weight", (1,)))
    return Layout(sizes)


SMALLEST_CLIP = 1e-12
"""Below, what single precision loses by underflow would no longer be small beside the bound."""


def check_bound(clip: float) -> None:
    """Refuse a clipping bound that is not a positive number of a size that can be computed with."""
    if not (math.isfinite(clip) and clip > 0):
        raise ConfigError(f"The clipping bound must be a positive number, not {clip}.")
    if not SMALLEST_CLIP <= clip <= LARGEST:
        raise ConfigError(f"The clipping bound must lie between {SMALLEST_CLIP:g} and 2^36, not be {clip:g}.")


def check_clip_decay(decay: float) -> None:
    """Refuse a factor on the clip that is none."""
    if not 0 < decay <= 1:
        raise ConfigError(
            f"{spelled('clip_decay')} is the factor by which the clip shrinks each round: above 0 and at most 1, not "
            f"{decay}; 1 keeps it as it is."
        )


def _refuse_head(broadcast: Broadcast) -> None:
    if broadcast.head is not None:
        raise ConfigError(
            "Head noise makes clients return several gradients, and clipping bounds one. Drop the head noise or the "
            "differential-privacy claim."
        )


class ClippedWork(ManyAtOnce):
    """Work whose contribution is bounded, whatever the data: nobody refuses to send it, unless the model is broken."""

    def run_units(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], units: Units, *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """Every client's contribution, or that the model they were sent is broken."""
        _refuse_head(broadcast)
        try:
            refuse_broken(broadcast, round)
        except NumericError as reason:
            yield from ((position, reason) for unit in units for position in unit)
            return
        yield from self._contributed(workspace, broadcast, clients, units, round)

    @abstractmethod
    def _contributed(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], units: Units, round: int
    ) -> Iterator[tuple[int, Tensor]]:
        """(position, contribution) of every client of these units, in any order."""


@dataclass(frozen=True)
class ClippedSamples(ClippedWork):
    """The mean over one batch of per-sample gradients, each clipped to L2 norm `clip` over all parameters.

        n_k · (1/b)·Σ_{i in batch} g_i·min(1, C/‖g_i‖)

    Parameters the model's author froze count as zero. `vectorise` = False takes the samples one by one, and so does
    None where the network or the loss is the caller's own; else many are taken at once where vmap can. A sample whose
    gradient is not finite counts as zero: a refusal that depends on one record would tell about it. The bound holds
    for the sum as it is rounded, since C is taken a little smaller (`bounds.safe_bound`).

    With a `clip_decay` ρ the clip of round t is C_t = C·ρᵗ, and what is sent is in units of it, times C: its bound, its
    noise and their price are those of C in every round, and the server multiplies the sum by C_t/C, noise and all.

    With `sampling` q, the batch is drawn by the client's own secrets: each record with probability q,
    independently (Poisson), and the sum is divided by its expected size q·n_k. Samples are then taken one by one: how a
    product of matrices rounds depends on how many rows it has, and on a model made for it rounding is all there is, so
    that a record more would move what the others contribute.
    """

    loss: Loss
    batches: Batches
    clip: float
    vectorise: bool | None = None
    sampling: float | None = None
    clip_decay: float = 1.0

    returns = "gradient"
    local_training = (None, None)
    reports = False
    unit = "record"

    def __post_init__(self) -> None:
        check_bound(self.clip)
        check_clip_decay(self.clip_decay)
        refuse_changed(self.loss)
        if not self.loss.separable:
            raise ConfigError(
                f"The loss {self.loss.name} of a batch is not the mean of its samples' losses, and clipping sample by "
                "sample would train on another one: a sample alone has no share of what the batch divides by or "
                "compares. Return one number per sample that depends on this sample alone (as reduction='none' does), "
                f"or clip whole updates, with more than one {spelled('local_steps')}."
            )
        if self.sampling is not None and not 0 < self.sampling <= 1:
            raise ConfigError(f"secret_sampling must lie in (0, 1] (got {self.sampling}).")

    @property
    def largest(self) -> float:
        """C, and C/q where all records may be drawn: how long a contribution can be, over n_k."""
        return self.clip / (self.sampling or 1.0)

    def sensitivity(self, samples: int) -> float:
        """2·C·n_k/b: how far replacing one record can move the contribution of a client with n_k records."""
        if self.sampling is not None:
            return 2.0 * self.clip / self.sampling
        return 2.0 * self.clip * samples / self.batches.batch_size(samples)

    def layout(self, architecture: Architecture, *, tensors: int) -> Layout:
        """gradients and weight; nothing else leaves."""
        if self.sampling is not None and has_random_layers(architecture.skeleton):
            raise ConfigError(
                "Secret sampling does not go with dropout: which numbers a sample is given would depend on which "
                "others were drawn, and one record would change the whole sum. Set dropout to 0, or leave "
                "secret_sampling out."
            )
        return bounded_layout(architecture, tensors=tensors)

    def _contributed(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], units: Units, round: int
    ) -> Iterator[tuple[int, Tensor]]:
        engine = self._engine(workspace)
        prepare(workspace.architecture, engine.module, broadcast)
        for positions in units:
            part = [clients[position] for position in positions]
            yield from zip(positions, self._contributions(workspace, engine, broadcast, part, round), strict=True)

    def _engine(self, workspace: Workspace) -> PerSample:
        key = (PerSample, self.loss)
        engine = workspace.captured.get(key)
        if not isinstance(engine, PerSample):
            engine = workspace.captured[key] = PerSample(workspace.architecture, self.loss)
        return engine

    def units(self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData]) -> Units:
        """Small batches of equal size together: launches, not arithmetic, take their time."""
        kind = broadcast.parameters.device.type
        row = max(1, workspace.architecture.size * broadcast.parameters.element_size())
        # With dropout each client draws from a seed of its own; secret batches differ in size.
        alone = has_random_layers(workspace.module) or self.sampling is not None
        by_size: dict[int, list[int]] = {}
        for position, data in enumerate(clients):
            by_size.setdefault(self.batches.batch_size(len(data)), []).append(position)
        units = []
        for size, positions in by_size.items():
            most = min(_SAMPLES_TOGETHER.get(kind, 1) // size, _RESULT_BYTES.get(kind, row) // row)
            at_once = 1 if alone or not self._may_vectorise(workspace) else max(1, most)
            units += [positions[start : start + at_once] for start in range(0, len(positions), at_once)]
        return units

    def _may_vectorise(self, workspace: Workspace) -> bool:
        # What somebody's own code does to samples that are taken together may hang on all of them (an operation that
        # raises for one raises for all, and who catches that goes another way), and no record may decide about it.
        wanted = self.vectorise is True or (self.vectorise is None and not own_code(workspace.module, self.loss))
        return wanted and workspace.vectorisable and self.sampling is None

    def _contributions(
        self, workspace: Workspace, engine: PerSample, broadcast: Broadcast, part: Sequence[ClientData], round: int
    ) -> list[Tensor]:
        chosen = [self._chosen(workspace, data, round) for data in part]
        if self.sampling is not None and not len(chosen[0]):
            return [weighted(torch.zeros_like(workspace.architecture.trainable, dtype=_dtype(workspace)), len(part[0]))]
        batches, clipped = [_Batch(*one, round) for one in zip(part, chosen, strict=True)], None
        if self._may_vectorise(workspace):
            clipped = self._together(workspace, engine, batches)
        if clipped is None:
            prepare(workspace.architecture, workspace.module, broadcast)
            clipped = joined([self._loop(workspace, batch) for batch in batches])
        expected = len(chosen[0]) if self.sampling is None else self.sampling * len(part[0])
        return [
            weighted(row, len(data), share=1.0 / (expected * self.clip_decay**round), dtype=_dtype(workspace))
            for row, data in zip(clipped.sums, part, strict=True)
        ]

    def _chosen(self, workspace: Workspace, data: ClientData, round: int) -> Tensor:
        if self.sampling is None:
            return self.batches.indices(client=data.client, samples=len(data), step=round)
        drawn = workspace.secrets.stream("records", data.client, round).uniform(len(data))
        return (drawn < self.sampling).nonzero().flatten()

    def _together(self, workspace: Workspace, engine: PerSample, batches: Sequence[_Batch]) -> Sums | None:
        x, y = _taken(batches)
        first, witness = batches[0], batches[0].witness
        try:
            with (
                seeded_dropout(engine.module, self.batches.seed, first.data.client, first.round),
                nothing_kept(workspace.architecture, engine.module, self.loss, x, y, witness=witness),
            ):
                return engine(x, y, clients=len(batches), clip=self._bound(workspace, first))
        except RuntimeError:  # vmap knows no rule for some operation, or memory is short
            workspace.vectorisable = False
            return None

    def _loop(self, workspace: Workspace, batch: _Batch) -> Sums:
        x, y = batch.taken()
        module, architecture = workspace.module, workspace.architecture
        bound, seeded = self._bound(workspace, batch), self._seeded(workspace, batch)
        with nothing_kept(architecture, module, self.loss, x, y, witness=batch.witness):
            return looped(module, trained_names(architecture), self.loss, x, y, bound, seeded=seeded)

    def _seeded(self, workspace: Workspace, batch: _Batch) -> Callable[[int], AbstractContextManager[None]]:
        """By the sample alone: what one draws, or how often, is nothing to the next."""
        module, device = workspace.module, batch.data.x.device
        own = own_code(module, self.loss)  # which may draw from any global generator

        def seeded(number: int) -> AbstractContextManager[None]:
            parts = (self.batches.seed, batch.data.client, batch.round, int(batch.chosen[number]))
            if own:
                return generators_at(mixed_seed(*parts), device)
            return seeded_dropout(module, *parts)

        return seeded

    def _bound(self, workspace: Workspace, batch: _Batch) -> float:
        # Never the number of records that were drawn in secret: a record more would move everybody's weight.
        data = batch.data
        samples = len(data) if self.sampling is not None else self.batches.batch_size(len(data))
        return safe_bound(self.clip * self.clip_decay**batch.round, _dtype(workspace), samples)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Which of a client's samples are of a round."""

    data: ClientData
    chosen: Tensor
    round: int

    def taken(self) -> tuple[Tensor, Tensor]:
        """The samples; anew each time, since a network may change what it is given."""
        return self.data.take(self.chosen, step=self.round)

    @property
    def witness(self) -> int:
        """The sample that is asked about before and after the others: another one every round."""
        return self.round % len(self.chosen)


def _taken(batches: Sequence[_Batch]) -> tuple[Tensor, Tensor]:
    """The samples of several clients, one client's after the other's."""
    pairs = [batch.taken() for batch in batches]
    return pairs[0] if len(pairs) == 1 else (torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))


def looped(
    module: nn.Module,
    trained: list[str],
    loss: Loss,
    x: Tensor,
    y: Tensor,
    clip: float,
    *,
    seeded: Callable[[int], AbstractContextManager[None]] = lambda number: nullcontext(),
) -> Sums:
    """One client's clipped sum, a backward pass per sample: for models vmap cannot run, and to compare with."""
    named = dict(module.named_parameters())
    moving = [named[name] for name in trained]
    total = [parameter.new_zeros(1, parameter.numel(), dtype=torch.float64) for parameter in moving]
    norms, losses = [], []
    for value, grads in one_by_one(module, moving, loss, x, y, seeded=seeded):
        kept, norm = measured({name: Dense(grad.reshape(1, -1)) for name, grad in zip(trained, grads, strict=True)})
        weights = clip_weights(norm, clip, working(grads[0].dtype))[:, None]
        for sum, factor in zip(total, kept.values(), strict=True):
            sum += factor.total(weights)
        norms.append(norm[None])
        losses.append(value.reshape(1, 1))
    sums = dict(zip(trained, total, strict=True))
    return Sums(placed(named, sums, 1), torch.cat(norms, 1), torch.cat(losses, 1))


def _dtype(workspace: Workspace) -> torch.dtype:
    return working(next(workspace.module.parameters()).dtype)


def refuse_broken(broadcast: Broadcast, round: int) -> None:
    """Refuse to compute on a model if it, and not a client's data, holds what is not a number."""
    if not bool(broadcast.parameters.isfinite().all()):
        raise NumericError(f"The model of round {round + 1} holds numbers that are not finite: training has diverged")


@dataclass(frozen=True)
class BoundedUpdate(ClippedWork):
    """Local training whose update, or the part of it that travels under noise, is clipped to L2 norm `clip` (θ).

    With a `clip_decay` ρ, that of round t to θ·ρᵗ; it travels in units of that, as in `ClippedSamples`.
    """

    local: LocalSteps
    clip: float
    clip_decay: float = field(default=1.0, kw_only=True)

    returns = "update"
    unit = "client"

    def __post_init__(self) -> None:
        check_bound(self.clip)
        check_clip_decay(self.clip_decay)
        refuse_changed(self.local.loss)  # what one client leaves in it would reach the next one's update

    @property
    def local_training(self) -> tuple[int | None, int | None]:
        """As given."""
        return self.local.local_training

    @property
    def largest(self) -> float:
        """θ: how long what is clipped of a contribution can be, over n_k."""
        return self.clip

    def sensitivity(self, samples: int) -> float:
        """2·θ·n_k: how far replacing all of a client's records can move what is clipped of its contribution."""
        return 2.0 * self.clip * samples

    def units(self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData]) -> Units:
        """As local training has them; a network of somebody's own computes one client after the other."""
        if is_own(workspace.module):
            return super().units(workspace, broadcast, clients)
        return self.local.units(workspace, broadcast, clients)

    def _contributed(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], units: Units, round: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Many clients' local training, together where the device gains by it."""
        for position, moved in self._trained(workspace, broadcast, clients, units, round=round):
            yield position, self._bounded(workspace, broadcast, clients[position], moved, round=round)

    def _trained(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], units: Units, *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """The clients' updates; in a simulation all of them are given the same network and loss, which keep nothing."""
        module, loss = workspace.module, self.local.loss
        if not is_own(module) or any(norm.training for _, norm in batch_norms(module)):
            for position, moved in self.local.run_units(workspace, broadcast, clients, units, round=round):
                refuse_changed(loss)
                yield position, moved
            return
        for start in range(0, len(units), _UPDATES_HELD):
            part = units[start : start + _UPDATES_HELD]
            first = clients[part[0][0]]
            x, y = first.take(torch.tensor([0, len(first) - 1]))
            prepare(workspace.architecture, module, broadcast)
            with nothing_kept(workspace.architecture, module, loss, x, y):
                updates = list(self.local.run_units(workspace, broadcast, clients, part, round=round))
                prepare(workspace.architecture, module, broadcast)
            yield from updates

    @abstractmethod
    def _bounded(
        self, workspace: Workspace, broadcast: Broadcast, data: ClientData, moved: Tensor | NumericError, *, round: int
    ) -> Tensor:
        """The contribution; a training that ran away has moved nothing, for a refusal would tell about the data."""


@dataclass(frozen=True)
class ClippedUpdate(BoundedUpdate):
    """The whole update is clipped: n_k · u·min(1, θ/‖u‖). An `adaptive` clip follows the updates, in units of θ.

    With `statistics`, where accounting is the paper's, batch normalisations train too: their statistics travel behind
    the update, under the same noise and clipped by nobody, so that nothing is proven of such a run.
    """

    adaptive: AdaptiveClip | None = None
    statistics: bool = field(default=False, kw_only=True)

    reports = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive is not None and self.clip_decay != 1.0:
            raise ConfigError(
                f"A clip follows the updates or a schedule, not both: leave out {spelled('adaptive_clip', True)} or "
                f"{spelled('clip_decay')}."
            )

    @property
    def largest(self) -> float:
        """θ, and what tells whether an update was within the clip."""
        return super().largest * (1.0 if self.adaptive is None else self.adaptive.longer)

    def sensitivity(self, samples: int) -> float:
        """2·θ·n_k, and twice what tells whether an update was within the clip."""
        return super().sensitivity(samples) * (1.0 if self.adaptive is None else self.adaptive.longer)

    def layout(self, architecture: Architecture, *, tensors: int) -> Layout:
        """gradients (here w − w_k) and weight, and with an adaptive clip whether it was enough; nothing else leaves."""
        layout = bounded_layout(architecture, tensors=tensors, statistics=self.statistics and self.adaptive is None)
        if self.adaptive is None:
            return layout
        return Layout((*layout.sections[:-1], ("within", (1,)), layout.sections[-1]))

    def _bounded(
        self, workspace: Workspace, broadcast: Broadcast, data: ClientData, moved: Tensor | NumericError, *, round: int
    ) -> Tensor:
        samples, away = len(data), isinstance(moved, NumericError)
        if isinstance(moved, NumericError):
            update = torch.zeros_like(broadcast.parameters)
        else:
            update = moved[: workspace.architecture.size]
        if self.adaptive is None:
            in_units = update if self.clip_decay == 1.0 else update / self.clip_decay**round
            sent = clipped(in_units, self.clip * samples)
            if carried := statistics_in(workspace.layout):
                told = sent.new_zeros(carried) if isinstance(moved, NumericError) else moved[-1 - carried : -1].to(sent)
                sent = torch.cat([sent, told.clamp(-STATISTICS_CUT * samples, STATISTICS_CUT * samples)])
            return weighted(sent, samples, share=1.0 / samples)
        assert isinstance(broadcast, ClipBroadcast)
        clip = float(broadcast.clip)
        within = not away and float(scaled_norms(update[None])) <= clip * samples
        sent = clipped(update * (self.clip / clip), self.clip * samples)
        mark = sent.new_tensor([self.adaptive.mark * self.clip * samples])
        return weighted(torch.cat([sent, mark if within else -mark]), samples, share=1.0 / samples)


RAN_AWAY = 1e6
"""The training loss that a client reports whose training ran away."""


@dataclass(frozen=True)
class DividedUpdate(BoundedUpdate):
    """n_k·u, not yet clipped: the uplink clips what it does not hide.

    `reports` adds the training loss and BatchNorm statistics, where the uplink hides those too.
    """

    reports: bool = True

    def layout(self, architecture: Architecture, *, tensors: int) -> Layout:
        """gradients (here w − w_k), what is reported beside them, and weight."""
        if self.reports:
            return self.local.layout(architecture, tensors=tensors)
        return bounded_layout(architecture, tensors=tensors)

    def _bounded(
        self, workspace: Workspace, broadcast: Broadcast, data: ClientData, moved: Tensor | NumericError, *, round: int
    ) -> Tensor:
        length = workspace.layout.length - 1
        if isinstance(moved, NumericError):
            update = torch.zeros(length, dtype=broadcast.parameters.dtype, device=broadcast.parameters.device)
            if self.reports:  # it travels hidden, and a loss of zero would look like success
                update[workspace.architecture.size] = RAN_AWAY * len(data)
        else:
            update = moved[:length]
        return weighted(update / len(data), len(data))
