"""Refusals of more questions than a finite task has."""

from pathlib import Path

import pytest

from tests.support.configurations import accept, refusals


@pytest.mark.parametrize(
    ("override", "capacity"), [("data.num_train=20000", 8785), ("data.num_eval=3000", 1215)]
)
def test_more_questions_than_a_finite_task_has_are_refused(
    checkpoint: Path, override: str, capacity: int
) -> None:
    (refusal,) = refusals(checkpoint, "experiment=smoke", override)
    assert f"{refusal.key}={refusal.value}" == override
    assert f"only {capacity}" in refusal.rule and f"{refusal.key}={capacity}" in refusal.remedy
    c = accept(checkpoint, "experiment=smoke", f"{refusal.key}={capacity}")
    assert c.data.source == "two_digit_addition"


def test_an_endless_task_has_no_limit_of_questions(checkpoint: Path) -> None:
    assert accept(checkpoint, "data.num_train=1000000").data.num_train == 1_000_000
