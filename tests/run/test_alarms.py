"""Alarms warn once when a problem begins, and name a remedy."""

from megatron_rl.run.alarms import (
    SelectionAlarm,
    UnchangedWeightsAlarm,
    ZeroVarianceBalanceAlarm,
)

TRAINED = {"train/samples": 8.0}


def advantages(zero_variance: float, others: float = 1.0, samples: float = 3.0) -> dict[str, float]:
    return {
        "policy/advantage_zero_variance": zero_variance,
        "policy/advantage_mixed": others,
        "train/zero_variance_samples": samples,
    }


def untrained_step(kind: str, count: float = 4.0) -> dict[str, float]:
    return {"train/samples": 0.0, f"rollout/groups/{kind}": count}


def test_zero_variance_balance_warns_once_when_the_ratio_leaves_its_range() -> None:
    alarm = ZeroVarianceBalanceAlarm()
    ratios = (0.1, 0.01, 0.001, 0.3, 0.6, 0.02)
    warnings = [alarm.observe(advantages(ratio)) for ratio in ratios]
    assert [text is not None for text in warnings] == [False, True, False, False, True, False]
    assert "raise credit.zvp_alpha" in str(warnings[1])
    assert "0.01 times" in str(warnings[1])
    assert "lower credit.zvp_alpha" in str(warnings[4])


def test_zero_variance_balance_needs_both_kinds_of_groups() -> None:
    assert ZeroVarianceBalanceAlarm().observe(advantages(9.0, samples=0.0)) is None
    assert ZeroVarianceBalanceAlarm().observe(advantages(9.0, others=0.0)) is None
    assert ZeroVarianceBalanceAlarm().observe({}) is None


def test_unchanged_weights_is_silent_when_every_step_trains() -> None:
    alarm = UnchangedWeightsAlarm()
    assert [alarm.observe(TRAINED) for _ in range(5)] == [None] * 5
    assert alarm.summary() is None


def test_unchanged_weights_warns_after_3_6_and_12_steps_with_a_remedy() -> None:
    alarm = UnchangedWeightsAlarm()
    warnings = [alarm.observe(untrained_step("all_incorrect")) for _ in range(13)]
    assert [step + 1 for step, text in enumerate(warnings) if text] == [3, 6, 12]
    assert str(warnings[2]).startswith("warning: 3 consecutive steps trained nothing")
    assert "rollout.samples_per_prompt" in str(warnings[2])


def test_unchanged_weights_counts_anew_after_a_step_that_trains() -> None:
    alarm = UnchangedWeightsAlarm()
    correct = untrained_step("all_correct")
    steps = [correct, correct, TRAINED, correct, correct]
    assert [alarm.observe(step) for step in steps] == [None] * 5


def test_unchanged_weights_summary_names_the_most_frequent_kind_of_group() -> None:
    alarm = UnchangedWeightsAlarm()
    failures = [untrained_step("too_few_verdicts", 9.0)] * 2
    for step in [TRAINED, untrained_step("all_correct"), TRAINED, *failures]:
        alarm.observe(step)
    assert str(alarm.summary()).startswith("3 of 5 steps trained nothing: the reward fails")


def test_selection_warns_when_a_problem_begins_and_not_while_it_lasts() -> None:
    alarm = SelectionAlarm()
    assert alarm.observe({}) is None
    assert alarm.observe({"select/miscalibrated": 0.0, "select/unfilled": 0.0}) is None
    warning = str(alarm.observe({"select/miscalibrated": 0.125}))
    assert warning.startswith("warning: over 20 steps")
    assert "0.12" in warning
    assert "missing" not in warning
    assert alarm.observe({"select/miscalibrated": 0.2}) is None
    warning = str(alarm.observe({"select/miscalibrated": 0.2, "select/unfilled": 7.0}))
    assert warning.startswith("warning: 7 mixed groups are missing")
    assert "0.2" not in warning
    assert alarm.observe({}) is None


def test_selection_warns_again_when_a_problem_returns() -> None:
    alarm = SelectionAlarm()
    shortage = {"select/unfilled": 1.0}
    assert alarm.observe(shortage) is not None
    assert alarm.observe({}) is None
    assert "selection.budget" in str(alarm.observe(shortage))
