from __future__ import annotations

from fedveil.data.preparation import fit_words, words


def test_words_are_lower_case_and_free_of_punctuation() -> None:
    assert words("It's GREAT -- 10/10, really_good!") == ["it's", "great", "10", "10", "really", "good"]
    assert words("Größe naïve") == ["größe", "naïve"]


def test_the_most_frequent_words_come_first_and_ties_go_by_alphabet() -> None:
    assert fit_words(["b a", "c b", "b a d"], column="text", size=5, length=4).vocabulary == ("b", "a", "c")


def test_ids_are_padded_cut_and_unknown_where_they_must() -> None:
    fitted = fit_words(["one two"], column="text", size=10, length=3)
    assert fitted.apply(["two three", "one two one one", ""]).tolist() == [
        [3, 1, 0],
        [2, 3, 2],
        [1, 0, 0],
    ]
