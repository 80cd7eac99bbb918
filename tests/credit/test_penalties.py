"""Length penalties by hand."""

import numpy as np
import pytest

from megatron_rl.config.schema import CreditSettings
from megatron_rl.credit.penalties import Penalties
from tests.support.groups import group


def length_penalties(
    tokens: list[int], *, max_new_tokens: int = 100, **settings: object
) -> np.ndarray:
    """Length penalties of correct rollouts with these numbers of tokens."""
    penalties = Penalties(CreditSettings(**settings), max_new_tokens)  # type: ignore[arg-type]
    rollouts = group(*[1.0] * len(tokens), num_generated=tokens).rollouts
    return penalties.length(rollouts, np.ones(len(tokens), np.bool_))


@pytest.mark.parametrize("max_new_tokens", [4, 8])
def test_the_default_buffer_of_a_short_limit_is_one_token(max_new_tokens: int) -> None:
    tokens = [max_new_tokens - 2, max_new_tokens - 1, max_new_tokens]
    penalties = length_penalties(tokens, max_new_tokens=max_new_tokens, length="buffer")
    assert penalties.tolist() == [0, 0, 1]


def test_excess_grows_to_one_at_twice_the_length_and_no_further() -> None:
    penalties = length_penalties([10, 10, 10, 15, 20, 90], length="excess", length_start=1.0)
    assert penalties.tolist() == pytest.approx([0, 0, 0, 0.2, 0.6, 1])


def test_the_median_length_counts_as_at_least_one_token() -> None:
    penalties = length_penalties([0, 0, 0, 1, 2], length="excess", length_start=1.0)
    assert penalties.tolist() == [0, 0, 0, 0, 1]


def test_a_penalty_that_is_off_is_zero_in_float64() -> None:
    penalties = length_penalties([10, 20])
    assert penalties.tolist() == [0, 0]
    assert penalties.dtype == np.float64
