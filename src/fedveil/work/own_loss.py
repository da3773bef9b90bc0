"""Code of the caller's own, tried out before training: losses, and whether anything is kept between samples."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.downlink import assemble
from fedveil.downlink.architecture import Architecture, Weights, batch_norms, load_epsilon, load_parameters
from fedveil.downlink.decomposed import has_multipliers
from fedveil.errors import Code, ConfigError, TraceError
from fedveil.tensors import flatten
from fedveil.work.batches import hooked, seeded
from fedveil.work.losses import Loss
from fedveil.work.per_sample import unrecorded

Objective = Callable[[Tensor, Tensor], Tensor]
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-7}
_MANY = 512
"""Samples of the batch on which a loss is tried that may treat large ones differently: the hardest few hundred, say."""


@dataclass(frozen=True, eq=False)
class OwnLoss:
    """A function of a batch's outputs and targets that gives their mean loss, or each sample's.

    Whether it is `separable`, and whether it gives the same for the same samples whatever it has seen in between
    (`repeatable`), is found out by trying (`tried`).
    """

    name: str
    compute: Objective
    separable: bool = False
    capturable: bool = False
    repeatable: bool = True
    tried_on: tuple[Tensor, Tensor] | None = None
    answered: tuple[Tensor, Tensor] | None = None
    unused: Objective | None = None
    """A copy that is asked about nothing, where there can be one."""

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """What the function gives, averaged."""
        return self.compute(output, target).mean()


@dataclass(frozen=True, eq=False)
class _ByParts:
    """A module of PyTorch's that leaves its loss unreduced: of a sample, parts are averaged, or added up."""

    module: nn.Module
    added: bool

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        value: Tensor = self.module(output, target)
        if value.dim() < 2:
            return value
        return value.flatten(1).sum(1) if self.added else value.flatten(1).mean(1)


def own_loss(given: Callable[..., Any], *, dtype: torch.dtype, device: torch.device) -> OwnLoss:
    """A module or function as a loss; a module is copied, and its tensors are put where the model's are.

    A module that can leave its loss unreduced does: a mean over samples is then what it is for every batch, whatever
    else the module would have divided by (PyTorch divides a batch's weighted loss by the sum of its weights).
    """
    if not isinstance(given, nn.Module):
        said = getattr(given, "__name__", type(given).__name__)
        return OwnLoss("own function" if said == "<lambda>" else str(said), given, unused=_copied(given))
    name = type(given).__name__
    if any(parameter.requires_grad for parameter in given.parameters()):
        raise ConfigError(
            f"The loss {name} has parameters of its own to train, and what travels is the model's: make them part of "
            "the model, or freeze them (requires_grad_(False))."
        )
    try:
        module = copy.deepcopy(given).to(device, dtype)
    except (RuntimeError, TypeError) as reason:
        raise ConfigError(f"The loss {name} cannot be copied: {reason}") from reason
    known = type(given).__module__ == "torch.nn.modules.loss"
    how = getattr(given, "reduction", None)
    if how == "sum":
        raise ConfigError(
            f"The loss {name} adds up a batch (reduction='sum'), and clients' losses are averaged over samples: use "
            "reduction='mean', and multiply the learning rate."
        )
    if how not in ("mean", "none", "batchmean"):
        return OwnLoss(name, module, capturable=known, unused=_copied(module))
    vars(module)["reduction"] = "none"
    compute = _ByParts(module, added=how == "batchmean")
    return OwnLoss(name, compute, capturable=known, unused=_copied(compute))


def _copied(compute: Objective) -> Objective | None:
    try:
        return copy.deepcopy(compute)
    except Exception:  # whatever somebody's object says to that
        return None


def tried(loss: OwnLoss, output: Tensor, target: Tensor) -> OwnLoss:
    """The loss after it was tried on some outputs and targets, knowing whether it is a mean of its samples' losses.

    Raises:
        ConfigError: It fails, gives something else than one number or one per sample, or has no gradient.
    """
    output = output.detach().clone().requires_grad_()
    whole = _value(loss, output, target)
    if not whole.requires_grad:
        raise ConfigError(
            f"The loss {loss.name} has no gradient in the model's outputs: compute it with operations of PyTorch on "
            "the tensors it is given."
        )
    examples = output.detach(), target
    return replace(
        loss,
        separable=_separable(loss, *examples) and _separable_in_many(loss, *examples),
        repeatable=_repeats(loss, *examples),
        tried_on=examples,
        answered=answer(loss, *examples),
    )


