"""Measured beside proven: a run's mechanism plays a guessing game with canaries, and the guesses bound ε from below.

A canary is one unit of data that a coin has made one thing or its opposite: a record, or all data of a client. The game
is the run's scheme with its settings (clients, cohorts, rounds, clip, noise, masks), on a model and data that the
adversary has chosen, for a claim holds whatever these are: an embedding of numbers, of which each canary has one of its
own. Its gradient points along that coordinate, to the side that its label says, and is far longer than any clip. What a
canary sends is thus ±C in a direction where nobody else sends anything. The observer sees what the claim says it may:
every upload, or every sum; and what a cipher hides, where a client on the server's side opens it.

Both sides of the coin hold as many records, so that one takes the other's place: this is replace-one, the ledger's
own relation, and canaries that lie opposite are as far apart as it allows, 2·C. (One that is only left out moves C.)
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil import schemes
from fedveil.audit.running import Tick
from fedveil.client_held.client import parallel
from fedveil.client_held.messages import Begin, Divided
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError, StopTraining
from fedveil.ledger.accountant import CLIENTS, SERVER
from fedveil.ledger.gaussian import CONFIDENCE, MOST, Guesses, epsilon_at_least, epsilon_of, mu_at_least, plan_guesses
from fedveil.ledger.statement import Ledger, Line, MeasuredEpsilon
from fedveil.plain import made, read_named
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.messages import Train, Upload
from fedveil.protocol.parts import Scheme, bounded
from fedveil.protocol.phases import Heard
from fedveil.roles.server import ServerState
from fedveil.runs.callbacks import Row
from fedveil.runs.folder import MEASURED, RunFolder, ledger_from, write_atomically
from fedveil.runs.from_python import job_of_objects
from fedveil.runs.job import Job
from fedveil.runs.loop import fresh_state, train_job
from fedveil.runs.privacy_journal import JournalFile, PrivacyJournal
from fedveil.schemes.options import CLIENTS_OWN, DpOptions
from fedveil.version import __version__
from fedveil.work.batches import mixed_seed

RECORDS, CLIENT_CANARIES = 20_000, 1_000
"""How many canaries a game has where nobody says: a client is one, a record is one of many of its client's."""
_PART = 5_000
_PER_CLIENT = 10
_MOST_BYTES = 1 << 30
_LOUD, _UNCLIPPED = 1e5, 1e3
_LARGEST_CLIP = 1e3
_COINS = 0xC0125
_SELDOM = 5.0
_SPARE, _LEAST_WIDTH = 20, 200

Scores = NDArray[np.float64]
Unit = Literal["record", "client"]


