"""Masks by learning with errors: the model of masks with the same integers, and errors as wide as hiding asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from federation import job, same_bits, server_of, trained
from fedveil.errors import Code, ConfigError
from fedveil.protocol.messages import Train
from fedveil.protocol.parts import planned
from fedveil.runs.job import Job
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.schemes.options import MaskOptions
from fedveil.uplink.lwe import LweMasked, LweSum, LweUpload, most_bits, times_matrix
from fedveil.uplink.noised import gridded

Q = 1 << 32


def small(**more: Any) -> Job:
    given = {"rounds": 2, "loss": "cross-entropy", "options": {"depth": 2, "width": 4}}
    return job(scheme="lwe-secagg", **{**given, **more})


@settings(max_examples=10, deadline=None, derandomize=True)
@given(some.data())
def test_what_is_hidden_opens_by_the_sum_of_secrets(data: some.DataObject) -> None:
    """Σ (A·s + x) − A·Σ s = Σ x modulo 2³², row for row, over more rows than one block of the matrix has."""
    rows, seed = data.draw(some.integers(1, 2100)), data.draw(some.binary(min_size=32, max_size=32))
    drawn = np.random.default_rng(data.draw(some.integers(0, 2**32)))
    secrets = drawn.integers(0, Q, (3, 64), dtype=np.uint32)
    numbers = drawn.integers(0, Q, (3, rows), dtype=np.uint32)
    hidden = np.zeros(rows, dtype=np.uint32)
    for secret, part in zip(secrets, numbers, strict=True):
        hidden += times_matrix(secret, seed=seed, rows=rows) + part
    opened = hidden - times_matrix(secrets.sum(0, dtype=np.uint32), seed=seed, rows=rows)
    assert (opened == numbers.sum(0, dtype=np.uint32)).all()


def test_the_matrix_is_uniform_and_follows_from_its_seed() -> None:
    one = np.zeros(1024, dtype=np.uint32)
    one[5] = 1
    column = times_matrix(one, seed=bytes(32), rows=5000)
    assert (column == times_matrix(one, seed=bytes(32), rows=5000)).all()
    assert (column != times_matrix(one, seed=b"\1" * 32, rows=5000)).any()
    # 5,000 uniform words: the mean of each bit is off by more than 0.045 with a chance of 2·10⁻¹⁰.
    bits = np.unpackbits(column.view(np.uint8))
    assert abs(bits.reshape(5000, 32).mean(0) - 0.5).max() < 0.045


@pytest.mark.parametrize("local", [{}, {"local_steps": 2}, {"unmask": "on-dropout"}], ids=str)
def test_the_model_is_that_of_masks_with_the_same_integers(local: dict[str, Any]) -> None:
    """To the last bit: what hides by errors adds none beside the noise."""
    hidden = small(**local)
    masks = MaskOptions().masks(noise=hidden.scheme.plan)
    masked = replace(hidden, scheme=replace(hidden.scheme, uplink=masks))
    (ours, rounds), (theirs, _) = trained(hidden), trained(masked)
    assert [done.failed for done in rounds] == ["", ""]
    assert same_bits(ours.weights.parameters, theirs.weights.parameters)


def test_an_upload_is_four_bytes_a_number_and_eight_of_the_secret() -> None:
    sent: list[LweUpload] = []

    def keep(replies: list[Any]) -> list[Any]:
        sent.extend(said for said in replies if isinstance(said, LweUpload))
        return replies

    one = small(rounds=1)
    trained(one, reorder=keep)
    length = one.scheme.layout(one.architecture).length
    assert {tuple(said.hidden.shape) for said in sent} == {(length - 1, 4)}
    assert {said.payload.numel() for said in sent} == {1024}
    # Uniform to who has no secret: a chi-square of 255 degrees of freedom is beyond 370 with a chance of 3·10⁻⁶.
    every = np.concatenate([said.hidden.numpy().ravel() for said in sent])
    counts = np.bincount(every, minlength=256)
    assert float(((counts - len(every) / 256) ** 2).sum() / (len(every) / 256)) < 370


def test_the_opened_sum_of_secrets_has_no_carries_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five secrets below 2³² a sum of which more is known than modulo 2³² would narrow each of them down."""
    opened, total = [], LweSum.total

    def keep(one: LweSum) -> Any:
        opened.append(one.words() >> np.uint64(32))
        return total(one)

    monkeypatch.setattr(LweSum, "total", keep)
    trained(small(rounds=1))
    # 1,024 uniform words: the mean is off by more than 0.05 of the range with a chance of 3·10⁻⁸.
    assert abs(float(opened[0].astype(np.float64).mean()) / Q - 0.5) < 0.05