def _separable(loss: OwnLoss, output: Tensor, target: Tensor) -> bool:
    """Whether a batch's loss is the mean of its samples'."""
    whole = _value(loss, output, target).detach()
    apart = torch.stack([_value(loss, output[k : k + 1], target[k : k + 1]).mean() for k in range(len(target))])
    apart = apart.detach()
    allowed = _TOLERANCE.get(output.dtype, 1e-3) * (1.0 + apart.abs())
    difference = (apart - whole if whole.dim() else whole - apart.mean()).abs()
    return bool((difference <= allowed).all())


def _separable_in_many(loss: OwnLoss, output: Tensor, target: Tensor) -> bool:
    try:
        return _separable(loss, *_many(output, target))
    except ConfigError:  # it takes the small batch alone
        return False


def _many(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A large batch of the same outputs and, where they are classes, of all there are; else of the same targets."""
    generator = torch.Generator().manual_seed(0)
    rows, others = (torch.randint(len(target), (_MANY,), generator=generator) for _ in range(2))
    if target.is_floating_point() or output.dim() != 2:
        return output[rows.to(output.device)], target[others.to(target.device)]
    classes = torch.randint(output.shape[1], (_MANY,), generator=generator).to(target)
    return output[rows.to(output.device)], classes.reshape(_MANY, *target.shape[1:])


def _repeats(loss: OwnLoss, output: Tensor, target: Tensor) -> bool:
    """Whether single samples and the batch get what they got before the loss saw them in other sizes and orders."""
    alone = [slice(number, number + 1) for number in range(len(target))]
    before = [answer(loss, output[which], target[which]) for which in (*alone, slice(None))]
    for scale in (-1.0, 10.0, 1000.0, 0.0):
        with suppress(Exception):  # a loss may take probabilities only
            answer(loss, scale * output, target)
            answer(loss, scale * output[:1], target[:1])
    answer(loss, output.flip(0), target.flip(0))
    after = [answer(loss, output[which], target[which]) for which in (slice(None), *reversed(alone))]
    return all(same(first, again) for first, again in zip(before, reversed(after), strict=True))


def answer(loss: Loss, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss and its gradient in the outputs, with global generators where they always are when it is asked."""
    leaf = output.detach().clone().requires_grad_()
    with generators_at(0, output.device), torch.enable_grad():
        value = loss.mean(leaf, target)
        grad = torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)[0]
    return value.detach(), grad