class Choices(nn.Module):
    """w_j for a sample that is the number j."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.values = nn.Embedding(count, 1)
        nn.init.zeros_(self.values.weight)

    def forward(self, x: Tensor) -> Tensor:
        """One number per sample."""
        value: Tensor = self.values(x)
        return value.flatten(1)


@dataclass(frozen=True)
class GamePart:
    """A part of a game: every canary's coin and the observer's score, and the line of its ledger that is measured."""

    coins: tuple[float, ...]
    scores: tuple[float, ...]
    line: Line
    rounds: int


class Observer:
    """Scores canaries by what passes: of uploads by each, where they can be read, else by how the model moves.

    An upload's noise may be shared by pairs. The best linear score weighs a round's uploads by their inverse
    covariance, which is taken from the uploads themselves: nothing here rests on what the accountant believes. On the
    last `spare` coordinates nobody sends anything but noise.
    """

    def __init__(self, owner: NDArray[np.int64], *, spare: int, uploads: bool) -> None:
        self._owner, self._uploads, self._spare = owner, uploads, spare
        self._round: dict[int, Scores] = {}
        self._cohort: tuple[int, ...] = ()
        self._before: Scores = np.zeros(len(owner))
        self.scores: Scores = np.zeros(len(owner))

    def hear(self, heard: Heard) -> None:
        """A message on its way."""
        if heard.kind == "request" and isinstance(heard.request, Train | Begin):
            self._cohort = heard.to
        if heard.kind == "reply" and isinstance(heard.message, Upload):
            payload = heard.message.payload
            # n_k·g and n_k in units of the same step: the weight is public, and bare.
            self.read(heard.message.client, payload[:-1].double() / payload[-1].double())
        if heard.kind == "reply" and isinstance(heard.message, Divided) and len(heard.message.rest):
            self.read(heard.message.client, heard.message.rest)

    def read(self, client: int, upload: Tensor) -> None:
        """What a client sends, as one sees it who can read it."""
        if self._uploads:
            self._round[client] = upload.double().cpu().numpy()[: len(self._owner) + self._spare]

    def moved(self, state: ServerState) -> None:
        """The end of a round."""
        now = state.weights.parameters[: len(self._owner)].double().cpu().numpy().copy()
        if self._uploads:
            self._weigh()
        else:
            self.scores += np.where(np.isin(self._owner, self._cohort), now - self._before, 0.0)
        self._before = now

    def _weigh(self) -> None:
        present, self._round = self._round, {}
        if not present:
            return
        members = np.asarray(sorted(present))
        seen = np.stack([present[client] for client in members])
        own, noise = np.split(seen, [len(self._owner)], axis=1)
        covariance = np.atleast_2d(np.cov(noise if self._spare and noise.any() else seen))
        weighed = np.linalg.pinv(covariance, hermitian=True) @ own
        place = np.searchsorted(members, self._owner).clip(max=len(members) - 1)
        # A gradient points away from its label.
        score = -weighed[place, np.arange(len(self._owner))]
        self.scores += np.where(members[place] == self._owner, score, 0.0)


@dataclass(frozen=True)
class Game:
    """What is played: the run's scheme and settings, with canaries of the unit that its claim protects."""

    config: RunConfig
    canaries: int
    seed: int = 0
    rounds: int | None = None
    """How many of the planned rounds are played (None: all), with the noise that is planned for all of them."""

    def __post_init__(self) -> None:
        if not _PER_CLIENT * (1 if self.of_clients else self.config.clients) <= self.canaries <= MOST:
            least = _PER_CLIENT if self.of_clients else _PER_CLIENT * self.config.clients
            raise ConfigError(f"canaries must lie between {least:,} and {MOST:,} here (got {self.canaries:,}).")
        if 8 * self.config.clients * _width(max(self.parts), self.config.clients) > _MOST_BYTES:
            raise ConfigError(
                f"The uploads of {self.config.clients:,} clients to a game with {self.canaries:,} canaries do not fit "
                "into memory: play with fewer clients of the same scheme and target, whose claim is the same."
            )

    @property
    def of_clients(self) -> bool:
        """Whether a canary is all data of a client, and not a record."""
        return self.unit == "client"

    @cached_property
    def unit(self) -> Unit:
        """What a canary is: a record, or a client."""
        return _unit(self.config)

    @property
    def played(self) -> int:
        """How many rounds a part has."""
        return self.config.rounds if self.rounds is None else min(self.rounds, self.config.rounds)

    @property
    def _largest_part(self) -> int:
        return self.config.clients if self.of_clients else max(_PART, _PER_CLIENT * self.config.clients)

    @property
    def parts(self) -> list[int]:
        """How many canaries each part has: a part is a run, and parts are independent."""
        if self.of_clients:
            return [self.config.clients] * math.ceil(self.canaries / self.config.clients)
        count = math.ceil(self.canaries / self._largest_part)
        return [self.canaries * (part + 1) // count - self.canaries * part // count for part in range(count)]

    def coins(self, part: int) -> Scores:
        """Which side each canary of a part is on."""
        drawn = np.random.default_rng([_COINS, mixed_seed(self.seed, part)])
        return drawn.choice((-1.0, 1.0), size=self.parts[part])

    def play(self, part: int, on_round: Callable[[int], None] = lambda done: None) -> GamePart:
        """One run of the scheme with the canaries of a part.

        Raises:
            ConfigError: The scheme's claim is of a kind that no such game measures.
        """
        count, seed = self.parts[part], mixed_seed(self.seed, part)
        coins = self.coins(part)
        owner = np.arange(count) * self.config.clients // count
        job = _job(self.config, coins, owner, seed=seed)
        held = job.scheme.holder == "clients"
        # A trusted server is no adversary of its noise: others see the models.
        uploads = parallel(job.scheme).noises_all if held else job.scheme.readable and job.scheme.central is None
        observer = Observer(owner, spare=_width(count, self.config.clients) - count, uploads=uploads)
        if held and uploads:
            job = replace(job, scheme=_watched(job.scheme, observer.read))

        def boundary(row: Row, state: ServerState) -> None:
            observer.moved(state)
            on_round(state.round)
            if state.round == self.played < self.config.rounds:
                raise StopTraining("the run that is audited was charged no further round")

        outcome = train_job(job, state=fresh_state(job), on_round=boundary, listen=observer.hear)
        ledger = outcome.privacy_journal.ledger(rounds=outcome.state.round)
        return GamePart(tuple(coins.tolist()), tuple(observer.scores.tolist()), claimed(ledger), ledger.rounds)

    def measured(self, parts: Sequence[GamePart]) -> MeasuredEpsilon:
        """What the guesses at all coins say."""
        coins, scores = (np.concatenate([getattr(part, name) for part in parts]) for name in ("coins", "scores"))
        # Where cohorts are drawn, parts differ in what they cost: a bound over all holds of the costliest.
        line, delta = max((part.line for part in parts), key=lambda line: line.epsilon or 0.0), _delta(self.config)
        gaussian = line.epsilon is not None and not self.config.secret_sampling
        plan = plan_guesses(len(coins), mu=line.mu or math.inf, delta=delta, gaussian=gaussian)
        farthest = np.argsort(-np.abs(scores), kind="stable")[: plan.guesses]
        game = Guesses(len(coins), plan.guesses, int((scores[farthest] * coins[farthest] > 0).sum()))
        any_noise = epsilon_at_least(game, delta=delta)
        return MeasuredEpsilon(
            adversary=line.adversary,
            unit=self.unit,
            epsilon=epsilon_of(mu_at_least(game), delta) if gaussian else any_noise,
            any_noise=any_noise,
            delta=delta,
            confidence=CONFIDENCE,
            canaries=game.canaries,
            guessed=game.guessed,
            correct=game.correct,
            proven=line.epsilon,
            expected=plan.expected if gaussian else None,
            rounds=parts[0].rounds,
            seed=self.seed,
        )


def claimed(ledger: Ledger) -> Line:
    """The line that a game is played against: proven, and against the server if there is such a one.

    Raises:
        ConfigError: What the ledger has is no proven figure, but not nothing either.
    """
    figures = [line for line in ledger.lines if line.epsilon is not None]
    proven = [line for line in figures if line.verdict == "differential privacy"]
    if figures and not proven:
        line = figures[0]
        raise ConfigError(
            f"Against {line.adversary} the ledger of {ledger.scheme} has a figure that is {_KINDS[line.verdict]}, and "
            "no game with canaries measures such a one: it can be played where (ε, δ) holds without a condition, as "
            "under nadp, veil-dp, ldp, cdp, dp-fedavg, varying-dp and serial."
        )
    unread = ledger.line(SERVER).verdict == "ciphertexts only"
    return proven[0] if proven else ledger.line(CLIENTS if unread else SERVER)


_KINDS = {"conditional": "given what is hidden", "estimate": "an estimate"}


def _unit(config: RunConfig) -> Unit:
    """What a canary is: what the claim protects; without one, what a client sends in a round."""
    work = _smallest(config).scheme.work
    clients = work.returns == "update" if work.clip is None else bounded(work).unit == "client"
    return "client" if clients else "record"


def _watched(scheme: Scheme, read: Callable[[int, Tensor], None]) -> Scheme:
    """The scheme with a cipher of the same kind, and somebody who reads what it is given to hide."""
    uplink = parallel(scheme)
    if uplink.cipher is None:
        return scheme
    kind: Any = type(uplink.cipher)

    class Watched(kind):  # type: ignore[misc]
        def hide(self, state: ClientState, values: Tensor, *which: Any, **rest: Any) -> Any:
            read(state.client, values)
            return super().hide(state, values, *which, **rest)

    cipher = Watched(**{field.name: getattr(uplink.cipher, field.name) for field in fields(kind)})
    return replace(scheme, uplink=replace(uplink, cipher=cipher))


def _width(canaries: int, clients: int) -> int:
    """How many coordinates a game has: as many as canaries, and enough to tell how clients' noise hangs together."""
    return max(canaries, _SPARE * clients, _LEAST_WIDTH)


def _delta(config: RunConfig) -> float:
    return DpOptions().delta if config.delta is None else config.delta


def _job(config: RunConfig, coins: Scores, owner: NDArray[np.int64], *, seed: int) -> Job:
    """The run's scheme on the observer's model and data."""
    info = schemes.find(config.scheme)
    kept = {name: value for name, value in config.scheme_options.items() if name in info.declared}
    clip = (config.clip or DpOptions().clip) if "clip" in info.declared else None
    if clip is not None and clip > _LARGEST_CLIP:
        raise ConfigError(
            f"clip = {clip:g} is longer than what canaries can be told to send: a game needs {_LARGEST_CLIP:g} at most."
        )
    loud = _UNCLIPPED if clip is None else _LOUD
    # One local step is to be far longer than the clip, and many are not to overshoot.
    rate = min(0.1, 0.01 * (clip or 0.1))
    samples = [
        (torch.from_numpy(np.flatnonzero(owner == client))[:, None], torch.from_numpy(loud * coins[owner == client]))
        for client in range(config.clients)
    ]
    settings: dict[str, Any] = {
        **kept,
        **dict.fromkeys(CLIENTS_OWN),
        **({"head_noise": False} if "head_noise" in info.declared else {}),
        "options": config.options,
        "cohort": config.cohort,
        "sampling_rate": config.sampling_rate,
        "rounds": config.rounds,
        "max_size_ratio": config.max_size_ratio,
        "min_coverage": 0.0,
        "lr": rate,
        "loss": "square",
        "dtype": "float64",
        "seed": seed,
    }
    job, _ = job_of_objects(
        Choices(_width(len(coins), config.clients)),
        samples,
        scheme=config.scheme,
        test=None,
        validation=None,
        metrics={},
        preparation=None,
        settings=settings,
        quiet=True,
    )
    return job


def audit_one_run(
    run: str | Path,
    *,
    canaries: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    own: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
    tick: Callable[[Tick], None] = lambda now: None,
) -> MeasuredEpsilon:
    """Play a run's mechanism once more with canaries, and bound the ε that it has from below.

    As many rounds are played as the run was charged for; of one that has not begun, all that are planned. Writes
    RUN/audit/one-run.json, which the run's ledger and report then show. A game that was stopped goes on with the part
    it was in.

    Args:
        run: The folder of a run; it need not be recorded, nor have ended.
        canaries: How many coins are thrown (default: 20,000 records, or 1,000 clients).
        seed: What coins and the game's secrets are drawn from.
        out: Another folder than RUN/audit.
        own: The caller's own code by setting (scheme, model, dataset), where the run had such.
        say: Gets remarks, a line each.
        tick: Gets the progress.

    Returns:
        The bound that was measured, beside the one that is proven.

    Raises:
        CheckpointError: The folder holds no run, or its journal tells of a run with other settings.
        ConfigError: The run's claim is of a kind that no such game measures.
    """
    folder = RunFolder(run)
    if not folder.config_file.exists():
        raise CheckpointError(f"{run} holds no run (there is no config.toml): give the folder of a run.")
    config, rounds = _charged(folder, folder.config(own, say=say))
    usual = CLIENT_CANARIES if _unit(config) == "client" else RECORDS
    game = Game(config, usual if canaries is None else canaries, seed, rounds)
    place = Path(run) / "audit" if out is None else Path(out)
    parts = _Parts(place / "one-run.parts.json", game)
    if parts.made:
        say(f"{len(parts.made)} of {len(game.parts)} parts of the game are in {parts.path} already.")
        parts.check(game)
    total = game.played * len(game.parts)
    while len(parts.made) < len(game.parts):
        before = game.played * len(parts.made)

        def on_round(done: int, before: int = before) -> None:
            tick(Tick(before + done, total, {}))

        parts.keep(game.play(len(parts.made), on_round))
    measured = game.measured(parts.made)
    if folder.ledger_file.exists():
        measured = measured.beside(ledger_from(read_named(folder.ledger_file), where=str(folder.ledger_file)))
    place.mkdir(parents=True, exist_ok=True)
    write_atomically(place / MEASURED[-1], json.dumps(asdict(measured), indent=1, ensure_ascii=False) + "\n")
    parts.path.unlink(missing_ok=True)
    return measured


def _charged(folder: RunFolder, config: RunConfig) -> tuple[RunConfig, int | None]:
    """The settings that a run's newest rounds were charged with, and how many there are (None: it has not begun).

    Raises:
        CheckpointError: The journal is damaged, or tells of noise that these settings do not plan.
    """
    if not folder.privacy_journal.exists():
        return config, folder.reached() or None
    job = _smallest(config)
    if job.scheme.plan is None:
        raise _other(folder, f"{config.scheme} has no noise to be charged for")
    PrivacyJournal(job, folder.privacy_journal).check_mark(folder.journal_mark)  # refuses what is damaged
    noise: dict[str, Any] = {}
    rounds: set[tuple[int, ...]] = set()
    for entry in JournalFile(folder.privacy_journal).entries():
        if "plan" in entry:
            plan = {**entry["plan"], **entry["plan"]["target"], "target": None, "clients": len(entry["reach"])}
            # A run may go on with another target: what came before has other noise.
            noise, rounds = plan, rounds if plan == noise else set()
        elif "begin" in entry:
            rounds.add(tuple(entry["begin"]))
        elif "void" in entry:
            rounds.discard(tuple(entry["end"]))
    if not noise:
        return config, None
    # More rounds may have been asked for since, and none of them begun.
    config = config.with_changes(rounds=noise["rounds"])
    plan = {"clients": config.clients, **asdict(_smallest(config).scheme.plan or job.scheme.plan)}
    plan |= {**plan["target"], "target": None, "each": list(plan["target"]["each"])}  # as JSON has it
    # Journals from before lack some names.
    if differ := [
        f"{name} is {plan.get(name)}, and was {said}" for name, said in noise.items() if plan.get(name) != said
    ]:
        raise _other(folder, "; ".join(differ))
    return config, len(rounds) or None


def _smallest(config: RunConfig) -> Job:
    """The game's job with a canary for each client."""
    return _job(config, np.ones(config.clients), np.arange(config.clients), seed=0)


def _other(folder: RunFolder, how: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.config_file} has other settings than the run's rounds were charged with ({how}): a game by these "
        "says nothing about the run. Put the file back."
    )


