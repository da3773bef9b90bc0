"""Many clients' steps at once: the same computation under vmap, for clients of equal batch size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedveil.downlink.blueprint import Blueprint
from fedveil.downlink.messages import PublicHead
from fedveil.flat import flatten
from fedveil.work.losses import Loss
from fedveil.work.step import collect_statistics, objectives


def steps(blueprint: Blueprint, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, head: PublicHead | None) -> Tensor:
    """`step` for every client: x and y have a leading client dimension, and so has the result."""
    parameters = {name: value.detach() for name, value in module.named_parameters()}

    def one_client(inputs: Tensor, targets: Tensor) -> Tensor:
        def forward(values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            output = torch.func.functional_call(module, values, (inputs,))
            phi = objectives(blueprint, module, loss, output, targets, head)
            return phi, collect_statistics(module, phi)

        phi, pull, statistics = torch.func.vjp(forward, parameters, has_aux=True)  # type: ignore[misc]
        rows = []
        for number in range(len(phi)):
            seed = torch.zeros_like(phi)
            seed[number] = 1.0
            rows.append(flatten(list(pull(seed)[0].values())))
        return torch.cat([*rows, phi, statistics])

    return torch.vmap(one_client)(x, y)
