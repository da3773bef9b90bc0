"""Before a run: what clients would refuse or could not do, and the learning rate by trial."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedveil.downlink import assemble
from fedveil.errors import Code, ConfigError, FedVeilError, NumericError, ProtocolError, spelled
from fedveil.ledger.correlated import DENSE_UP_TO
from fedveil.processes import available_memory
from fedveil.protocol.directory import graph_seed
from fedveil.protocol.parts import bounded
from fedveil.runs.best import check_guard
from fedveil.runs.callbacks import WARNING
from fedveil.runs.job import EPSILON, Job, agreed
from fedveil.runs.loop import client_role, fresh_state, train_job
from fedveil.runs.monitor import check_target_accuracy, monitor_of
from fedveil.runs.pretrained import loaded_from
from fedveil.schemes import SchemeInfo
from fedveil.uplink.graph import n_out
from fedveil.work.batches import convolves, samples_at_once
from fedveil.work.groups import TOGETHER
from fedveil.work.own_loss import OwnLoss, own_code
from fedveil.work.per_sample import CPU_BYTES

if TYPE_CHECKING:
    from fedveil.protocol.directory import Cohort
    from fedveil.runs.job import Job

_GRAPHS = 16


def preflight(job: Job, *, begins: bool = True) -> list[str]:
    """Refuse settings under which the first round could not be, or some round probably not: nothing is sent.

    Args:
        job: The run.
        begins: Whether it is a new one: what only those are asked is not asked of one that goes on.

    Returns:
        What is to be known before it begins, a line each: that ε is not the layers' own, and warnings of what may end
        the run later.

    Raises:
        ConfigError: The clients' own policy lets no round be, graphs fall apart, the model has no gradient, or nobody
            has said whether others know the weights it begins with.
    """
    if begins:
        _check_start(job)
    _check_promises(job)
    warnings = [_absences(job), "" if job.coverage is None else job.coverage.guessed]
    if job.pool.clients:
        warnings.append(_memory(job, saved=_check_backward(job)))
    noted = [f"note: {EPSILON}"] if begins and job.own_epsilon_lost else []
    if _goes_one_by_one(job):
        noted.append(
            "note: samples are clipped one by one, since the network or the loss is code of your own. That is several "
            f"times as slow as together, which {spelled('vectorise', True)} asks for, where your code does with a "
            "sample among others what it does with it alone."
        )
    return noted + [WARNING + text for text in warnings if text]


def _clips_samples(job: Job) -> bool:
    return job.scheme.work.clip is not None and job.scheme.work.local_training == (None, None)


def _goes_one_by_one(job: Job) -> bool:
    return _clips_samples(job) and job.config.vectorise is None and own_code(job.architecture.skeleton, job.loss)


def _check_start(job: Job) -> None:
    """Loaded weights under a veil: who knows them decides whether it hides anything."""
    loaded = job.config.weights or loaded_from(job.architecture.skeleton)
    if not loaded or job.architecture.table is None or job.config.public_start is not None:
        return
    raise ConfigError(
        f"The model begins with weights from {loaded}, and {job.scheme.name} veils it: from clients who know them, a "
        f"veil hides nothing. Say {spelled('public_start', True)} for published weights (0 of the model then counts as "
        f"hidden), or {spelled('public_start', False)} if nobody but the server has them.",
        code=Code.PUBLIC_START,
    )


def _absences(job: Job) -> str:
    members = job.cohort.size
    if job.scheme.uplink.absences(members) != 0:
        return ""
    said = (
        f"{members} clients of whom only sums are opened tolerate no absence: a round in which one is missing fails, "
        "and ten such in a row end the run."
    )
    enough = next((count for count in range(members, 4 * members) if job.scheme.uplink.absences(count)), None)
    return said if enough is None else f"{said} From {enough} clients on, one may be missing."


def _check_backward(job: Job) -> float:
    """Train on two samples of the first client, for nothing; returns how many bytes a sample takes meanwhile."""
    data = job.pool.clients[0]
    x, y = data.take(torch.arange(min(2, len(data))))
    x, y = torch.cat([x, x])[:2], torch.cat([y, y])[:2]
    module = assemble(job.architecture, job.weights).train()
    moving = [parameter for parameter in module.parameters() if parameter.requires_grad]
    own = {parameter.data_ptr() for parameter in moving}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    try:
        with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = job.loss.mean(module(x), y)
            grads = torch.autograd.grad(loss, moving, allow_unused=True)
    except FedVeilError:
        raise
    except Exception as reason:
        raise ConfigError(
            f"The model cannot be trained: a backward pass over two samples fails with {type(reason).__name__} "
            f"({' '.join(str(reason).split())[:300]}). Mend the model; nothing was sent or written."
        ) from reason
    _check_alone(job, x[:1])
    if moving and all(grad is None for grad in grads):
        raise ConfigError(
            "The model cannot be trained: the loss depends on none of its parameters (detach, no_grad or a rounding "
            "on the way to its output?)."
        )
    return sum(sizes.values()) / 2


def _check_alone(job: Job, x: Tensor) -> None:
    """Where samples are clipped one by one, a network has to take one by itself."""
    if not _clips_samples(job):
        return
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            assemble(job.architecture, job.weights)(x)
    except FedVeilError:
        raise
    except Exception as reason:
        raise ConfigError(
            f"{job.scheme.name} clips sample by sample, and the model fails on a single one with "
            f"{type(reason).__name__} ({' '.join(str(reason).split())[:200]}). A batch normalisation, called as a "
            "function too, mixes samples: use GroupNorm."
        ) from reason


_COPIES = 6  # of the model: the server's, its momentum, what it sends, two skeletons of clients, a checkpoint
_SUM_BYTES = 72  # an exact sum keeps three float64 for a number, as often while it is carried, and a mean of them three
_BEYOND_SAVED = 2  # what a pass takes at most, over what it saves for the way back, as seen
_CHUNK_BYTES, _MOST_AT_ONCE = 64 << 20, 64  # as local work takes samples and clients


def _memory(job: Job, *, saved: float) -> str:
    """A warning where the largest client's step and the round's sums probably need more memory than is free."""
    scheme, weights = job.scheme, job.weights.parameters
    number, size = weights.element_size(), weights.numel()
    most = max(len(data) for data in job.pool.clients)
    batch, upload = min(job.config.batch_size or most, most), scheme.layout(job.architecture).length
    part = samples_at_once(job.architecture.skeleton, job.architecture.input_shape)
    whole = weights.is_cuda or scheme.work.returns != "gradient" or isinstance(job.loss, OwnLoss)
    step, at_once = _BEYOND_SAVED * saved * (batch if whole or part is None else min(batch, 2 * part)), 1
    if scheme.work.clip is not None and scheme.work.local_training == (None, None):
        step = min(step, CPU_BYTES) + size * number  # samples are taken a few at a time, each with its own gradient
    elif (
        scheme.work.returns == "gradient"
        and job.config.vectorise is not False
        and not convolves(job.architecture.skeleton)
    ):
        at_once = max(1, min(_MOST_AT_ONCE, job.cohort.size, _CHUNK_BYTES // (upload * number)))
    if weights.is_cuda and scheme.work.clip is None:
        at_once = min(TOGETHER, job.cohort.size)
    step *= at_once
    # A client's vector is put together, weighted and sent; the server adds limbs, carries them and makes a mean.
    sums = float(upload * (3 * number * at_once + _SUM_BYTES))
    needed, free = _COPIES * size * number + step + sums, free_bytes(weights.device)
    if free is None or needed < free:
        return ""
    cures = {
        f"a smaller {spelled('batch_size')} (a step of {batch} samples takes {step / 1e9:.1f} GB)": step,
        f"fewer {spelled('head_groups')} or a smaller model (an upload of {upload:,} numbers takes {sums / 1e9:.1f} "
        "GB)": sums,
    }
    first = max(cures, key=lambda cure: cures[cure])
    return (
        f"the memory will probably not suffice: about {needed / 1e9:.1f} GB are needed for {size:,} parameters, and "
        f"{free / 1e9:.1f} GB are free. What helps most is {first}."
    )


def free_bytes(device: torch.device) -> int | None:
    """How much memory this process may still take, by the tightest limit that can be read; None where none can."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    machine = available_memory()
    limits = [_whole_memory() if machine is None else machine, _of_group()]
    return min((limit for limit in limits if limit is not None), default=None)


