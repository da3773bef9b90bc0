"""A text classifier: embedding, gated recurrent unit, mean over the words, linear head.

The recurrence is unrolled from plain linear layers because ``nn.GRU`` is one opaque kernel:
neither ``torch.func.vmap(grad(...))`` nor ``torch.fx`` can see inside it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedveil.errors import ConfigError
from fedveil.models.layers import at_least

PADDING = 0


class GRUClassifier(nn.Module):
    """Classifies sequences of ``steps`` token ids, of which ``0`` is padding.

    With reset gate r, update gate u and candidate c (Chung et al. 2014; the reset acts on the
    projected state, as in cuDNN, so that one product per step serves all three gates)::

        r = σ(W_r x + U_r h)   u = σ(W_u x + U_u h)   c = tanh(W_c x + r ∘ (U_c h))   h ← h + u ∘ (c − h)

    A padding step leaves h alone, so it does not matter on which side a text is padded.
    """

    def __init__(self, *, steps: int, vocabulary: int, embedding: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.steps = steps
        self.hidden = hidden
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=PADDING)
        self.from_input = nn.Linear(embedding, 3 * hidden)
        self.from_state = nn.Linear(hidden, 3 * hidden)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(batch, outputs)`` of token ids ``(batch, steps)``."""
        projected: Tensor = self.from_input(self.embedding(tokens))
        words = tokens.ne(PADDING).unsqueeze(-1).type_as(projected)
        # unbind, not projected[:, t]: the gradient of an index is a zero tensor of full length per step.
        inputs = projected.unbind(1)
        present = words.unbind(1)
        state = torch.zeros_like(inputs[0][:, : self.hidden])
        states = []
        for t in range(self.steps):
            state = self._step(inputs[t], present[t], state)
            states.append(state)
        mean = (torch.stack(states, dim=1) * words).sum(1) / words.sum(1).clamp(min=1)
        scores: Tensor = self.head(mean)
        return scores

    def _step(self, x: Tensor, present: Tensor, state: Tensor) -> Tensor:
        h = self.from_state(state)
        n = self.hidden
        gates = torch.sigmoid(x[:, : 2 * n] + h[:, : 2 * n])
        candidate = torch.tanh(x[:, 2 * n :] + gates[:, :n] * h[:, 2 * n :])
        return state + gates[:, n:] * present * (candidate - state)


def gru(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    vocabulary: int,
    embedding: int = 64,
    hidden: int = 64,
) -> nn.Module:
    """A GRU over ``input_shape[0]`` token ids below ``vocabulary``."""
    at_least(1, embedding=embedding, hidden=hidden)
    if vocabulary < 2:
        raise ConfigError(f"A vocabulary of {vocabulary} leaves no word beside the padding id 0: give at least 2.")
    return GRUClassifier(
        steps=input_shape[0], vocabulary=vocabulary, embedding=embedding, hidden=hidden, outputs=outputs
    )
