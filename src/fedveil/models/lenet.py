"""The sigmoid LeNet on which gradient-inversion attacks are demonstrated in the literature."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedveil.models.layers import conv

CHANNELS = 12
STRIDES = (2, 2, 1)
INIT_BOUND = 0.5


def lenet_sigmoid(*, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Three 5×5 convolutions of 12 channels with sigmoids, and one linear layer (Zhu et al. 2019).

    Smooth, so that L-BFGS attacks work on it. Parameters are uniform on ±0.5 as in the DLG code:
    with PyTorch's smaller default the sigmoids are nearly constant and the attacks lose their signal.
    """
    channels, height, breadth = input_shape
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, stride in enumerate(STRIDES, start=1):
        layers[f"conv{i}"] = conv(channels, CHANNELS, kernel=5, stride=stride, bias=True)
        layers[f"sigmoid{i}"] = nn.Sigmoid()
        channels, height, breadth = CHANNELS, -(-height // stride), -(-breadth // stride)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(channels * height * breadth, outputs)
    model = nn.Sequential(layers)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -INIT_BOUND, INIT_BOUND)
    return model
