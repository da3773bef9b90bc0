"""Code of the caller's own under a claim about single records: asked the same twice, it must answer the same.

Clipping bounds what one sample moves because a sample's gradient is a function of that sample. A network or a loss that
keeps something from one sample for the next (a running mean, a bank of features, a counter) breaks that without any
gradient being too long: replacing one record then moves those of all that come after it. So one sample of a batch is
computed before the others and again after them, a loss is asked about the samples it was tried on as well, and a
difference in any bit refuses the run. What is kept and changes nothing for the samples that were asked about is not
noticed: the ledger says what is taken for granted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedveil.errors import Code, ConfigError
from fedveil.work.losses import Loss
from fedveil.work.own_loss import OwnLoss, answer, generators_at_zero, same

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
    """Whether some part of a network is neither PyTorch's nor FedVeil's, so that its code may keep anything."""
    return any(not type(layer).__module__.startswith(_OURS) for layer in module.modules())


@contextmanager
def nothing_kept(module: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Iterator[None]:
    """Refuse a network or a loss of the caller's own that what happens inside has changed for these samples.

    Raises:
        ConfigError: With `Code.STATEFUL`.
    """
    own_model = is_own(module)
    if not own_model and not isinstance(loss, OwnLoss):
        yield
        return
    output = _output(module, x)
    before = answer(loss, output, y)
    yield
    refuse_changed(loss)
    if not same(before, answer(loss, output, y)):
        raise stateful(f"loss {loss.name}")
    if own_model and not same((output,), (_output(module, x),)):
        raise stateful(f"model {type(module).__name__}")


def refuse_changed(loss: Loss) -> None:
    """Refuse a loss of the caller's own that answers otherwise than when it was tried, before anything was trained."""
    if not isinstance(loss, OwnLoss) or loss.tried_on is None or loss.answered is None:
        return
    if not loss.repeatable or not same(loss.answered, answer(loss, *loss.tried_on)):
        raise stateful(f"loss {loss.name}")


def _output(module: nn.Module, x: Tensor) -> Tensor:
    with generators_at_zero(x.device), torch.no_grad():
        return module(x.clone()).detach()  # type: ignore[no-any-return]
