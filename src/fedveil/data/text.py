"""Text as token ids: 0 is padding, 1 an unknown word, then the most frequent words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

PADDING, UNKNOWN = 0, 1

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def words(text: str) -> list[str]:
    """The lower-case words of a text."""
    return _WORD.findall(text.lower())


def vocabulary_of(texts: Iterable[str], *, size: int) -> dict[str, int]:
    """Ids of the most frequent words; ``size`` counts padding and unknown too. Ties go by alphabet."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    return {word: position for position, word in enumerate(ranked, start=2)}


def token_ids(texts: Sequence[str], ids: dict[str, int], *, length: int) -> npt.NDArray[np.int64]:
    """Every text as ``length`` ids, cut or padded at its end; a text without words is one unknown word."""
    block = np.full((len(texts), length), PADDING, np.int64)
    for row, text in enumerate(texts):
        tokens = [ids.get(word, UNKNOWN) for word in words(text)[:length]] or [UNKNOWN]
        block[row, : len(tokens)] = tokens
    return block
