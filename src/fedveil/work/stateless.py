"""Code of the caller's own under a claim about single records: asked the same twice, it must answer the same.

Clipping bounds what one sample moves because a sample's gradient is a function of that sample. A network or a loss that
keeps something from one sample for the next (a running mean, a bank of features, a counter) breaks that without any
gradient being too long: replacing one record then moves those of all that come after it. So one sample of a batch is
computed before the others and again after them, and by copies that have seen nothing yet, a loss is asked about the
samples it was tried on as well, and a difference refuses the run. What is kept outside of the objects themselves, or
changes nothing for the samples that were asked about, is not noticed: the ledger says what is taken for granted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import Architecture, batch_norms, load_epsilon, load_parameters
from fedveil.downlink.decomposed import has_multipliers
from fedveil.errors import Code, ConfigError
from fedveil.tensors import flatten
from fedveil.work.losses import Loss
from fedveil.work.own_loss import OwnLoss, answer, close, generators_at_zero, same

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


def is_own(module: nn.Module) -> bool:
    """Whether some part of a network is neither PyTorch's nor FedVeil's, or has hooks: its code may keep anything."""
    return any(not type(layer).__module__.startswith(_OURS) or _hooked(layer) for layer in module.modules())


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooked(layer: nn.Module) -> bool:
    return any(getattr(layer, hooks) for hooks in _HOOKS)


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
    own_model = is_own(module)
    if not own_model and not isinstance(loss, OwnLoss):
        yield
        return
    other = x[:1] if witness else x[-1:]
    x, y = x[witness : witness + 1], y[witness : witness + 1]
    asked = _asked(module, x)
    before = answer(loss, asked[0], y)
    yield
    refuse_changed(loss)
    if not same(before, answer(loss, asked[0], y)) or not _alike(before, _unused_answer(loss, asked[0], y)):
        raise stateful(f"loss {loss.name}")
    if not own_model:
        return
    twin = unused_twin(architecture, module)
    if not same(asked, _asked(module, x)) or not (twin is None or _alike(_asked(module, other), _asked(twin, other))):
        raise stateful(f"model {type(module).__name__}")


def refuse_changed(loss: Loss) -> None:
    """Refuse a loss of the caller's own that answers otherwise than when it was tried, before anything was trained."""
    if not isinstance(loss, OwnLoss) or loss.tried_on is None or loss.answered is None:
        return
    if not loss.repeatable or not same(loss.answered, answer(loss, *loss.tried_on)):
        raise stateful(f"loss {loss.name}")


def _unused_answer(loss: Loss, output: Tensor, y: Tensor) -> tuple[Tensor, ...] | None:
    """What a copy of a loss that has seen nothing says of a sample; None where it cannot be copied."""
    if not isinstance(loss, OwnLoss) or loss.unused is None:
        return None
    return answer(replace(loss, compute=copy.deepcopy(loss.unused)), output, y)


def _alike(first: tuple[Tensor, ...], other: tuple[Tensor, ...] | None) -> bool:
    """Equal but for rounding: a copy may take other kernels."""
    if other is None:
        return True
    return all(close(a, b, _ROUNDING) for a, b in zip(first, other, strict=True))


_ROUNDING = 1e-3


def _asked(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Outputs for samples and, where these are real numbers, what comes back through the network to them."""
    x = x.clone()
    if not x.is_floating_point():
        with generators_at_zero(x.device), torch.no_grad():
            return (module(x).detach(),)
    with generators_at_zero(x.device), torch.enable_grad():
        leaf = x.requires_grad_()
        output = module(leaf.clone())
        back = torch.autograd.grad(output.sum(), leaf, allow_unused=True, materialize_grads=True)[0]
    return output.detach(), back