def _whole_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _of_group() -> int | None:
    """What a container's control group leaves."""
    folder = Path("/sys/fs/cgroup")
    try:
        most, used = ((folder / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        return int(most) - int(used)
    except (OSError, ValueError):  # no control group, or no limit
        return None


def _check_promises(job: Job) -> None:
    """What clients would refuse to take part in."""
    scheme, policy = job.scheme, job.guard.policy
    monitor_of(job)
    check_target_accuracy(job)
    check_guard(job)
    client_role(job)
    scheme.uplink.prepare()
    # Where chance decides who is asked, as many as can be: of fewer, a round is skipped.
    uplink, first = scheme.uplink, tuple(range(job.cohort.size)) if job.cohort.rate else job.cohort.draw(0)
    neighbours = uplink.noise_neighbours
    if neighbours is not None and (uplink.plan is None or uplink.plan.circle(len(first)) is None):
        _check_graphs(job.cohort, neighbours, rounds=job.config.rounds)
    try:
        if policy is not None and uplink.introduction != "none":
            policy.check_cohort(first[0], uplink.summed_with(len(first)))
        if scheme.plan is None or len(first) > DENSE_UP_TO or not job.pool.clients:
            return
        samples = [len(job.pool.clients[client]) for client in first]
        reach = [bounded(scheme.work).sensitivity(count) for count in samples]
        noise_layout = scheme.plan.noise_layout(first, samples, reach, seed=_seed(first, 0), round=0)
        if policy is not None and scheme.central is None:
            for client in first:
                policy.charged(noise_layout, client=client, spent=0.0)
    except ProtocolError as reason:
        raise ConfigError(f"The clients' policy lets not even one round be: {reason}.") from reason


def _check_graphs(cohort: Cohort, neighbours: int, *, rounds: int) -> None:
    """Every round draws a graph of its own; one that falls apart would end the run there."""
    for round in range(min(rounds, _GRAPHS)):
        members = cohort.draw(round)
        if len(members) < 2:
            continue
        if not n_out(members, neighbours=min(neighbours, len(members) - 1), seed=_seed(members, round)).connected():
            raise ConfigError(
                f"Graphs of {cohort.size} clients of which each picks {neighbours} fall apart (one of "
                f"{min(rounds, _GRAPHS)} drawn did), so that a group would be covered by its own noise alone. Raise "
                f"{spelled('neighbours')}; 3 are mostly enough, 5 nearly always."
            )


def _seed(members: tuple[int, ...], round: int) -> bytes:
    return graph_seed(beacon=b"rehearsal", round=round, members=members)


# --- the learning rate by trial: the first rounds, again and again, each time with a larger step

RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_ROUNDS = 8
_GROWN = 1.5


def with_found_rate(job: Job, *, own: SchemeInfo | None = None) -> tuple[Job, str]:
    """The job with the learning rate under which its loss falls most in the first rounds, and what was done for it.

    Each trial begins with the job's own weights and asks clients as a run does. Nobody accounts for that: where a
    ledger promises anything, it is refused.

    Raises:
        ConfigError: The scheme accounts for what clients show, or every rate made the loss grow.
    """
    scheme = job.scheme
    if scheme.plan is not None or scheme.uplink.introduction != "none" or not job.pool.clients:
        raise ConfigError(
            f"lr = 'auto' tries rates on the clients' data, and {scheme.name} accounts for every round that clients "
            "are asked for: such trials would not be in its ledger. Find a rate on data that nobody has to protect "
            f"({spelled('scheme', 'fedavg')} {spelled('lr', 'auto')}), and give it as a number."
        )
    losses: dict[float, float] = {}
    for rate in RATES:
        losses[rate] = _loss_after(job, rate, own)
        if math.isinf(losses[rate]):  # larger ones do no better
            break
    best = min(losses, key=lambda rate: losses[rate])
    if math.isinf(losses[best]):
        raise ConfigError(
            f"lr = 'auto': even {best:g} made the loss grow. Look at the data (are inputs standardised?), or give a "
            "smaller rate."
        )
    told = (
        f"lr: {best:g}, found with {len(losses)} rates of {_ROUNDS} rounds each; clients were asked for these "
        f"{len(losses) * _ROUNDS} rounds too"
    )
    return _with_rate(job, best, own), told


def _with_rate(job: Job, rate: float, own: SchemeInfo | None) -> Job:
    config = job.config.with_changes(lr=rate)
    task, outputs = job.facts.task, job.facts.outputs
    common = agreed(config, clients=len(job.pool), task=task, outputs=outputs, own=own, loss=job.loss, shape=job.shape)
    return replace(job, config=config, scheme=common.scheme, optimiser=common.optimiser)


def _loss_after(job: Job, rate: float, own: SchemeInfo | None) -> float:
    """The loss after a few rounds with this rate; infinite where it has grown meanwhile."""
    short = job.config.with_changes(rounds=_ROUNDS, record=False, record_rounds=None, record_clients=None)
    trial = replace(_with_rate(replace(job, config=short), rate, own), test=None)
    try:
        rows = train_job(trial, state=fresh_state(trial)).rows
    except (NumericError, ProtocolError):
        return math.inf
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    grown = not losses or not max(losses) <= _GROWN * losses[0]
    return math.inf if grown else float(losses[-1])
