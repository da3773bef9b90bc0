"""Schemes that cover updates which somebody's own code has trained: uplinks over one kind of local work.

They are no schemes of `fedveil run`, where FedVeil trains: protected Flower apps have them (`flower.Protected`).
An upload is

    weight × (trained − received)      every number of the model; under noise clipped, and every client weighs 1
    weight × figures                   the app's own metrics, where they are averaged under masks
    weight × cut off                   under masks: 1 where numbers before it, of the model or of the figures, are
                                       beyond the range, so that the server knows of a cut, and not whose
    weight                             how many examples it trained on

The model itself travels in the app's own records: the protocol's broadcast is empty. Under `pads` and `paraaegis`
clients hold it, and it does not travel. Under `pads` the server reads the sum of what stands behind the update, the
weight included, and not the sum of updates. Under `paraaegis` an upload is the update alone, every client weighs 1,
and the uplink divides it: what is hidden is not clipped, the rest is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedveil.client_held.ciphers import Ckks, Pads
from fedveil.client_held.divided import Parallel, Voting
from fedveil.downlink.architecture import Architecture
from fedveil.downlink.messages import Broadcast
from fedveil.downlink.plain import Kept, Plain
from fedveil.errors import ConfigError, FedVeilError, NumericError, ProtocolError, spelled, unknown_name
from fedveil.ledger import caveats
from fedveil.protocol.parts import Scheme
from fedveil.schemes.client_held import CipherName
from fedveil.schemes.options import Budget, DpOptions, MaskOptions, PairOptions
from fedveil.schemes.registry import SchemeInfo, Setting
from fedveil.tensors import Layout
from fedveil.uplink.graph import COLLUSION
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.uplink.noised import Noised
from fedveil.uplink.vote import Ratio
from fedveil.work.clipping import check_bound
from fedveil.work.messages import ClientData, Workspace
from fedveil.work.per_sample import clipped

_LOG = logging.getLogger(__name__)

PADS, PARAAEGIS = "pads", "paraaegis"
HELD = (PADS, PARAAEGIS)
"""The schemes in which clients hold the model."""
SLOTS = 16
"""How many figures of an app are averaged under masks."""
FLAGS = 2
"""Whether numbers of the model, or figures, were cut off."""
VALUE_RANGE = 2.0**36
"""Of weight × number: a million examples and a number of 60,000 fit. Of ten clients 22 bits are left for fractions, so
that the mean of clients with a hundred examples each is exact to 10⁻⁹."""
UNWEIGHTED_RANGE = 2.0**16
"""Of a number that no weight multiplies: counters among a model's arrays fit, and CKKS keeps to its smallest ring."""


