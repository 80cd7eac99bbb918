"""A loss of one's own is opened with its options; denominators and offsets are checked down to one
token.
"""

import pytest
import torch

from megatron_rl.config.algorithms import CustomAlgoSettings, EspoSettings
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import ResponseTokens, open_loss
from megatron_rl.losses.interface import require_denominator, require_packed
from tests.losses.shapes import shape_of


class Weighted:
    """A loss of one's own, with an option."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def prepare(self, response: ResponseTokens) -> None: ...


class Unprepared:
    """No loss: it cannot `prepare`."""


def custom(name: str, **options: float) -> object:
    return open_loss(CustomAlgoSettings(name=f"{__name__}:{name}", options=options), shape_of(48))


def test_a_loss_of_ones_own_gets_its_options() -> None:
    loss = custom("Weighted", weight=2.5)
    assert loss.loss.weight == 2.5  # type: ignore[attr-defined]


def test_a_class_that_is_no_loss_is_refused_by_the_key() -> None:
    with pytest.raises(PluginError, match=r"algo\.name.*prepare"):
        custom("Unprepared")


def test_denominators_count_at_least_one_where_a_token_is_trained() -> None:
    with pytest.raises(ValueError, match=r"denominators\.tokens=0 with 1 tokens"):
        require_denominator("tokens", 0, 1)
    assert [require_denominator("tokens", value, 0) for value in (0, 1, 2)] == [1, 1, 2]


@pytest.mark.parametrize("offsets", [torch.zeros(1, 2), torch.zeros(0)])
def test_offsets_are_a_row_of_at_least_one(offsets: torch.Tensor) -> None:
    tokens = torch.zeros(3)
    with pytest.raises(ValueError, match="cu_seqlens"):
        require_packed(tokens, ResponseTokens(tokens, tokens, tokens, tokens, offsets))


