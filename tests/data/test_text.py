from __future__ import annotations

from fedveil.data.tabular import token_ids, vocabulary_of, words


def test_words_are_lower_case_and_free_of_punctuation() -> None:
    assert words("It's GREAT -- 10/10, really_good!") == ["it's", "great", "10", "10", "really", "good"]
    assert words("Größe naïve") == ["größe", "naïve"]


def test_the_most_frequent_words_come_first_and_ties_go_by_alphabet() -> None:
    assert vocabulary_of(["b a", "c b", "b a d"], size=5) == {"b": 2, "a": 3, "c": 4}


def test_ids_are_padded_cut_and_unknown_where_they_must() -> None:
    ids = vocabulary_of(["one two"], size=10)
    assert token_ids(["two three", "one two one one", ""], ids, length=3).tolist() == [
        [3, 1, 0],
        [2, 3, 2],
        [1, 0, 0],
    ]
