"""The texts of an app folder. <<name>> is filled in."""

from __future__ import annotations

PYPROJECT = """\
[project]
name = "<<name>>"
version = "1.0.0"
description = "Federated training with FedVeil."
license = "LicenseRef-Proprietary"
dependencies = []  # FedVeil is installed where the nodes run; Flower installs nothing

[tool.flwr.app]
publisher = "fedveil"

[tool.flwr.app.components]
serverapp = "fedveil.engines.flower:server_app"
clientapp = "fedveil.engines.flower:client_app"

# Every setting of `fedveil run`, with hyphens. To change one for a single run: fedveil flower run . --lr 0.5
[tool.flwr.app.config]
<<settings>>

# Run folder on the SuperLink's machine; "": runs/flower-<run id>, from where the SuperLink runs.
out = ""
# Continue the run in `out`.
resume = false
# Seconds that a phase of a round may take before a client that has not answered counts as missing.
deadline = <<deadline>>
# Module of this folder that describes your own data; "": the data set named by `dataset`.
data = <<data>>
# JSON object of further settings, which win: how a command line hands over what is not written above.
<<further>> = ""
<<options>>"""

GITIGNORE = """\
__pycache__/
*.fab
*.key
runs/
.fedveil/
"""

README = """\
# <<name>>

A Flower app that trains with FedVeil (scheme <<scheme>>, <<clients>> clients). It holds settings, in `pyproject.toml`;
the code is FedVeil's, installed on every machine that takes part.

## On one machine

    fedveil flower up --nodes <<clients>>      # in one terminal, in the folder above this one
    fedveil flower run <<folder>>             # in another

## On several machines

1. On the SuperLink's machine, once: `fedveil flower certificates certificates --host NAME`.
2. On every client's machine, once: `fedveil flower client HOME --number N`, and `fedveil flower node-key node.key`.
   Hand `node.key.pub` to whoever runs the SuperLink, who registers it.
3. Start Flower as `fedveil flower up --tls` prints it, with your machines' names.
4. `fedveil flower run <<folder>> --superlink NAME`, where NAME is a connection of your Flower configuration.

A client's home (`HOME/client.toml`) says which data it trains on, whose keys it trusts, and which settings it accepts.
Nothing that is shipped with this app can change that.

## Your own data

`fedveil flower init --own-data` writes `fedveil_data.py`: FACTS and test() are the server's, client() is loaded by each
client from its own home.
"""

DATA = '''\
"""The data of this federation. As it stands, it deals scikit-learn's digits: replace the three parts with your own.

FACTS and test() are used where the server runs. client() is used by a client's worker, which loads this file from its
own home (`data = "fedveil_data.py"` in client.toml) and never from what is shipped with a run: copy it there.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

CLIENTS = <<clients>>

# What everybody knows about the data: the shape of one sample, the number of classes (or of values to predict, for a
# regression), and the task.
FACTS = dict(input_shape=(64,), outputs=10, task="classification")


def test() -> tuple[torch.Tensor, torch.Tensor] | None:
    """The server's samples and labels to measure accuracy on, or None if it has none."""
    x, y = _digits()
    return x[::5], y[::5]


def client(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples and labels of the client with this number. Only its own machine calls this."""
    x, y = _digits()
    mine = [row for row in range(len(x)) if row % 5 and row % CLIENTS == number]
    return x[mine], y[mine]


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
'''
