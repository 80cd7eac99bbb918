"""Counts of questions that an embedded task does not have."""

from pathlib import Path

import pytest

from megatron_rl.config.cli import compose
from megatron_rl.contracts.refusal import ConfigurationRefused


@pytest.mark.parametrize(
    ("override", "side", "most"),
    [("data.num_train=20000", "training", 8785), ("data.num_eval=3000", "held-out", 1215)],
)
def test_more_questions_than_a_finite_task_has(
    checkpoint: Path, override: str, side: str, most: int
) -> None:
    key, _, value = override.partition("=")
    with pytest.raises(ConfigurationRefused) as refused:
        compose([f"model.path={checkpoint}", "experiment=smoke", override])
    (refusal,) = refused.value.refusals
    assert str(refusal).startswith(f"{key}={value}: two_digit_addition has {most} {side} questions")
    assert f"{key}={most}" in refusal.remedy
    config = compose([f"model.path={checkpoint}", "experiment=smoke", f"{key}={most}"])
    assert config.data.source == "two_digit_addition"


def test_a_task_without_end_has_no_limit(checkpoint: Path) -> None:
    assert (
        compose([f"model.path={checkpoint}", "data.num_train=1000000"]).data.num_train == 1_000_000
    )