@dataclass(frozen=True)
class AppUpdate:
    """The app's own training, as local work: `size` numbers moved, `slots` figures, and what they weigh.

    `trained` gives the contribution, from the model where clients hold it (`held`); on the server's side, where nobody
    trains, there is none.
    """

    clip: float | None = None
    size: int = 0
    slots: int = 0
    range: float = VALUE_RANGE
    held: bool = False
    trained: Callable[[Tensor], Tensor] | None = field(default=None, compare=False, repr=False)

    returns = "update"
    unit = "client"
    local_training = (None, None)

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_bound(self.clip)

    @property
    def reports(self) -> bool:
        """Whether figures leave with the update."""
        return self.slots > 0

    @property
    def flags(self) -> int:
        """How many numbers say that others were cut off; what is clipped cannot be beyond a range."""
        return FLAGS if self.clip is None else 0

    @property
    def behind(self) -> int:
        """How many numbers stand behind the update where clients hold the model: figures, flags, and the weight; none
        under noise, where they would need some, too."""
        return self.slots + self.flags + 1 if self.clip is None else 0

    @property
    def divisible(self) -> int:
        """How many numbers an uplink divides into hidden ones and others: where nothing is noised, it has nothing to
        choose."""
        return self.size if self.clip is not None else 0

    @property
    def largest(self) -> float:
        """How long an update can be."""
        return self.clip or 0.0

    def sensitivity(self, samples: int) -> float:
        """2·clip: how far replacing all of a client's data can move its update; every client weighs the same."""
        return 2.0 * self.largest * samples

    def layout(self, architecture: Architecture, *, tensors: int) -> Layout:
        """The moved numbers with the figures behind them, and the weight."""
        behind = self.behind if self.held else self.slots + self.flags
        moved = ("gradients", (1, self.size + behind))
        return Layout((moved, ("values", (0,)), ("statistics", (0,)), ("weight", (1,))))

    def contribution(self, update: Tensor, weight: float, figures: Sequence[float]) -> Tensor:
        """What an upload holds, in float64.

        An update that is not finite has moved nothing, and under masks weighs nothing: a refusal would tell about it.
        """
        if self.clip is not None:
            # Where clients hold the model, the uplink clips what it does not hide.
            moved = self._within(update) if self.held else clipped(update, self.clip)
            return torch.cat([moved, torch.ones(1, dtype=torch.float64)])
        vote = torch.ones(int(self.held), dtype=torch.float64)  # as many as samples: weights are among what is hidden
        if not bool(update.isfinite().all()):
            return torch.cat([torch.zeros(self.size + self.behind, dtype=torch.float64), vote])
        values = torch.zeros(self.slots, dtype=torch.float64)
        values[: len(figures)] = torch.tensor(figures, dtype=torch.float64)
        cut = [not bool(((part * weight).abs() <= self.range).all()) for part in (update, values)]
        if any(cut):
            _LOG.warning(
                "numbers of this upload, times its weight of %g, are no numbers or beyond ± %g (value_range): cut off",
                weight,
                self.range,
            )
        said = torch.tensor([*map(float, cut), 1.0], dtype=torch.float64)
        return torch.cat([torch.cat([update, values.nan_to_num(nan=0.0), said]) * weight, vote])

    def _within(self, update: Tensor) -> Tensor:
        """An update that is finite, within the range of what is hidden: of a cut nobody but this client is told."""
        if not bool(update.isfinite().all()):
            return torch.zeros(self.size, dtype=torch.float64)
        if bool((update.abs() > self.range).any()):
            _LOG.warning("numbers of this update are beyond ± %g (value_range): they are cut off", self.range)
        return update.clamp(-self.range, self.range)

    def run(self, workspace: Workspace, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """The contribution."""
        if self.trained is None:
            raise ProtocolError("an app trains on its own machine alone")
        return self.trained(broadcast.parameters)

    def run_many(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """The same: there is one client in an app's process."""
        for place, data in enumerate(clients):
            try:
                yield place, self.run(workspace, broadcast, data, round=round)
            except FedVeilError as reason:
                yield place, reason  # type: ignore[misc]


@dataclass(frozen=True)
class UpdateBudget(Budget):
    """(ε, δ) for all data of a client, the norm that its update is clipped to, and what noise is multiplied by from
    round to round."""

    clip: float = 1.0
    noise_decay: float = 1.0

    @property
    def options(self) -> DpOptions:
        """The same as other schemes have it."""
        return DpOptions(self.epsilon, self.delta, self.clip, noise_decay=self.noise_decay)


def _secagg(
    setting: Setting, *, masking: MaskOptions, value_range: float = VALUE_RANGE, collusion: float = COLLUSION
) -> Scheme:
    """Masks modulo 2⁶⁴."""
    masks = masking.masks(value_range, collusion=collusion)
    return Scheme(name="secagg", downlink=Plain(), work=AppUpdate(range=value_range), uplink=masks)


def _pads(
    setting: Setting, *, masking: MaskOptions, value_range: float = VALUE_RANGE, collusion: float = COLLUSION
) -> Scheme:
    """Masks modulo 2⁶⁴, and pads on the sum; the model lives with the clients."""
    pads = Pads(masking.masks(value_range, collusion=collusion))
    work = AppUpdate(range=value_range, held=True)
    return Scheme(name="pads", downlink=Kept(), work=work, uplink=Parallel(Ratio(1.0), pads), holder="clients")


def _paraaegis(
    setting: Setting,
    *,
    share: float = 0.1,
    share_decay: float = 1.0,
    vote: Voting = "histogram",
    cipher: CipherName = "pads",
    dp: UpdateBudget,
    masking: MaskOptions,
    value_range: float = UNWEIGHTED_RANGE,
    collusion: float = COLLUSION,
) -> Scheme:
    """A share hidden, the rest clipped and under each client's own noise; the model lives with the clients."""
    if share == 0 or (share, share_decay) == (1.0, 1.0):
        instead = "'dp-fedavg'" if share == 0 else "'pads'"
        raise ConfigError(
            f"{spelled('share', share)} hides {'nothing' if share == 0 else 'everything'}, and leaves nothing to "
            f"divide: for an app that is scheme {instead}."
        )
    ballots = Pads(masking.masks(1.0, collusion=collusion)) if vote == "histogram" else None
    masks = masking.masks(value_range, collusion=collusion)  # refuses nonsense also where it is not used
    plan = NoisePlan(dp.options.target(setting), "local")
    return Scheme(
        name=PARAAEGIS,
        downlink=Kept(),
        work=AppUpdate(dp.clip, range=value_range, held=True),
        uplink=Parallel(
            Ratio(share, share_decay),
            Ckks(value_range) if cipher == "ckks" else Pads(masks),
            plan,
            ballots=ballots,
        ),
        holder="clients",
    )


def _dp_secagg(setting: Setting, *, dp: UpdateBudget, masking: MaskOptions, collusion: float = COLLUSION) -> Scheme:
    """Clipped, with everybody's share of the noise, under masks."""
    plan = masking.plan(setting, dp.options, collusion=collusion)
    masks = masking.masks(noise=plan, collusion=max(collusion, COLLUSION))
    return Scheme(name="dp-secagg", downlink=Plain(), work=AppUpdate(dp.clip), uplink=masks)


def _dp_fedavg(setting: Setting, *, dp: UpdateBudget) -> Scheme:
    """Clipped, under enough noise for each client alone."""
    plan = NoisePlan(dp.options.target(setting), "local")
    return Scheme(name="dp-fedavg", downlink=Plain(), work=AppUpdate(dp.clip), uplink=Noised(plan))


def _nadp(setting: Setting, *, dp: UpdateBudget, pairs: PairOptions) -> Scheme:
    """Clipped, under noise that pairs share and that cancels in the sum."""
    return Scheme(
        name="nadp",
        downlink=Plain(),
        work=AppUpdate(dp.clip),
        uplink=pairs.noised(setting, dp.options),
        honest_arrivals=pairs.honest_arrivals,
    )


def fitted(scheme: Scheme, *, size: int, slots: int, public: bool) -> Scheme:
    """The scheme for a model of `size` numbers and so many figures; `public`: the server knows what the model begins
    with, which clients hold from there on."""
    assert isinstance(scheme.work, AppUpdate)
    work, uplink, said = replace(scheme.work, size=size, slots=slots), scheme.uplink, scheme.caveats
    if isinstance(uplink, Parallel) and isinstance(uplink.cipher, Pads):
        uplink = replace(uplink, cipher=replace(uplink.cipher, bare=work.behind))
    if public:
        assumed = tuple(text for text in said.assumptions if text != caveats.START)
        said = replace(said, assumptions=assumed, unprotected=(*said.unprotected, caveats.PUBLIC_START))
    return replace(scheme, work=work, uplink=uplink, caveats=said)


SCHEMES: dict[str, SchemeInfo] = {
    name: SchemeInfo(name, "", summary, protects, "auto", build)
    for name, summary, protects, build in (
        ("secagg", "updates under masks: the server learns sums", "client data from the server: sums only", _secagg),
        (
            PADS,
            "updates under masks, their sum under pads: the model lives with the clients",
            "client data and the model from the server (computational); from clients: only sums, without a bound",
            _pads,
        ),
        (
            PARAAEGIS,
            "a share of each update, picked by a private vote, is hidden, the rest clipped and noised; the model lives "
            "with the clients",
            "client data and the model from the server: the hidden share computationally, the rest (ε, δ) given what "
            "is hidden; from clients: only sums, without a bound",
            _paraaegis,
        ),
        (
            "dp-secagg",
            "clipped updates with shared integer noise, under masks",
            "all data of a client from everybody, (ε, δ); the server sees sums alone",
            _dp_secagg,
        ),
        (
            "dp-fedavg",
            "clipped updates, noised by each client",
            "all data of a client from everybody, (ε, δ)",
            _dp_fedavg,
        ),
        (
            "nadp",
            "clipped updates under noise that pairs share and that cancels",
            "all data of a client from everybody, (ε, δ)",
            _nadp,
        ),
    )
}
"""The schemes that cover the updates of somebody's own app."""

_FEWEST = {"secagg": 3, PADS: 3, PARAAEGIS: 3, "dp-secagg": 3, "nadp": 2}


def scheme_info(name: str) -> SchemeInfo:
    """A scheme for apps by name."""
    if name not in SCHEMES:
        raise unknown_name("scheme for a Flower app:", name, SCHEMES)
    return SCHEMES[name]


def fewest(name: str) -> int:
    """How many clients the scheme needs in a round."""
    return _FEWEST.get(name, 1)
