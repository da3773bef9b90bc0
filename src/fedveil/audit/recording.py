"""Recording a run: listens to what passes, and keeps chosen rounds and clients for an audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from fedveil.audit.facts import Facts
from fedveil.audit.record import RecordWriter
from fedveil.audit.shared import shared_part, unit_of
from fedveil.audit.views import weights_by_name
from fedveil.config import numbers_of
from fedveil.downlink.blueprint import Blueprint, Weights
from fedveil.downlink.messages import Broadcast, Downlink, Mean, Recovered, Veil
from fedveil.errors import ConfigError
from fedveil.ledger.releases import Release
from fedveil.protocol.dividing import Begin, Divide
from fedveil.protocol.heard import Heard
from fedveil.protocol.messages import Train, Upload
from fedveil.protocol.parts import Scheme, Terms
from fedveil.protocol.stored import as_bytes
from fedveil.protocol.wire import encode
from fedveil.secrets import Guarded, SecretStream

FIRST_ROUNDS = 3
FIRST_CLIENTS = 2


@dataclass(frozen=True)
class Choice:
    """Which rounds (counted from 1) and which clients are recorded.

    What two clients share is kept only for pairs that hold one of `victims` (None: every recorded client is one),
    since a hundred clients have thousands of pairs, and each is as large as an upload.
    """

    rounds: frozenset[int]
    clients: frozenset[int]
    victims: frozenset[int] | None = None

    def __post_init__(self) -> None:
        strangers = sorted((self.victims or frozenset()) - self.clients)
        if strangers:
            raise ConfigError(f"Victims are recorded clients, and {strangers[0]} is none: add it to the clients.")

    def shares(self, one: int, other: int) -> bool:
        """Whether what two recorded clients share is kept."""
        return self.victims is None or one in self.victims or other in self.victims

    @staticmethod
    def of(*, rounds: str | None, clients: str | None, last: int, count: int) -> Choice:
        """From what was typed, for a run of `last` rounds and `count` clients; refuses numbers outside it."""
        first = (*range(1, min(FIRST_ROUNDS, last) + 1), last)
        chosen = frozenset(first if rounds is None else numbers_of(rounds, "record_rounds"))
        some = range(min(FIRST_CLIENTS, count)) if clients is None else numbers_of(clients, "record_clients")
        if not all(1 <= one <= last for one in chosen):
            raise ConfigError(f"record_rounds must lie between 1 and {last}, the last round (got {rounds}).")
        if not all(0 <= one < count for one in some):
            raise ConfigError(f"record_clients must lie between 0 and {count - 1} (got {clients}).")
        return Choice(chosen, frozenset(some))


class Recorder(Guarded):
    """Writes down what passes in chosen rounds, and beside it what the server knew.

    `scheme` is what the server has to be given in place of its own: the same, with a downlink that lets
    the recorder see which veil was drawn. It changes no number of the run.
    """

    def __init__(
        self, folder: Path, choice: Choice, *, facts: Facts, scheme: Scheme, blueprint: Blueprint, attempt: int = 0
    ) -> None:
        self._writer = RecordWriter(folder, facts)
        self._choice = choice
        self._readable = facts.readable
        self._uplink = scheme.uplink
        self._terms: Terms = scheme.terms(blueprint)
        self._now = (0, attempt)
        self._drawn: WitnessedVeil | None = None
        self._pairs: set[tuple[int, int]] = set()
        held = scheme.holder == "server"
        self.scheme = replace(scheme, downlink=Witnessed(scheme.downlink, self)) if held else scheme

    def hear(self, heard: Heard) -> None:
        """Keep one message, if its round and client are among the chosen."""
        request = heard.request
        if isinstance(request, (Train, Begin, Divide)) and heard.kind == "request":
            # Later phases count rounds in their own way (two stages a round): they belong to the one begun last.
            self._begin(request.round + 1, request.attempt)
        round, attempt = self._now if hasattr(request, "round") else (0, self._now[1])
        if round and round not in self._choice.rounds:
            return
        if heard.client is not None and heard.client not in self._choice.clients:
            return
        if heard.kind == "request" and not self._choice.clients.intersection(heard.to):
            return
        phase = type(request).__name__.lower()
        self._writer.add(
            encode(heard.message),
            round=round,
            attempt=attempt,
            phase=phase,
            kind=heard.kind,
            client=heard.client,
            to=heard.to,
        )
        if isinstance(request, Train):
            self._beside(heard, request)

    def opened(self, mean: Mean, recovered: Recovered) -> None:
        """Keep what the server makes of a round's sum."""
        if self._now[0] in self._choice.rounds:
            means = {"mean.gradients": mean.gradients, "mean.values": mean.values, "mean.statistics": mean.statistics}
            self._secret("opened", recovered, means)

    def drawn(self, veil: WitnessedVeil) -> None:
        """The veil of the round that is about to begin."""
        self._drawn = veil

    def close(self) -> None:
        """Bring the record to the disk."""
        self._drawn = None
        self._writer.close()

    def _begin(self, round: int, attempt: int) -> None:
        self._now = (round, attempt)
        self._pairs = set()

    def _beside(self, heard: Heard, request: Train) -> None:
        veil = self._drawn
        if veil is None:
            return
        if heard.kind == "request":
            self._write("weights", {}, weights_by_name(veil.weights))
        elif heard.kind == "reply" and isinstance(heard.message, Upload):
            self._recover(heard.message, veil)
            self._share(heard, request, veil)

    def _recover(self, upload: Upload, veil: WitnessedVeil) -> None:
        """What the server's own code makes of this upload alone."""
        layout = self._terms.layout
        if not self._readable or upload.payload.shape != (layout.length,):
            return
        payload = upload.payload if upload.payload.is_floating_point() else upload.payload.double()
        # Whole numbers have one step, the weight's too: over the weight it cancels.
        sums = layout.split(payload.to(veil.weights.parameters.device))
        if float(sums["weight"]) > 0:
            recovered = veil.inner.recover(_mean(sums, weight=sums["weight"]))
            self._secret("recovered", recovered, {}, client=upload.client)

    def _share(self, heard: Heard, request: Train, veil: WitnessedVeil) -> None:
        """What this client shares with other chosen ones, and what becomes of it in the recovered gradient."""
        state = heard.state
        if state is None:
            return
        for peer in sorted(self._choice.clients - {state.client}):
            pair = (min(state.client, peer), max(state.client, peer))
            if pair in self._pairs or not self._choice.shares(*pair):
                continue
            part = shared_part(self._uplink, self._terms, state, peer, round=request.round, attempt=request.attempt)
            if part is None:
                continue
            self._pairs.add(pair)
            tensors = {"upload": part}
            if self._readable:
                unit = unit_of(self._uplink, self._terms, state, round=request.round, attempt=request.attempt)
                sums = self._terms.layout.split((part.double() * unit).to(veil.weights.parameters.device))
                tensors["gradient"] = veil.inner.recover(_mean(sums)).gradient
            self._write("shared", {}, tensors, client=state.client, peer=peer)

    def _secret(
        self, kind: str, recovered: Recovered, more: Mapping[str, Tensor], *, client: int | None = None
    ) -> None:
        tensors = {"gradient": recovered.gradient, "statistics": recovered.statistics, **more}
        self._write(kind, {"loss": recovered.loss}, tensors, client=client)

    def _write(
        self,
        kind: str,
        fields: Mapping[str, float | None],
        tensors: Mapping[str, Tensor],
        *,
        client: int | None = None,
        peer: int | None = None,
    ) -> None:
        round, attempt = self._now
        content = as_bytes(fields, tensors)
        self._writer.add(content, round=round, attempt=attempt, phase="train", kind=kind, client=client, peer=peer)


