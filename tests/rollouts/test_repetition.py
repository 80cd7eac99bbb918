"""Repetition of a response, compared with a count of n-grams in plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollouts.wire.repetition import repetition
from tests.support.processor_time import processor_seconds


def repetition_by_counting(tokens: list[int], ngram: int) -> float:
    windows: set[tuple[int, ...]] = set()
    repeated_positions: set[int] = set()
    for start in range(len(tokens) - ngram + 1):
        window = tuple(tokens[start : start + ngram])
        if window in windows:
            repeated_positions.update(range(start, start + ngram))
        windows.add(window)
    return max(0.0, len(repeated_positions) / max(1, len(tokens)) - 0.02)


@pytest.mark.slow
@settings(max_examples=4 * settings.default.max_examples)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(2, 8))
def test_repetition_is_the_share_of_tokens_in_repeated_ngrams(
    tokens: list[int], ngram: int
) -> None:
    assert repetition(np.array(tokens, np.int32), ngram) == pytest.approx(
        repetition_by_counting(tokens, ngram)
    )


def test_repetition_computed_by_hand() -> None:
    assert repetition(np.arange(100, dtype=np.int32), 4) == 0.0
    assert repetition(np.zeros(100, np.int32), 4) == pytest.approx(0.99 - 0.02)  # all but the first
    twice = np.concatenate([np.arange(50), np.arange(50)]).astype(np.int32)
    assert repetition(twice, 40) == pytest.approx(0.5 - 0.02)
    assert repetition(twice, 51) == 0.0
    once_more = np.concatenate([np.arange(398), [0, 1]]).astype(np.int32)
    assert repetition(once_more, 2) == 0.0  # half a percent is allowed


def test_a_long_response_takes_milliseconds() -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, 32_768).astype(np.int32)
    assert repetition(tokens, 40) == 0.0
    assert processor_seconds(lambda: repetition(tokens, 40), attempts=3) < 0.5