@dataclass(frozen=True)
class _Stored:
    identity: dict[str, Any]
    parts: tuple[GamePart, ...]


class _Parts:
    """Parts of a game on disk, written at most every few seconds."""

    def __init__(self, path: Path, game: Game) -> None:
        self.path = path
        self.made: list[GamePart] = []
        self._written = time.monotonic()
        played = {"canaries": game.canaries, "played": game.played}
        settings = json.loads(json.dumps({**vars(game.config), **played}, default=str))
        self._identity = {"fedveil": __version__, "seed": game.seed, "settings": settings}
        if path.exists():
            stored = made(_Stored, read_named(path), where=str(path))
            if stored.identity == self._identity:
                self.made = list(stored.parts)

    def check(self, game: Game) -> None:
        """Refuse parts that the game did not have: coins that it does not throw, or what another game gives.

        One of them, drawn afresh, is played again: a part follows from the seed. Whoever may write the file may still
        be lucky, or write the figure itself.

        Raises:
            CheckpointError: A part is not the game's.
        """
        drawn = secrets.randbelow(len(self.made))
        again = game.play(drawn) if len(self.made) <= len(game.parts) else None
        for number, part in enumerate(self.made):
            fits = again is not None and part.rounds == game.played and len(part.scores) == game.parts[number]
            fits = fits and np.array_equal(part.coins, game.coins(number)) and bool(np.isfinite(part.scores).all())
            # Where cohorts are drawn, parts differ in what they cost.
            everybody = game.config.cohort is None and game.config.sampling_rate is None
            if again is not None and (number == drawn or everybody):
                fits = fits and part.line == again.line
            if again is not None and number == drawn:
                # Of other processors, or versions of PyTorch, the last digits differ.
                fits = fits and np.allclose(part.scores, again.scores, rtol=1e-6)
            if not fits:
                raise CheckpointError(
                    f"Part {number + 1} in {self.path} is not what this game gives: remove the file, and begin anew."
                )

    def keep(self, part: GamePart) -> None:
        """Add one."""
        self.made.append(part)
        if time.monotonic() - self._written < _SELDOM:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(asdict(_Stored(self._identity, tuple(self.made)))))
        self._written = time.monotonic()
