"""The partition vote. Statistical tests use fixed seeds; each raises a false alarm with probability 1e-4 at most."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fedveil.crypto.keys import add_mask
from fedveil.errors import ConfigError, NumericError, ProtocolError
from fedveil.uplink.vote import (
    Ranking,
    Tally,
    ballot,
    choice,
    elected,
    indices_of,
    random_choice,
    tags,
    vote_label,
)

FALSE_ALARM = 1e-4
KEY = bytes(range(32))
LABEL = vote_label(3, 1)


def seed(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def rows(tensor: Tensor) -> list[bytes]:
    return [bytes(row) for row in tensor.tolist()]


def block(index: int, *, label: bytes = LABEL, key: bytes = KEY) -> bytes:
    """AES_k(label ‖ index), one block at a time."""
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(label + index.to_bytes(8, "little"))


def tensor_of(blocks: list[bytes]) -> Tensor:
    return torch.tensor([list(one) for one in blocks], dtype=torch.uint8).reshape(-1, 16)


def tagged(*indices: int, label: bytes = LABEL) -> Tensor:
    return tags(torch.tensor(indices, dtype=torch.int64), key=KEY, label=label)


def opened(result: Tensor, *, size: int = 100, winners: int | None = None, label: bytes = LABEL) -> list[int]:
    most = len(result) if winners is None else winners
    return indices_of(result, key=KEY, label=label, size=size, winners=most).tolist()


# What a client names.


@given(values=st.lists(st.integers(-4, 4), max_size=30), part=st.floats(0, 1), strategy=st.sampled_from(("max", "min")))
def test_a_client_names_the_largest_or_smallest_and_of_equal_ones_the_first(
    values: list[int], part: float, strategy: Ranking
) -> None:
    count = round(part * len(values))
    sign = -1 if strategy == "max" else 1
    wanted = sorted(sorted(range(len(values)), key=lambda i: (sign * abs(values[i]), i))[:count])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        chosen = choice(torch.tensor(values, dtype=dtype) / 8, count, strategy)
        assert chosen.dtype == torch.int64
        assert chosen.tolist() == wanted


def test_a_client_names_the_largest_of_many_numbers() -> None:
    update = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert choice(update, 777, "max").tolist() == sorted(torch.topk(update.abs(), 777).indices.tolist())
    assert choice(update, 777, "min").tolist() == sorted(torch.topk(-update.abs(), 777).indices.tolist())


def test_naming_leaves_the_update_as_it_was() -> None:
    update = torch.randn(1000, generator=torch.Generator().manual_seed(0), requires_grad=True)
    before = update.detach().clone()
    choice(update, 10, "max")
    assert torch.equal(update, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_update_that_is_not_finite_is_refused_by_number(bad: float, count: int) -> None:
    with pytest.raises(NumericError, match=r"Number 2 .* diverged"):
        choice(torch.tensor([0.0, 1.0, bad]), count, "max")


def test_choices_that_make_no_sense_are_refused() -> None:
    update = torch.zeros(3)
    with pytest.raises(ConfigError, match="Unknown ranking 'random'"):
        choice(update, 1, "random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="flat"):
        choice(update.reshape(1, 3), 1, "max")
    for count in (-1, 4):
        with pytest.raises(ValueError, match="cannot be chosen"):
            choice(update, count, "max")
        with pytest.raises(ValueError, match="cannot be chosen"):
            random_choice(3, count, seed=seed(0))


@given(size=st.integers(0, 300), part=st.floats(0, 1), name=st.integers(0, 100))
def test_a_random_choice_is_a_set_of_the_wanted_size_and_the_seeds_alone(size: int, part: float, name: int) -> None:
    count = round(part * size)
    chosen = random_choice(size, count, seed=seed(name))
    assert chosen.dtype == torch.int64
    assert len(set(chosen.tolist())) == len(chosen) == count
    assert chosen.tolist() == sorted(chosen.tolist())
    assert set(chosen.tolist()) <= set(range(size))
    assert torch.equal(chosen, random_choice(size, count, seed=seed(name)))


@pytest.mark.parametrize("count", [2, 3])
def test_every_subset_is_drawn_equally_often(count: int) -> None:
    subsets = list(itertools.combinations(range(5), count))
    drawn = Counter(tuple(random_choice(5, count, seed=seed((count, turn))).tolist()) for turn in range(4000))
    assert stats.chisquare([drawn[one] for one in subsets]).pvalue > FALSE_ALARM


@pytest.mark.parametrize("count", [30_000, 70_000])
def test_a_large_random_choice_favours_no_region(count: int) -> None:
    """Several draws of words; chi-square over 100 regions, hypergeometric and so divided by 1 − count/size."""
    size, regions = 100_000, 100
    observed = np.histogram(random_choice(size, count, seed=seed(count)).numpy(), bins=regions, range=(0, size))[0]
    expected = count / regions
    statistic = ((observed - expected) ** 2 / expected).sum() / (1 - count / size)
    assert FALSE_ALARM / 2 < stats.chi2.sf(statistic, regions - 1) < 1 - FALSE_ALARM / 2


# Tags and back.


@pytest.mark.parametrize("key", [bytes(16), KEY])
def test_tags_are_aes_of_label_and_index_in_the_order_of_the_tags(key: bytes) -> None:
    indices = [5, 0, 2**40, 17, 3]
    made = tags(torch.tensor(indices), key=key, label=LABEL)
    assert made.dtype == torch.uint8
    assert rows(made) == sorted(block(index, key=key) for index in indices)


def test_the_order_of_tags_does_not_tell_the_order_of_indices() -> None:
    forth, back = torch.arange(1000), torch.arange(999, -1, -1)
    made = tags(forth, key=KEY, label=LABEL)
    assert torch.equal(made, tags(back, key=KEY, label=LABEL))
    places = {one: place for place, one in enumerate(rows(made))}
    order = [places[block(index)] for index in range(1000)]
    assert stats.spearmanr(range(1000), order).pvalue > FALSE_ALARM


@given(st.sets(st.integers(0, 10_000), max_size=40))
def test_clients_read_the_indices_they_tagged(indices: set[int]) -> None:
    assert opened(tagged(*indices), size=10_001) == sorted(indices)


def test_tags_of_other_rounds_attempts_and_keys_share_nothing() -> None:
    indices = torch.arange(500)
    labels = [vote_label(round, attempt) for round in range(3) for attempt in range(3)]
    made = [tags(indices, key=KEY, label=label) for label in labels]
    made.append(tags(indices, key=seed("other"), label=LABEL))
    assert len({one for each in made for one in rows(each)}) == 500 * len(made)


def test_no_two_rounds_or_attempts_have_the_same_label() -> None:
    pairs = list(itertools.product((0, 1, 2, 255, 256, 65536, 2**32 - 1), repeat=2))
    assert len({vote_label(*pair) for pair in pairs}) == len(pairs)
    assert {len(vote_label(*pair)) for pair in pairs} == {8}
    for pair in ((2**32, 0), (0, 2**32), (-1, 0), (0, -1)):
        with pytest.raises(ProtocolError, match=r"2\^32"):
            vote_label(*pair)


def test_a_flipped_bit_in_a_returned_tag_is_refused() -> None:
    made = tagged(4, 8, 15)
    for bit in range(128):
        changed = made.clone()
        changed[1, bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match=r"1 of 3 tags .* not made by a client for this round"):
            opened(changed)


def test_tags_of_another_round_or_attempt_are_refused() -> None:
    for label in (vote_label(4, 1), vote_label(3, 0)):
        with pytest.raises(ProtocolError, match=r"3 of 3 tags .* another round"):
            opened(tagged(4, 8, 15, label=label))


def test_results_that_cannot_be_are_refused() -> None:
    made = tagged(4, 8, 15)
    with pytest.raises(ProtocolError, match="3 tags where 4 belong"):
        opened(made, winners=4)
    with pytest.raises(ProtocolError, match="3 tags where 2 belong"):
        opened(made, winners=2)
    with pytest.raises(ProtocolError, match="index 15 of a model with 15"):
        opened(made, size=15)
    with pytest.raises(ProtocolError, match="index 18446744073709551615 of a model"):
        opened(tensor_of([block(2**64 - 1)]))
    with pytest.raises(ProtocolError, match="index 8 more than once"):
        opened(torch.cat([made, tagged(8)]))


@pytest.mark.parametrize("bad", [torch.zeros(2, 16), torch.zeros(2, 15, dtype=torch.uint8), tagged(1, 2).reshape(-1)])
def test_tags_of_the_wrong_form_are_refused_by_both_sides(bad: Tensor) -> None:
    with pytest.raises(ProtocolError, match="uint8 of shape"):
        opened(bad, winners=2)
    with pytest.raises(ProtocolError, match="uint8 of shape"):
        Tally(most=2, winners=1).add(bad)


def test_wrong_keys_labels_and_indices_are_refused() -> None:
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="16 or 32 bytes"):
        tags(one, key=bytes(24), label=LABEL)
    with pytest.raises(ValueError, match="8 bytes"):
        tags(one, key=KEY, label=b"")
    with pytest.raises(ValueError, match="int64"):
        tags(one.float(), key=KEY, label=LABEL)
    for use in (lambda: tags(-one, key=KEY, label=LABEL), lambda: ballot(-one, 5)):
        with pytest.raises(ValueError, match="-1 is not an index"):
            use()
    with pytest.raises(ValueError, match="index 1 of a model with 1"):
        ballot(one, 1)


# The server's count.


def test_the_tags_with_most_votes_win_and_their_order_hides_the_counts() -> None:
    tally = Tally(most=3, winners=2)
    for vote in ((1, 2, 3), (2, 3, 4), (3, 5, 6), (2, 3, 9)):
        tally.add(tagged(*vote))
    result = tally.result()
    assert opened(result) == [2, 3]
    assert rows(result) == sorted(rows(result))


def test_a_vote_may_come_in_any_order_and_is_not_kept_by_reference() -> None:
    tally = Tally(most=3, winners=3)
    vote = tagged(1, 2, 3).flip(0)
    tally.add(vote)
    vote.zero_()
    assert opened(tally.result()) == [1, 2, 3]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (tagged(1, 2, 3, 4), "voted for 4 indices where 3 are allowed"),
        (tagged(1, 2), "voted for 2 indices where exactly 3 belong"),
        (torch.cat([tagged(1), tagged(2), tagged(1)]), "voted for 1 of 3 indices more than once"),
        (tagged(1, 2, 3).long(), "uint8 of shape"),
    ],
)
def test_a_refused_vote_leaves_the_count_as_it_was(bad: Tensor, says: str) -> None:
    tally, clean = Tally(most=3, winners=3), Tally(most=3, winners=3)
    for vote in ((1, 7, 8), (7, 8, 9), (5, 6, 8)):
        tally.add(tagged(*vote))
        clean.add(tagged(*vote))
        for _ in range(5):
            with pytest.raises(ProtocolError, match=says):
                tally.add(bad)
    assert torch.equal(tally.result(), clean.result())


def test_the_count_can_be_read_on_the_way() -> None:
    tally = Tally(most=1, winners=1)
    tally.add(tagged(1))
    assert opened(tally.result()) == [1]
    tally.add(tagged(2))
    tally.add(tagged(2))
    assert opened(tally.result()) == [2]


def test_tags_made_up_to_share_one_half_are_counted_apart() -> None:
    """Honest tags never agree in 8 bytes; a client that lies can make them."""
    low, high = bytes(8) + b"a" * 8, bytes(8) + b"b" * 8
    others = [letter * 8 + b"a" * 8 for letter in (b"c", b"d", b"e")]
    tally = Tally(most=2, winners=2)
    for vote in ([low, high], [low, high], [low, high], others[:2], [others[0], others[2]]):
        tally.add(tensor_of(vote))
    assert rows(tally.result()) == [low, high]
    with pytest.raises(ProtocolError, match="more than once"):
        Tally(most=3, winners=1).add(tensor_of([low, high, low]))


def test_nobody_is_elected_without_votes() -> None:
    with pytest.raises(ProtocolError, match="1 indices are to be elected, and the votes name only 0"):
        Tally(most=1, winners=1).result()
    tally = Tally(most=1, winners=2)
    tally.add(tagged(1))
    with pytest.raises(ProtocolError, match="name only 1"):
        tally.result()
    with pytest.raises(ProtocolError, match="name only 1"):
        elected(ballot(torch.tensor([1]), 5), 2, voters=1, most=1, key=KEY, label=LABEL)
    with pytest.raises(ValueError, match="cannot elect"):
        Tally(most=-1, winners=1)


def test_a_vote_for_nothing_elects_nothing() -> None:
    tally = Tally(most=0, winners=0)
    tally.add(tagged())
    assert tally.result().shape == (0, 16)
    assert elected(ballot(torch.tensor([]).long(), 5), 0, voters=1, most=0, key=KEY, label=LABEL).tolist() == []


# Both ways of counting.


@st.composite
def elections(draw: st.DrawFn) -> tuple[int, int, int, list[list[int]]]:
    """Size, indices a vote, winners, votes; among few indices, so that ties abound."""
    size = draw(st.integers(1, 25))
    most = draw(st.integers(0, size))
    indices = st.lists(st.integers(0, size - 1), min_size=most, max_size=most, unique=True)
    return size, most, draw(st.integers(0, most)), draw(st.lists(indices, min_size=1, max_size=9))


@given(election=elections(), round=st.integers(0, 1000), order=st.randoms(use_true_random=False))
def test_tags_and_summed_ballots_elect_the_same(
    election: tuple[int, int, int, list[list[int]]], round: int, order: random.Random
) -> None:
    size, most, winners, votes = election
    label = vote_label(round, 0)
    counted = Counter(index for vote in votes for index in vote)
    ranked = sorted(counted, key=lambda index: (-counted[index], block(index, label=label)))
    wanted = sorted(ranked[:winners])
    order.shuffle(votes)
    tally = Tally(most=most, winners=winners)
    for vote in votes:
        tally.add(tagged(*vote, label=label))
    assert opened(tally.result(), size=size, winners=winners, label=label) == wanted
    counts = np.zeros(size, dtype=np.uint64)
    for vote in votes:
        counts += ballot(torch.tensor(vote, dtype=torch.int64), size)
    assert elected(counts, winners, voters=len(votes), most=most, key=KEY, label=label).tolist() == wanted


def test_ballots_are_ones_where_the_vote_is_and_survive_masks() -> None:
    first, second = ballot(torch.tensor([1, 4]), 6), ballot(torch.tensor([4, 5]), 6)
    assert first.tolist() == [0, 1, 0, 0, 1, 0]
    add_mask(first, seed("pair"))
    add_mask(second, seed("pair"), subtract=True)
    with pytest.raises(ProtocolError, match="masks have not cancelled"):
        elected(first, 1, voters=2, most=2, key=KEY, label=LABEL)
    assert elected(first + second, 1, voters=2, most=2, key=KEY, label=LABEL).tolist() == [4]


@pytest.mark.parametrize("counts", [[2, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [2**64 - 1, 2, 1, 0]])
def test_counts_that_the_ballots_cannot_give_are_refused(counts: list[int]) -> None:
    with pytest.raises(ProtocolError, match="1 ballots for 2 indices each"):
        elected(np.array(counts, dtype=np.uint64), 1, voters=1, most=2, key=KEY, label=LABEL)


@pytest.mark.parametrize("way", ["tags", "histogram"])
def test_position_does_not_decide_ties(way: str) -> None:
    """Ten clients name disjoint blocks of 100 indices; the 100 of 1000 tied ones that win are spread evenly.

    Chi-square over the 10 blocks and 50 rounds; drawing without replacement shrinks it by 1 − 1/10.
    """
    blocks = [torch.arange(start, start + 100) for start in range(0, 1000, 100)]
    wins = np.zeros(10)
    for round in range(50):
        label = vote_label(round, 0)
        if way == "tags":
            tally = Tally(most=100, winners=100)
            for one in blocks:
                tally.add(tags(one, key=KEY, label=label))
            won = indices_of(tally.result(), key=KEY, label=label, size=1000, winners=100)
        else:
            won = elected(np.ones(1000, dtype=np.uint64), 100, voters=10, most=100, key=KEY, label=label)
        wins += np.bincount(won.numpy() // 100, minlength=10)
    expected = 50 * 100 / 10
    statistic = ((wins - expected) ** 2 / expected).sum() / (1 - 1 / 10)
    assert FALSE_ALARM / 2 < stats.chi2.sf(statistic, 9) < 1 - FALSE_ALARM / 2


# At scale.

SCRIPT = """
import json, torch
from fedveil.uplink.vote import Tally, choice, indices_of, tags, vote_label

SIZE, COUNT, CLIENTS = 11_000_000, 110_000, 10
KEY, LABEL = bytes(32), vote_label(0, 0)

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

torch.set_num_threads(1)
update = torch.zeros(SIZE)
signs = torch.ones(SIZE, dtype=torch.int8)
signs[::7] = 3
tags(torch.arange(1), key=KEY, label=LABEL)  # loads the cipher
before, one_client = peak(), 0
tally = Tally(most=COUNT, winners=COUNT)
for client in range(CLIENTS):
    update.normal_(generator=torch.Generator().manual_seed(client)).mul_(signs)
    made = tags(choice(update, COUNT, "max"), key=KEY, label=LABEL)
    one_client = one_client or peak() - before
    tally.add(made)
won = indices_of(tally.result(), key=KEY, label=LABEL, size=SIZE, winners=COUNT)
print(json.dumps({
    "won": len(won), "large": int((won % 7 == 0).sum()), "client": one_client, "all": peak() - before,
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_eleven_million_parameters_and_ten_clients_fit_into_200_megabytes() -> None:
    """Choice and tags of a client, and the count of all ten with them, above what the update itself takes."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["won"], found["large"]) == (110_000, 110_000)
    assert found["client"] <= found["all"] < 200e6
