"""Runs are told at the start how selection changes the credit of zero-variance groups."""

from typing import Any

import pytest

from megatron_rl.config.schema import CreditSettings, SelectionSettings
from megatron_rl.prompts.selection.factory import credit_warning

ZVP = CreditSettings(all_correct="zvp", all_incorrect="zvp")


def test_both_differences_are_named() -> None:
    warning = credit_warning(SelectionSettings(name="belief"), ZVP)
    assert warning.startswith("warning: selection=belief with credit.all_correct=zvp: prompts")
    assert (
        "selection.reweight=10 gives all the same expected weight; a stopped probe counts"
        in warning
    )


@pytest.mark.parametrize(
    ("settings", "text", "other_text"),
    [
        ({"reweight": 10.0}, "a stopped probe", "count less"),
        ({"probe_samples": 0}, "count less", "a stopped probe"),
        ({"skip": "zero_variance"}, "credit.all_incorrect=zvp", "credit.tied"),
    ],
)
def test_each_difference_is_named_alone(
    settings: dict[str, Any], text: str, other_text: str
) -> None:
    warning = credit_warning(SelectionSettings(name="belief", **settings), ZVP)
    assert text in warning
    assert other_text not in warning


@pytest.mark.parametrize(
    ("selection", "credit"),
    [
        (SelectionSettings(), ZVP),
        (SelectionSettings(name="belief"), CreditSettings()),
        (SelectionSettings(name="belief"), CreditSettings(all_incorrect="zvp")),
        (SelectionSettings(name="belief", probe_samples=0, reweight=10.0), ZVP),
    ],
)
def test_equal_credit_needs_no_warning(
    selection: SelectionSettings, credit: CreditSettings
) -> None:
    assert credit_warning(selection, credit) == ""