@contextmanager
def generators_at(seed: int, device: torch.device) -> Iterator[None]:
    """The global generators of torch, numpy and Python with a seed inside, and afterwards as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with seeded(device, seed):
        random.seed(seed)
        np.random.seed(seed % _NUMPYS_SEEDS)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


_NUMPYS_SEEDS = 1 << 32
_GPU_ROUNDING = 1e-5  # a GPU may add in another order each time


def same(first: tuple[Tensor, ...], again: tuple[Tensor, ...]) -> bool:
    """Equal to the last bit, on a GPU to five digits; what is not a number equals itself."""
    return len(first) == len(again) and all(
        a.shape == b.shape and _same(a, b) for a, b in zip(first, again, strict=True)
    )


def close(a: Tensor, b: Tensor, rounding: float) -> bool:
    """Equal but for such a share of a number, or of the largest; what is not a number equals itself."""
    largest = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=rounding, atol=rounding * largest, equal_nan=True)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.is_cuda:
        return close(a, b, _GPU_ROUNDING)
    return torch.equal(a.nan_to_num(nan=torch.pi), b.nan_to_num(nan=torch.pi))


def _value(loss: OwnLoss, output: Tensor, target: Tensor) -> Tensor:
    try:
        with generators_at(0, output.device), torch.enable_grad():
            value = loss.compute(output, target)
    except Exception as reason:
        named = "" if target.is_floating_point() else " For classes there are loss='square' and loss='cross-entropy'."
        raise ConfigError(
            f"The loss {loss.name} does not take outputs of shape {tuple(output.shape)} and targets of shape "
            f"{tuple(target.shape)} and type {str(target.dtype).removeprefix('torch.')}: "
            f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}.{named}"
        ) from reason
    if not isinstance(value, Tensor) or not value.is_floating_point() or tuple(value.shape) not in ((), (len(target),)):
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"The loss {loss.name} gives {given} for {len(target)} samples: it must give one number, their mean, or "
            "one number per sample."
        )
    return value


# --- code of the caller's own under a claim about single records: asked the same twice, it must answer the same
#
# Clipping bounds what one sample moves because a sample's gradient is a function of that sample. A network or a loss
# that keeps something from one sample for the next (a running mean, a bank of features, a counter) breaks that without
# any gradient being too long: replacing one record then moves those of all that come after it. So one sample of a batch
# is computed before the others and again after them, and by copies that have seen nothing yet, a loss is asked about
# the samples it was tried on as well, and a difference refuses the run. What is kept outside of the objects themselves,
# or changes nothing for the samples that were asked about, is not noticed: the ledger says what is taken for granted.
#
# Such code may raise, too, and for one sample alone. Where samples are taken together an operation then raises for all
# of them, and who catches that takes another branch for everybody; so they are taken one by one, unless its author says
# that together is the same. Who does not catch it would keep the client from answering, which tells past any ε that the
# sample is there: it counts as zero.

_OURS = ("torch.nn.modules.", "fedveil.")


def stateful(what: str) -> ConfigError:
    """The refusal of code that answers differently when it is asked the same again."""
    return ConfigError(
        f"The {what} gives something else for the same sample after it has seen others, and a differential-privacy "
        "claim rests on each sample's gradient being its own: what one sample leaves behind for the next is clipped by "
        "nobody. Let it keep nothing between calls (no running means, counters or stored samples; draw random numbers "
        "from the global generators of torch, numpy or Python), or take a scheme without noise.",
        code=Code.STATEFUL,
    )


def own_code(module: nn.Module, loss: Loss) -> bool:
    """Whether a network or a loss is the caller's own: it may raise whatever it likes, for a single sample."""
    return isinstance(loss, OwnLoss) or is_own(module)


def _said(ask: Callable[..., tuple[Tensor, ...]], *about: Any) -> tuple[Tensor, ...]:
    """What code of the caller's own answers; nothing where it raises, since a refusal would tell of that sample."""
    try:
        return ask(*about)
    except Exception:
        return ()


def one_by_one(
    module: nn.Module,
    moving: Sequence[Tensor],
    loss: Loss,
    x: Tensor,
    y: Tensor,
    *,
    seeded: Callable[[int], AbstractContextManager[None]] = lambda number: nullcontext(),
) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
    """Each sample's loss and gradient, computed within its own `seeded`.

    Where code of the caller's own raises, the loss is NaN and the gradient zero: a refusal would tell of that sample.
    """
    for number in range(len(y)):
        which = slice(number, number + 1)
        try:
            with seeded(number), torch.enable_grad():
                value = loss.mean(module(x[which]), y[which])
                grads = torch.autograd.grad(value, moving, allow_unused=True, materialize_grads=True)
        except Exception:
            if not own_code(module, loss):
                raise
            yield moving[0].new_full((), math.nan), [torch.zeros_like(one) for one in moving]
        else:
            yield value.detach(), grads


_CALLED = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")


def _brought(layer: nn.Module) -> bool:
    """Whether a layer calls what is neither PyTorch's nor FedVeil's: a method put over its own, a function."""
    return any(name in vars(layer) for name in _CALLED) or any(
        callable(value)
        and not isinstance(value, nn.Module | type)
        and not str(getattr(value, "__module__", "")).startswith(("torch", "fedveil."))
        for value in vars(layer).values()
    )


def is_own(module: nn.Module) -> bool:
    """Whether some part of a network is neither PyTorch's nor FedVeil's, calls what is neither, or has hooks."""
    return any(
        not type(layer).__module__.startswith(_OURS) or hooked(layer) or _brought(layer) for layer in module.modules()
    )


def unused_twin(architecture: Architecture, module: nn.Module) -> nn.Module | None:
    """A network with the same parameters that has seen no sample yet; None where layers were put between its own."""
    if has_multipliers(module):
        return None
    twin = architecture.new_skeleton(fused=False)
    load_parameters(twin, flatten([parameter.detach() for parameter in module.parameters()]))
    load_epsilon(architecture, twin, flatten([norm.epsilon for norm in architecture.epsilon_norms(module)]))
    for (_, mine), (_, other) in zip(batch_norms(twin), batch_norms(module), strict=True):
        mine.running_mean.copy_(other.running_mean)
        mine.running_var.copy_(other.running_var)
    return twin


