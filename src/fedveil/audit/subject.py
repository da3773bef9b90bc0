"""What is audited: a recorded run, and what only the auditor knows besides: everybody's data and the true model.

A `Subject` is a record with the job that made it; a `Scene` is everything trials are made from: the run, a close-up of
its uploads, and who judges.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.audit.attack import STANDSTILL
from fedveil.audit.attacks.extraction import fitting
from fedveil.audit.attacks.gradients import MOST_SAMPLES, client_gradient
from fedveil.audit.measures import Judge, Likeness, train_judge
from fedveil.audit.metrics import psnr, random_level
from fedveil.audit.record import Record, client_view, server_view
from fedveil.audit.views import ClientView, Message, Opened, ServerHistory, ServerView, View
from fedveil.config import RunConfig
from fedveil.data import Dataset
from fedveil.data.lazy import LazyTensor
from fedveil.downlink import Weights, assemble
from fedveil.downlink.plain import Unveiled
from fedveil.engine import ClientPool
from fedveil.errors import CheckpointError, ConfigError, NumericError, spelled
from fedveil.protocol.codec import encode
from fedveil.protocol.messages import Train
from fedveil.runs.callbacks import Row
from fedveil.runs.folder import Recording, RunFolder
from fedveil.runs.job import Job, job_from_config, secret_epsilon
from fedveil.runs.loop import fresh_state, train_job
from fedveil.runs.recipe import rate_of
from fedveil.schemes.options import CLIENTS_OWN, LocalOptions
from fedveil.work import Batches
from fedveil.work.batches import mixed_seed
from fedveil.work.messages import ClientData

_HALVES = 0x4A1F
_SLOWER = (1.0, 5.0, 25.0, 125.0)
MOST_BYTES = 128 << 20
"""What an audit takes of public samples, of queries and of candidates: so much memory of each, and four times that of
what clients trained on."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A record, the job that made it, and the model it ended in, in evaluation mode."""

    record: Record
    job: Job
    model: nn.Module

    @property
    def config(self) -> RunConfig:
        """The run's settings."""
        return self.job.config

    @cached_property
    def test(self) -> Dataset:
        """Held-out data: what attackers are granted, and what nobody trained on; all of it in memory."""
        test = self.job.test
        if test is None:
            raise ConfigError("An audit needs held-out data: what nobody trained on is what it compares with.")
        return replace(test, x=test.x.whole()) if isinstance(test.x, LazyTensor) else test

    @property
    def pictures(self) -> bool:
        """Whether inputs are pictures (channels, height, width)."""
        return len(self.job.facts.input_shape) == 3 and self.test.x.is_floating_point()

    @property
    def classes(self) -> bool:
        """Whether the model tells classes apart."""
        return self.job.facts.task == "classification"

    @property
    def box(self) -> tuple[float, float] | None:
        """The range of input values, which everybody knows; None for text."""
        x = self.test.x
        return (float(x.min()), float(x.max())) if x.is_floating_point() else None

    @property
    def peak(self) -> float:
        """The width of that range."""
        low, high = self.box or (0.0, 1.0)
        return high - low

    @property
    def most(self) -> int:
        """How many samples fit into MOST_BYTES."""
        sample = self.test.x[0]
        return max(1, MOST_BYTES // (sample.numel() * sample.element_size()))

    def halves(self) -> tuple[Dataset, Dataset]:
        """The held-out data in two: what attackers are granted as public, and what they are asked about."""
        order = torch.randperm(len(self.test), generator=torch.Generator().manual_seed(_HALVES))
        half = len(order) // 2
        return self.test.subset(order[:half][: self.most]), self.test.subset(order[half:][: self.most])

    @cached_property
    def _occurrences(self) -> Counter[bytes]:
        every = (self.own(client)[0] for client in range(len(self.job.pool)))
        return Counter(mark for x in (*every, self.test.x) for mark in _marks(x))

    def alone(self, x: Tensor) -> Tensor:
        """Which of these inputs occur once in all the data, clients' and held-out.

        Of others nobody can say whether they were trained on. What is left of both sides is exchangeable: no more can
        be told of it by how common it is.
        """
        return torch.tensor([self._occurrences[mark] == 1 for mark in _marks(x)], dtype=torch.bool)

    @property
    def held(self) -> bool:
        """Whether the model lives with the clients, and the server has none."""
        return self.job.scheme.holder != "server"

    def own(self, client: int, *, most: int | None = None) -> tuple[Tensor, Tensor]:
        """All samples of a client, or `most` of them."""
        data = self.job.pool.clients[client]
        count = len(data) if most is None else min(most, len(data))
        return data.take(torch.arange(count) * len(data) // max(1, count))

    def samples_of(self, clients: Collection[int]) -> tuple[Tensor, Tensor]:
        """Samples of several clients, one after the other: all, or as many of each as memory allows."""
        parts = [self.own(client, most=max(1, 4 * self.most // len(clients))) for client in clients]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def batch(self, client: int, *, round: int) -> tuple[Tensor, Tensor]:
        """The samples of which a client's gradient in a round (counted from 1) was taken."""
        data = self.job.pool.clients[client]
        seed = self.config.seed
        assert seed is not None
        rows = Batches(self.config.batch_size, seed).indices(client=client, samples=len(data), step=round - 1)
        return data.take(rows, step=round - 1)


def _marks(x: Tensor) -> Iterator[bytes]:
    """Equal inputs have equal marks, and others have others."""
    for row in x.cpu():
        # Adding zero makes the two zeros of floating point one.
        yield hashlib.blake2b((row + 0).contiguous().numpy().tobytes(), digest_size=16).digest()


def from_folder(
    path: str | Path,
    *,
    device: str = "cpu",
    own: Mapping[str, str] | None = None,
    seen: Sequence[str | Path] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Subject:
    """A run's folder, if it was recorded; what has to be computed again is computed on `device`.

    `own` is the caller's own code by setting (scheme, model, dataset), where the run had such; `seen` are records that
    clients kept themselves, which the folder's is held to.
    """
    folder = RunFolder.of_any_engine(path)
    if not folder.config_file.exists():
        raise CheckpointError(f"{path} holds no run (there is no config.toml): give the folder of a recorded run.")
    if not folder.record.exists():
        raise CheckpointError(
            f"The run in {path} was not recorded, so nobody knows what each role saw: run it again with "
            f"{spelled('record', True)} (and another {spelled('out')})."
        )
    config = folder.config(own, say=say)
    if folder.own_data and "dataset" not in (own or {}):
        raise ConfigError(
            f"The data of the run in {path} stayed with its clients, and an audit compares with them: whoever may see "
            f"them gives all of them, by code ({spelled('dataset', 'FILE.py:FUNCTION')})."
        )
    if not folder.model_file.exists():
        raise CheckpointError(
            f"The run in {path} has no model yet: it was stopped. Finish it with `fedveil run --resume --out {path}`."
        )
    from fedveil.runs.model_file import load_model

    named = config.model if own and "model" in own else None
    trained = load_model(folder.model_file, model=named).module
    record = Record(folder.record, model=named)
    for kept in seen:
        say(_confirmed(record, Record(Path(kept), model=named)))
    return Subject(record, job_from_config(config.with_changes(device=device)), trained)


def _confirmed(record: Record, kept: Record) -> str:
    """Refuse a server's record that tells of other messages than a client kept itself; says what they agree on."""
    if len(kept.clients) != 1:
        raise CheckpointError(f"{kept.folder} is no record that a client kept: it tells of clients {kept.clients}.")
    client = kept.clients[0]
    told: dict[tuple[int, int, str, str], set[bytes]] = {}
    for said in client_view(record, client).messages:
        told.setdefault((said.round, said.attempt, said.phase, said.kind), set()).add(said.raw)
    agreed = 0
    for said in client_view(kept, client).messages:
        known = told.get((said.round, said.attempt, said.phase, said.kind))
        if known is not None and said.raw not in known:
            raise CheckpointError(
                f"The server's record and the one in {kept.folder} tell of another {said.phase} to client {client} in "
                f"round {said.round}: one of them was changed, or the client was sent something else."
            )
        agreed += known is not None
    if not agreed:
        raise CheckpointError(f"The record in {kept.folder} has no message in common with the run's.")
    return f"Client {client} kept {agreed} messages, as the server's record has them."


def enacted(
    job: Job,
    folder: Path,
    *,
    rounds: int | None = None,
    victims: Collection[int] | None = None,
    on_round: Callable[[int], None] = lambda done: None,
) -> Subject:
    """A job trained here and now, recorded in `folder` as its settings say; at most the first `rounds` rounds.

    Noise is what the whole run would have had: a run of one round would be calibrated for one round. What clients
    share is kept only for pairs with one of `victims` (None: for all pairs).
    """
    state = fresh_state(job)

    def boundary(row: Row, now: object) -> None:
        on_round(state.round)
        if rounds is not None and state.round >= rounds:
            raise _EnoughError

    try:
        place = folder if victims is None else Recording(folder, victims)
        train_job(replace(job, test=None), state=state, on_round=boundary, record=place)
    except _EnoughError:
        pass
    return Subject(Record(folder, model=job.facts.name), job, model_of(job, state.weights))


def replayed(subject: Subject, folder: Path, *, samples: int, clients: int, rounds: int) -> Subject:
    """The first rounds once more with `samples` samples a client, which are its batch; recorded in `folder`.

    Scheme, noise and first model are the run's; the model all but stands still, so that every round shows the
    same. This is as close as a server can come to a client's data, and what the papers attack. Clients that train
    locally do so once at the run's own rate, which is the size of what they send. About `clients` clients of
    each round are recorded.
    """
    last = min(rounds, subject.config.rounds)
    everybody, asked = subject.config.clients, subject.job.cohort.expected
    count = min(everybody, math.ceil(clients * everybody / asked))
    trains = subject.record.facts.returns == "update"
    changes = {
        "batch_size": 0,
        **({"local_steps": None, "local_epochs": 1} if trains else {"lr": STANDSTILL}),
        "simulate_dropout": 0.0,
        "record": True,
        "record_rounds": f"1-{last}",
        "record_clients": f"0-{count - 1}",
        "policy": None,
    }
    job = job_from_config(subject.config.with_changes(**changes))
    return enacted(cut(job, samples=samples), folder, rounds=last)


def plainly_trained(subject: Subject, folder: Path, *, round: int, slower: float = 1.0) -> Subject:
    """The same training by plain averaging up to `round`, which is recorded: same data, model, loss, steps, seed.

    Its rate is the run's over `slower`: gradients that nobody clips bear smaller steps.
    """
    config = subject.config
    work = subject.job.scheme.work
    steps, epochs = work.local_training
    if work.returns == "update" and steps is None:
        epochs = epochs or 1
    trained = {name: value for name, value in config.scheme_options.items() if name.startswith("client_")}
    rates: dict[str, float] = {}
    if slower != 1:
        own = config.client_lr
        rates = {"lr": rate_of(config, subject.job.loss) / slower} if own is None else {"client_lr": own / slower}
    # Beacons draw others than a seed does, and may draw nobody: then everybody trains.
    drawn = replace(subject.job.cohort, shuffled=False).draw(round - 1)
    plain = config.with_changes(
        **{**dict.fromkeys(config.scheme_options), **trained, "local_steps": steps, "local_epochs": epochs, **rates},
        options=None,
        scheme="fedavg",
        family="auto",
        bn_eps="secret" if secret_epsilon(config, subject.job.scheme) else "public",
        loss=subject.job.loss.name,
        policy=None,
        roster=None,
        identities=None,
        record=True,
        record_rounds=str(round),
        record_clients=str(drawn[0] if drawn else 0),
        sampling_rate=config.sampling_rate if drawn else None,
        simulate_dropout=0.0,
    )
    return enacted(job_from_config(plain), folder, rounds=round)


def cut(job: Job, *, samples: int, draw: int = 0) -> Job:
    """The same job with `samples` samples of every client, drawn once and for all; no two draws share one."""

    def few(data: ClientData) -> ClientData:
        # Parts are often sorted: the first sample of each would be of the same class.
        rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(mixed_seed(_HALVES, data.client)))
        x, y = data.take(rows[draw * samples : (draw + 1) * samples].sort().values)
        return ClientData(data.client, x, y)

    return replace(job, pool=ClientPool(tuple(few(data) for data in job.pool.clients)))


def model_of(job: Job, weights: Weights) -> nn.Module:
    """The true model, in evaluation mode."""
    return assemble(job.architecture, weights).eval()


class _EnoughError(Exception):
    """As many rounds as were asked for."""


_SAME = 1e-5


def plain_gradient(subject: Subject, view: ServerView) -> Tensor:
    """The victim's gradient of the mean loss on its batch, at the server's model: what plain averaging sends."""
    x, y = subject.batch(view.victim, round=view.round)
    module = view.model()
    return client_gradient(module, view.facts.objective(), fitting(module, x), y.cpu()).double()


def unprotected_upload(subject: Subject, view: ServerView) -> ServerView:
    """The view of a server to which the victim sent its gradient as it is, or its update: that of one step from rest.

    Of Adam that is not lr·g, and that no gradient can be read off it is then no merit of the scheme's.
    """
    sent = plain_gradient(subject, view)
    if view.facts.returns != "gradient":
        moved, own = [torch.zeros_like(sent)], {name: getattr(subject.config, name) for name in CLIENTS_OWN}
        optimiser = LocalOptions(**own).optimiser
        optimiser.step(moved, [sent], optimiser.start(moved), view.facts.lr)
        sent = -moved[0]
    opened = Opened(sent, None, torch.empty(0))
    return replace(view, messages=(), recovered=opened, summed=None, colluders=(), uncovered=None)


def unprotected_history(subject: Subject, history: ServerHistory) -> ServerHistory:
    """The same for several rounds."""
    return ServerHistory(tuple(unprotected_upload(subject, view) for view in history.rounds))


def unprotected_model(subject: Subject, view: ClientView) -> ClientView:
    """The view of a client to which the last model was sent as it is."""
    last = max(place for place, message in enumerate(view.messages) if isinstance(message.opened(), Train))
    message = view.messages[last]
    said = message.opened()
    assert isinstance(said, Train)
    weights = server_view(subject.record, view.client, round=message.round, attempt=message.attempt).weights
    assert weights is not None
    sent = replace(said, broadcast=Unveiled(view.facts.architecture(), weights).broadcast())
    raw = encode(sent)
    plain = Message(message.round, message.attempt, message.phase, message.kind, message.client, raw)
    return replace(view, messages=(plain,))


def less_colluders(subject: Subject, view: ServerView, *, cohort: tuple[int, ...]) -> tuple[ServerView, int]:
    """The sum less what colluders put into it, and of how many samples the rest is: of their batches.

    (N·ḡ − Σ_c n_c·g_c)/n: colluders know their own data and the model's gradient on it. What noise they added is
    left in, so this understates colluders under noise.
    """
    assert view.summed is not None
    weights = {client: len(subject.job.pool.clients[client]) for client in cohort}
    left = view.summed.gradient.double() * sum(weights.values())
    for colluder in view.colluders:
        own = server_view(subject.record, colluder, round=view.round, attempt=view.attempt)
        left = left - weights[colluder] * plain_gradient(subject, own)
    honest = [weights[client] for client in cohort if client not in view.colluders]
    samples = sum(view.facts.batch_of(count) for count in honest)
    return replace(view, summed=Opened(left / sum(honest), None, torch.empty(0))), samples


def alike(view: View, twin: View) -> bool:
    """Whether a server's view and its twin hold the same gradient: then the same attack finds the same."""
    if not isinstance(view, ServerView) or not isinstance(twin, ServerView):
        return False
    if view.recovered is None or twin.recovered is None or not view.recovered.gradient.numel():
        return False
    ours, theirs = view.recovered.gradient.double(), twin.recovered.gradient.double()
    return float((ours - theirs).norm()) <= _SAME * float(theirs.norm())


MOST_CLIENTS = 10


@dataclass(frozen=True)
class Effort:
    """How much an audit may take: attempts of a trial, candidates, rounds to average over, pictures of a class.

    `minutes` is what an attack may take on one view.
    """

    quick: bool = False
    seed: int = 0
    device: str = "cpu"
    minutes: float | None = None

    @property
    def seconds(self) -> float:
        """What an attack may take on one view."""
        return 60.0 * ((10.0 if self.quick else 30.0) if self.minutes is None else self.minutes)

    @property
    def attempts(self) -> int:
        """Victims of attacks that search."""
        return 2 if self.quick else 6

    @property
    def easy_attempts(self) -> int:
        """Victims of attacks that only compute."""
        return 4 if self.quick else 10

    @property
    def candidates(self) -> int:
        """Members, and as many others."""
        return 200 if self.quick else 1000

    @property
    def rounds(self) -> int:
        """Rounds whose uploads are averaged."""
        return 8 if self.quick else 32

    @property
    def per_class(self) -> int:
        """Pictures made of each class."""
        return 2 if self.quick else 8


@dataclass(frozen=True, eq=False)
class Scene:
    """The run; the rounds in which its uploads are attacked; and a judge of pictures, trained when first asked for.

    A gradient of more than eight samples is out of reach of reconstruction, and so is one of many local steps. Such
    a run's first rounds are replayed with one sample a client: what a server gets in the worst case. Where pictures
    are not `judged`, reconstructions are compared by their pixels alone.
    """

    run: Subject
    close: Subject
    replayed: bool
    effort: Effort
    judged: bool = True
    scratch: Path | None = None
    say: Callable[[str], None] = lambda text: None
    _plain: dict[int, Subject] = field(default_factory=dict, repr=False)
    _further: list[Subject] = field(default_factory=list, repr=False)

    def judge(self) -> Judge:
        """An independent classifier of everybody's data, held-out ones included."""
        return self._judge

    @cached_property
    def _judge(self) -> Judge:
        x, y = self.run.samples_of(range(len(self.run.job.pool)))
        generator = torch.Generator().manual_seed(self.effort.seed)
        return train_judge(
            torch.cat([x, self.run.test.x]).float(),
            torch.cat([y, self.run.test.y]),
            outputs=self.run.job.facts.outputs,
            generator=generator,
            quick=self.effort.quick,
            device=self.effort.device,
        )

    def further(self) -> Iterator[Subject]:
        """The first round replayed again and again, each time with other samples, as long as every client has some."""
        whole = replace(self.close.job, pool=self.run.job.pool)
        for draw in range(1, min(len(data) for data in whole.pool.clients) if self.replayed else 1):
            if draw > len(self._further):
                folder = Path(tempfile.mkdtemp(prefix="further-", dir=self.scratch))
                again = enacted(cut(whole, samples=1, draw=draw), folder / "record", rounds=1)
                self._further.append(again)
            yield self._further[draw - 1]

    def noiseless(self, round: int | None = None) -> Subject | None:
        """The same training without its noise up to `round` (all of it), made once; None where the run had none.

        Noise is what keeps a model from learning samples by heart, so that the run's own model is no yardstick.
        """
        if self.scratch is None or not self.run.job.scheme.noisy:
            return None
        last = round or self.run.config.rounds
        if last not in self._plain:
            self.say("The run is trained once more without its noise, to compare with.")
            self._plain[last] = self._steady(last)
        return self._plain[last]

    def _steady(self, last: int) -> Subject:
        """That training, at the run's rate or at the first of smaller ones at which its numbers do not run away."""

        def trained(slower: float) -> Subject:
            folder = Path(tempfile.mkdtemp(prefix="plain-", dir=self.scratch))
            return plainly_trained(self.run, folder / "record", round=last, slower=slower)

        *first, slowest = _SLOWER
        for slower in first:
            try:
                return trained(slower)
            except NumericError:
                self.say("Without clipping it runs away at the run's rate: it is begun again at a smaller one.")
        return trained(slowest)

    @property
    def settings(self) -> dict[str, Any]:
        """What every attack is told: public knowledge, and how much it may take."""
        effort = self.effort
        box = self.run.box
        return {
            "quick": effort.quick,
            "seed": effort.seed,
            "device": effort.device,
            "box": None if box is None else list(box),
        }

    @cached_property
    def likeness(self) -> Likeness:
        """How reconstructions of this run are judged."""
        public, _ = self.run.halves()
        mean = public.x.double().mean(0, keepdim=True)
        others = self.run.own(0)[0][: min(200, self.run.most // 4)].double()
        blind = float(psnr(mean.expand_as(others), others, peak=self.run.peak).mean())
        judged = self.judged and self.run.pictures and self.run.classes
        low, high = self.run.box or (0.0, 1.0)
        unit = ((others - low) / (high - low)).float()
        return Likeness(
            peak=self.run.peak,
            chance=blind,
            random=random_level(unit, generator=torch.Generator().manual_seed(0), draws=4),
            blind=mean.cpu(),
            judge=self.judge if judged else None,
            private=self.run.own(0, most=self.run.most)[0] if judged else None,
        )


def scene_of(run: Subject, effort: Effort, scratch: Path, *, say: Callable[[str], None] = lambda text: None) -> Scene:
    """The scene of a run; replays its first rounds where its batches are too large to reconstruct."""
    facts = run.record.facts
    if facts.model is None:
        raise ConfigError(
            "This run's model was built in Python, and an audit has to build it again: name it as "
            "package.module:factory, or FILE.py:factory, in the run."
        )
    if not (run.record.clients if run.held else run.record.find(kind="reply", phase="train")):
        raise ConfigError(
            "No recorded client answered in a recorded round: record more clients "
            f"({spelled('record_clients', '0-9')}) or rounds."
        )
    reason = _out_of_reach(run)
    if not reason or run.held:
        return Scene(run, run, False, effort, scratch=scratch, say=say)
    say(f"{reason}: the first rounds are replayed with one sample a client.")
    folder = Path(tempfile.mkdtemp(prefix="replay-", dir=scratch))
    close = replayed(run, folder / "record", samples=1, clients=MOST_CLIENTS, rounds=effort.rounds)
    return Scene(run, close, True, effort, scratch=scratch, say=say)


def _out_of_reach(run: Subject) -> str:
    """Why the uploads of a run are not attacked as they are; "" where they are."""
    largest = max(len(run.batch(client, round=1)[1]) for client in run.record.clients)
    if largest > MOST_SAMPLES:
        return f"Batches of {largest} samples are out of reconstruction's reach"
    if run.record.facts.returns == "update":
        return "Updates of local training are out of reconstruction's reach"
    if run.config.simulate_dropout and not run.record.facts.readable:
        return "Which uploads a sum holds is not recorded where clients vanish"
    return ""
