"""Small networks and inputs that several test files share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
SERIES = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(2))
VOLUME = torch.randn(2, 2, 4, 4, 4, generator=torch.Generator().manual_seed(3))
VECTOR = torch.randn(2, 6, generator=torch.Generator().manual_seed(4))


class Net(nn.Module):
    """A network from named layers and a forward function of (layers, x)."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)