@contextmanager
def nothing_kept(
    architecture: Architecture, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, *, witness: int = 0
) -> Iterator[None]:
    """Refuse a network or a loss of the caller's own that what happens inside has changed for one of these samples, or
    that answers otherwise for another than a copy of it would that has seen nothing yet.

    Raises:
        ConfigError: With `Code.STATEFUL`.
    """
    if not own_code(module, loss):
        yield
        return
    other = x[:1] if witness else x[-1:]
    x, y = x[witness : witness + 1], y[witness : witness + 1]
    asked = _said(_asked, module, x)
    before = _said(answer, loss, asked[0], y) if asked else ()
    yield
    refuse_changed(loss)
    if asked:
        unused = _said(_unused_answer, loss, asked[0], y)
        if not same(before, _said(answer, loss, asked[0], y)) or not _alike(before, unused):
            raise stateful(f"loss {loss.name}")
    if not is_own(module):
        return
    twin = unused_twin(architecture, module)
    others = [_said(_asked, one, other) for one in (module, twin) if one is not None]
    if not same(asked, _said(_asked, module, x)) or not _alike(others[0], others[-1]):
        raise stateful(f"model {type(module).__name__}")


def refuse_changed(loss: Loss) -> None:
    """Refuse a loss of the caller's own that answers otherwise than when it was tried, before anything was trained."""
    if not isinstance(loss, OwnLoss) or loss.tried_on is None or loss.answered is None:
        return
    if not loss.repeatable or not same(loss.answered, _said(answer, loss, *loss.tried_on)):
        raise stateful(f"loss {loss.name}")


def _unused_answer(loss: Loss, output: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """What a copy of a loss that has seen nothing says of a sample; the loss itself, where it cannot be copied."""
    if not isinstance(loss, OwnLoss) or loss.unused is None:
        return answer(loss, output, y)
    return answer(replace(loss, compute=copy.deepcopy(loss.unused)), output, y)


def _alike(first: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Equal but for rounding: a copy may take other kernels."""
    return len(first) == len(other) and all(close(a, b, _ROUNDING) for a, b in zip(first, other, strict=True))


_ROUNDING = 1e-3


def _asked(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Outputs for samples, and what comes back through the network to its parameters."""
    parameters = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    trained = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_()
        with unrecorded(module), generators_at(0, x.device), torch.enable_grad():
            output = module(x.clone())
            back = torch.autograd.grad(output.sum(), parameters, allow_unused=True, materialize_grads=True)
    finally:
        for parameter, moves in zip(parameters, trained, strict=True):
            parameter.requires_grad_(moves)
    return output.detach(), *back


# --- models that remember: what a forward pass changes beside parameters is refused, since nobody would send it


def _plain_state(module: nn.Module) -> dict[str, object]:
    """The numbers, truth values and strings, and lists of them, that layers keep as attributes."""

    def plain(value: object) -> bool:
        if isinstance(value, dict):
            return plain([*value.keys(), *value.values()])
        return all(map(plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, (int, float, str))

    return {
        f"{path}.{name}".lstrip("."): copy.deepcopy(value)
        for path, layer in module.named_modules()
        for name, value in vars(layer).items()
        if plain(value)
    }


def refuse_moving_state(architecture: Architecture, weights: Weights, example: Tensor) -> None:
    """What training moves beside parameters would be a hidden state of one machine: neither sent, summed nor saved."""
    module = assemble(architecture, weights).train()
    before = _plain_state(module)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module(example.to(weights.parameters.dtype) if example.is_floating_point() else example)
    moved = [name for name, value in weights.buffers.items() if not torch.equal(module.get_buffer(name), value)]
    if moved:
        raise TraceError(
            f"The model changes its buffer {moved[0]!r} while it trains, and buffers other than BatchNorm's running "
            "statistics are not sent or averaged. Use BatchNorm or GroupNorm, or keep the buffer constant."
        )
    if architecture.table is None:  # under noise, what remembers samples is looked for by its effect
        return
    after = _plain_state(module)
    changed = [name for name, value in before.items() if name in after and repr(after[name]) != repr(value)]
    if changed:
        raise TraceError(
            f"The model changes its attribute {changed[0]!r} when it is called, and a veil is worked out for one "
            "state of it. Keep the attribute constant, or make what it says an input."
        )
