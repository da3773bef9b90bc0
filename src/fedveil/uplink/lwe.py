"""Noise that is also a mask (Stevens et al. 2022): a client's share of the noise is the error of a sample of learning
with errors, so that masks are needed for a short secret only.

With Q = 2³², a public matrix A of n columns and a row for each number x of a contribution, fresh every round,

    h_k = A·s_k + x_k + e_k mod Q      s_k uniform, drawn for the round; e_k the client's share of the noise
    Σ h_k − A·Σ s_k = Σ (x_k + e_k)    of the clients in both sums

The secrets are n words under the masks of `uplink/masked.py`, in the same message: who is missing in one sum is missing
in the other, and whatever is said there of shares, survivors and refusals holds here. The weight is not sent: clients
have announced it. A follows from the seed of the round's graph, which nobody picks.

How wide an error must be for a modulus is a table (128 bits, by HomomorphicEncryption.org, for errors of 3.2): n = 1024
goes with 27 bits, 2048 with 54, that is, a modulus of 2^25.3 or 2^52.3 deviations. Under a claim noise has 1024 steps
or more (`uplink/grid.py`), so that Q is 2²² deviations at most.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import ConfigError, spelled
from fedveil.ledger import caveats
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.releases import Caveats, Release, Released
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import message
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.messages import SECTIONS, Reply, releases_of, releases_of_all
from fedveil.protocol.parts import RoundContext, Terms
from fedveil.secrets import SecretSource
from fedveil.shapes import octets, words
from fedveil.tensors import Layout
from fedveil.uplink.grid import FINEST, FixedPoint
from fedveil.uplink.masked import UNMASKING_MESSAGES, Masked
from fedveil.uplink.noised import add_residual, noised_in_sum
from fedveil.uplink.unmasking import Evidence, MaskedSum, MaskedUpload, Revealed

WORD_BITS = 32
DIMENSIONS = {1024: 27.0, 2048: 54.0}
"""How many bits a modulus may have for secrets of so many words, and errors of 3.2."""
_TABLE_ERROR = 3.2
_ROWS = 2048
Words32 = NDArray[np.uint32]


def most_bits(dimension: int) -> float:
    """log₂ of the largest modulus over the deviation of the error."""
    return DIMENSIONS[dimension] - math.log2(_TABLE_ERROR)


@lru_cache(maxsize=4)  # simulated clients multiply by the same
def _block(seed: bytes, number: int, rows: int, dimension: int) -> Words32:
    from fedveil.crypto.keys import add_mask

    drawn = np.zeros(rows * dimension // 2, dtype=np.uint64)
    add_mask(drawn, hashlib.sha256(b"fedveil lwe matrix 1" + seed + number.to_bytes(8, "big")).digest())
    return drawn.view(np.uint32).reshape(rows, dimension)


def times_matrix(secret: Words32, *, seed: bytes, rows: int) -> Words32:
    """A·s modulo 2³²."""
    product = np.empty(rows, dtype=np.uint32)
    for number, start in enumerate(range(0, rows, _ROWS)):
        part = product[start : start + _ROWS]
        np.matmul(_block(seed, number, len(part), len(secret)), secret, out=part)
    return product


@message
@dataclass(frozen=True, eq=False)
class LweUpload(MaskedUpload):
    """Client → server: a contribution behind A·s, and s under masks."""

    payload: Annotated[
        Tensor, words("secret"), Released("the round's secret", hiding="masks modulo 2^64: the server learns the sum")
    ]
    hidden: Annotated[Tensor, octets("contribution", WORD_BITS // 8), SECTIONS]

    def dense(self, length: int) -> Tensor:
        """The words that hide the contribution, at the upper end of 64 bits; the weight is not sent."""
        words = torch.zeros(length, dtype=torch.int64)
        words[:-1] = self.hidden.cpu().contiguous().view(torch.int32).flatten().to(torch.int64) << (64 - WORD_BITS)
        return words


@dataclass(frozen=True)
class LweMasked(Masked):
    """Masks on a secret of `dimension` words, which with the noise as its error masks a whole contribution."""

    dimension: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise is None or self.noise.word_bits != WORD_BITS:
            raise ConfigError("Masks by learning with errors need noise, planned for words of 32 bits.")
        if self.dimension not in DIMENSIONS:
            raise ConfigError(f"{spelled('lwe_dimension')} must be 1024 or 2048 (got {self.dimension}).")
        if WORD_BITS - math.log2(FINEST) > most_bits(self.dimension):
            raise ConfigError(f"Errors of {FINEST:g} steps are too small for {self.dimension} dimensions.")

    def _rows(self, terms: Terms) -> int:
        return terms.layout.length - 1

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """Round, add the noise, add A·s; s goes under masks."""
        assert self.noise is not None
        numbers = self.codec(context, terms).encode(vector)[:-1]
        add_residual(numbers, state.client, self.noise, context, terms, secrets=secrets)
        stream = secrets.stream("lwe secret", state.client, context.round, context.attempt)
        # Sums of secrets open modulo 2⁶⁴: with their upper halves random, too, they say nothing beyond Σ s modulo 2³².
        secret = np.frombuffer(stream.bytes(8 * self.dimension), dtype="<u8").astype(np.uint64)
        behind = numbers.astype(np.uint32)  # modulo 2³²
        behind += times_matrix(secret.astype(np.uint32), seed=context.graph_seed(), rows=len(behind))
        state, masked = self.cover(state, secret, context, secrets=secrets, transcript=context.told)
        hidden = from_bytes(behind.astype("<u4").tobytes()).reshape(-1, WORD_BITS // 8)
        parts = (masked.payload, masked.holders, masked.lengths, masked.bundles, hidden)
        return state, LweUpload(state.client, context.round, context.attempt, *parts)

    def shared_part(self, state: ClientState, peer: int, context: RoundContext, terms: Terms) -> Tensor | None:
        """Two contributions share nothing: their secrets do."""
        return None

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> LweSum:
        """Two sums, of what is hidden and of the secrets."""
        return LweSum(self, self.codec(context, terms), self._rows(terms), context)

    def caveats(self, run: RunFacts) -> Caveats:
        """As masks have it, and learning with errors."""
        bits = WORD_BITS - math.log2(FINEST)
        lattice = (caveats.hidden_by_errors(self.dimension, bits, most_bits(self.dimension)), caveats.PUBLIC_MATRIX)
        return super().caveats(run).followed_by(Caveats(lattice))

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """Everything behind errors that are the noise; what opens the masks of the secrets is declared too."""
        covers = noised_in_sum(layout, "masks by learning with errors: the server learns the sum")
        return (
            *releases_of(LweUpload, sections=layout.names, covers=covers),
            *releases_of_all(*UNMASKING_MESSAGES, *((Evidence,) if self.unmask == "always" else ())),
        )


class LweSum(MaskedSum):
    """Σ h and, under masks, Σ s."""

    def __init__(self, uplink: LweMasked, codec: FixedPoint, rows: int, context: RoundContext) -> None:
        always = uplink.unmask == "always"
        super().__init__(
            None,
            uplink.dimension,
            uplink.graph(context),
            context,
            quorum=uplink.quorum,
            self_mask=always,
            signed=True,
        )
        self._grid = codec
        self._hidden = np.zeros(rows, dtype=np.uint32)
        sizes = {**self._sizes, "contribution": rows, "secret": uplink.dimension}
        self.expect(LweUpload, context.cohort, which=context.which, sizes=sizes)

    def _fold(self, reply: Any) -> None:
        super()._fold(reply)
        if not isinstance(reply, Revealed):
            self._hidden += np.frombuffer(to_bytes(reply.hidden), dtype="<u4")

    def total(self) -> Tensor:
        """The sum of contributions and noise, and what the contributors have announced to weigh."""
        directory = self._context.directory
        assert directory is not None
        secret = self.words().astype(np.uint32)
        seed, rows = self._context.graph_seed(), len(self._hidden)
        numbers = (self._hidden - times_matrix(secret, seed=seed, rows=rows)).view(np.int32)
        opened = self._grid.decode(numbers.astype(np.int64).view(np.uint64))
        weight = float(sum(directory.samples_of(self.survivors)))
        return torch.from_numpy(np.append(opened, weight))