class Witnessed:
    """A downlink like another one, whose veils are shown to a recorder."""

    def __init__(self, inner: Downlink, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    @property
    def traced(self) -> bool:
        """As the other."""
        return self._inner.traced

    def head_tensors(self, blueprint: Blueprint) -> int:
        """As the other."""
        return self._inner.head_tensors(blueprint)

    def releases(self) -> tuple[Release, ...]:
        """As the other: a record is no release to anybody who takes part."""
        return self._inner.releases()

    def veil(self, blueprint: Blueprint, weights: Weights, *, stream: SecretStream, head_level: float | None) -> Veil:
        """The other's veil."""
        inner = self._inner.veil(blueprint, weights, stream=stream, head_level=head_level)
        veil = WitnessedVeil(inner, weights, self._recorder)
        self._recorder.drawn(veil)
        return veil


class WitnessedVeil(Guarded):
    """A veil that tells a recorder what the server recovers with it."""

    __slots__ = ("_recorder", "inner", "weights")

    def __init__(self, inner: Veil, weights: Weights, recorder: Recorder) -> None:
        self.inner = inner
        self.weights = weights
        self._recorder = recorder

    def broadcast(self) -> Broadcast:
        """What clients receive."""
        return self.inner.broadcast()

    def recover(self, mean: Mean) -> Recovered:
        """As the veil itself does."""
        recovered = self.inner.recover(mean)
        self._recorder.opened(mean, recovered)
        return recovered


def _mean(sums: Mapping[str, Tensor], *, weight: Tensor | float = 1.0) -> Mean:
    return Mean(sums["gradients"] / weight, sums["values"] / weight, sums["statistics"] / weight)
