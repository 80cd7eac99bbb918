"""User-defined losses get their options. Denominators and offsets are checked."""

import pytest
import torch

from megatron_rl.config.algorithms import CustomAlgoSettings
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.losses import ResponseTokens, open_loss
from megatron_rl.losses.interface import require_denominator, require_packed
from tests.losses.shapes import shape_of


class Weighted:
    """A user-defined loss with an option."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def prepare(self, response: ResponseTokens) -> None: ...


class WithoutPrepare:
    """No loss, because it has no `prepare`."""


def custom(name: str, **options: float) -> object:
    return open_loss(CustomAlgoSettings(name=f"{__name__}:{name}", options=options), shape_of(48))


def test_user_defined_loss_gets_its_options() -> None:
    loss = custom("Weighted", weight=2.5)
    assert loss.loss.weight == 2.5  # type: ignore[attr-defined]


def test_class_without_prepare_is_refused() -> None:
    with pytest.raises(PluginError, match=r"algo\.name.*prepare"):
        custom("WithoutPrepare")


def test_denominators_are_positive_if_tokens_are_trained() -> None:
    with pytest.raises(ValueError, match=r"denominators\.tokens=0 with 1 tokens"):
        require_denominator("tokens", 0, 1)
    assert [require_denominator("tokens", value, 0) for value in (0, 0.5, 1, 2)] == [1, 0.5, 1, 2]
    assert require_denominator("tokens", 0.5, 3) == 0.5, "weights may be small"


@pytest.mark.parametrize("offsets", [torch.zeros(1, 2), torch.zeros(0)])
def test_offsets_are_a_non_empty_vector(offsets: torch.Tensor) -> None:
    tokens = torch.zeros(3)
    with pytest.raises(ValueError, match="cu_seqlens"):
        require_packed(tokens, ResponseTokens(tokens, tokens, tokens, tokens, offsets))
