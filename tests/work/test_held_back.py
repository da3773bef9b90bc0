"""Which samples a client holds back."""

from __future__ import annotations

import torch

from fedveil.work.held_back import holding_back
from fedveil.work.messages import ClientData


def client(count: int, *, number: int = 0, rows: torch.Tensor | None = None) -> ClientData:
    return ClientData(
        number, torch.arange(100.0)[:, None], torch.arange(100.0), torch.arange(count) if rows is None else rows
    )


def numbers(data: ClientData | None) -> list[float]:
    return [] if data is None else data.take(torch.arange(len(data)))[1].tolist()


def test_a_client_trains_on_what_it_does_not_hold_back() -> None:
    own = client(40, rows=torch.arange(60, 100))
    split = holding_back(own, 0.25, seed=3)
    kept, held = numbers(split), numbers(split.held_back)
    assert (len(split), len(held)) == (30, 10)
    assert sorted(kept + held) == list(range(60, 100))
    assert numbers(holding_back(own, 0.25, seed=3).held_back) == held
    assert numbers(holding_back(own, 0.25, seed=4).held_back) != held
    other = holding_back(client(40, number=1, rows=torch.arange(60, 100)), 0.25, seed=3)
    assert numbers(other.held_back) != held


def test_what_belongs_together_is_held_back_together() -> None:
    groups = torch.arange(40) // 4
    for seed in range(20):
        split = holding_back(client(40), 0.3, seed=seed, groups=groups)
        held = {int(number) // 4 for number in numbers(split.held_back)}
        assert len(held) == 3
        assert held.isdisjoint(int(number) // 4 for number in numbers(split))


def test_something_is_always_left_to_train_on() -> None:
    alone = holding_back(client(1), 0.9, seed=1)
    assert len(alone) == 1
    assert alone.held_back is None
    for share in (0.01, 0.99):
        split = holding_back(client(2), share, seed=1)
        assert (len(split), len(numbers(split.held_back))) == (1, 1)
    one_patient = holding_back(client(5), 0.5, seed=1, groups=torch.zeros(5, dtype=torch.int64))
    assert one_patient.held_back is None


class Numbers:
    """Samples that are read when they are asked for."""

    repeats = True
    inputs = torch.zeros(10, 1)
    targets = torch.zeros(10)

    def read(self, chosen: torch.Tensor, *, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return chosen.double()[:, None], chosen.double()


def test_samples_that_are_read_from_a_source_are_split_as_well() -> None:
    split = holding_back(ClientData.reading(0, Numbers()), 0.3, seed=1)
    assert len(split) == 7
    assert sorted(numbers(split) + numbers(split.held_back)) == list(range(10))