def test_who_is_missing_is_in_neither_sum() -> None:
    _, rounds = trained(small(), absent=lambda request, client: type(request) is Train and client == 2)
    assert [done.failed for done in rounds] == ["", ""]
    assert [done.gathered.arrived for done in rounds] == [(0, 1, 3, 4)] * 2


SPOILT: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a number too few": ("hidden", lambda hidden: hidden[:-1]),
    "words of another length": ("hidden", lambda hidden: hidden[:, :-1]),
    "a secret too short": ("payload", lambda payload: payload[:-1]),
}


@pytest.mark.parametrize(("field", "how"), SPOILT.values(), ids=SPOILT)
def test_a_message_of_another_size_is_refused_and_the_round_goes_on_without_it(field: str, how: Any) -> None:
    def forged(replies: list[Any]) -> list[Any]:
        return [
            replace(said, **{field: how(getattr(said, field))})
            if isinstance(said, LweUpload) and said.client == 1
            else said
            for said in replies
        ]

    _, rounds = trained(small(), reorder=forged)
    assert [done.failed for done in rounds] == ["", ""]
    assert all(list(done.gathered.refused) == [1] for done in rounds)


@pytest.mark.parametrize("field", ["hidden", "payload"])
def test_forged_numbers_or_secrets_spoil_the_round_and_not_the_model(field: str) -> None:
    """Another secret than was hidden by leaves uniform words in the sum, which no clients can have sent."""

    def forged(replies: list[Any]) -> list[Any]:
        return [
            replace(said, **{field: getattr(said, field).flip(0)})
            if isinstance(said, LweUpload) and said.client == 1
            else said
            for said in replies
        ]

    one = small(rounds=1)
    before = server_of(one).state.weights.parameters.clone()
    state, (done,) = trained(one, reorder=forged)
    assert done.code is Code.IMPLAUSIBLE
    assert torch.equal(state.weights.parameters, before)


@pytest.mark.parametrize("accounting", ["exact", "paper"])
def test_errors_are_as_wide_as_hiding_asks_for(accounting: str) -> None:
    """σ_e of 104 steps or more at Q = 2³² and n = 1024: log₂(Q/σ_e) ≤ 25.3."""
    assert most_bits(1024) == pytest.approx(25.3, abs=0.03)
    assert most_bits(2048) == pytest.approx(52.3, abs=0.03)
    one = small(accounting=accounting, epsilon=1000.0 if accounting == "exact" else 50.0, rounds=1)
    plan, seen = one.scheme.plan, []

    def keep(context: Any, terms: Any) -> None:
        layout, grid = planned(plan, context, terms.work), gridded(plan, context, terms)  # type: ignore[arg-type]
        seen.append(float(np.log2(Q / (layout.residual.min() ** 0.5 / grid.step))))

    uplink = one.scheme.uplink

    class Watching(LweMasked):
        def accumulator(self, context: Any, terms: Any, *, device: Any) -> Any:
            keep(context, terms)
            return super().accumulator(context, terms, device=device)

    assert isinstance(uplink, LweMasked)
    watching = Watching(**{name: getattr(uplink, name) for name in uplink.__dataclass_fields__})
    trained(replace(one, scheme=replace(one.scheme, uplink=watching)))
    assert seen
    assert max(seen) <= 22


def test_the_ledger_claims_what_masks_with_noise_do_and_names_the_lattice() -> None:
    ledger = PrivacyJournal(small()).ledger()
    assert {line.verdict for line in ledger.lines} == {"differential privacy"}
    assert any("learning with errors is hard" in text for text in ledger.line("server").assumptions)
    gradients = next(one for one in ledger.releases if one.field == "upload.gradients")
    assert gradients.protection == "noised"
    assert "learning with errors" in gradients.hiding


def test_dimensions_without_a_figure_and_uploads_without_noise_are_refused() -> None:
    with pytest.raises(ConfigError, match="1024 or 2048"):
        small(lwe_dimension=512)
    with pytest.raises(ConfigError, match="need noise"):
        LweMasked()
