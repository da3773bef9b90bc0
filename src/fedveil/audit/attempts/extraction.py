"""What a client's copy of the model is worth: as it was sent, after calibration, under a head of its own.

All three give outputs for the queries that an auditor asks (`queries` among what the view knows), so that they can be
compared with the true model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedveil.audit.attacks.calibration import COUNTS, head_calibration
from fedveil.audit.attacks.probe import fit_probe, read_head
from fedveil.audit.attempts.common import device_of, require_classes, seen_by
from fedveil.audit.attempts.held import CPU, calibrated, fitting, held_model, labelled
from fedveil.audit.registry import Progress, Settings
from fedveil.audit.views import ClientView, View
from fedveil.errors import ConfigError, NotApplicableError
from fedveil.tensors import flatten

_AT_ONCE = 1024


def received(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """The outputs of the model as the client holds it."""
    seen = seen_by(view, ClientView)
    _, module, _ = held_model(seen, device=device_of(settings))
    with torch.no_grad():
        parts = torch.split(fitting(module, _queries(seen)), _AT_ONCE)
        outputs = torch.cat([module(part).to(CPU, torch.float64) for part in parts])
    progress(1.0)
    return {"received": outputs}


def parameters(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """The parameters as the client makes them out: as received, or with the head noise taken off where there is any."""
    seen = seen_by(view, ClientView)
    _, module, broadcast = held_model(seen, device=device_of(settings))
    if broadcast is not None and broadcast.head is not None:
        module = calibrated(seen, device=device_of(settings))
    progress(1.0)
    return {"parameters": flatten([one.detach() for one in module.parameters()]).to(CPU, torch.float64)}


def calibration(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """The outputs after the head noise was taken off, by the weights alone and by n samples.

    labelled.N used N labelled samples, unlabelled.N as many inputs and the balance of classes, total.N as many inputs
    and the sum of the outputs, where there is one secret number; `counts` says which N.
    """
    seen = seen_by(view, ClientView)
    blueprint, module, broadcast = held_model(seen, device=device_of(settings))
    if broadcast is None or broadcast.head is None:
        raise NotApplicableError("no head noise: the client sees the model's own outputs, and nothing is left to do")
    x, y = labelled(seen)
    if y is None:
        require_classes(seen.facts)
    found = head_calibration(
        blueprint,
        broadcast,
        inputs=fitting(module, x),
        labels=y,
        queries=fitting(module, _queries(seen)),
        counts=_counts(settings, len(x)),
        target_scale=seen.facts.target_scale,
        module=module,
    )
    progress(1.0)
    series = {"labelled": found.labelled, "unlabelled": found.unlabelled, "total": found.total}
    by_count = {f"{name}.{count}": one for name, results in series.items() for count, one in results.items()}
    return {"weights": found.weights, **by_count}


def probe(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """Class scores of a head that the client fits on the features it received, from N of its labelled samples."""
    seen = seen_by(view, ClientView)
    require_classes(seen.facts)
    x, y = labelled(seen)
    if y is None:
        raise NotApplicableError("no labels: a head cannot be fitted without them")
    queries = _queries(seen)
    blueprint, module, _ = held_model(seen, device=device_of(settings))
    own, asked = (read_head(blueprint, module, fitting(module, one)).to(CPU) for one in (x, queries))
    counts = _counts(settings, len(x))
    results = {}
    for done, count in enumerate(counts):
        head = fit_probe(own.features[:count], y[:count], outputs=seen.facts.outputs)
        results[f"probe.{count}"] = head(asked.features)
        progress((done + 1) / len(counts))
    return results


def _queries(view: ClientView) -> Tensor:
    queries = view.known.get("queries")
    if queries is None or not len(queries):
        raise ConfigError("The view holds no queries: put the inputs whose outputs are wanted into known['queries'].")
    return queries


def _counts(settings: Settings, available: int) -> Sequence[int]:
    """How many samples to use, one after the other: `counts`, as far as there are samples; the last is all of them."""
    given = settings.get("counts") or COUNTS
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in given):
        raise ConfigError(f"counts must be whole numbers of at least 1 (got {given!r}).")
    within = sorted({one for one in given if one <= available})
    return within if within and max(given) <= available else [*within, available]
