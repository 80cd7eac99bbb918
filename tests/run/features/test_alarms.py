"""Alarms warn once when a problem begins, and name a remedy."""

import re
from pathlib import Path

import pytest

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import EngineSettings
from megatron_rl.credit.assign import Credit
from megatron_rl.run.features.alarms.alarms import (
    AccountAlarm,
    MismatchAlarm,
    MismatchState,
    SelectionAlarm,
    UnchangedWeightsAlarm,
    ZeroVarianceBalanceAlarm,
)
from tests.support.groups import group

ROOT = Path(__file__).resolve().parents[3]
TRAINED = {"train/samples": 8.0}
FP8_ENGINES = EngineSettings(quantization="fp8")


def advantages(zero_variance: float, others: float = 1.0, samples: float = 3.0) -> dict[str, float]:
    return {
        "policy/advantage_zero_variance": zero_variance,
        "policy/advantage_mixed": others,
        "train/zero_variance_samples": samples,
    }


def untrained_step(kind: str, count: float = 4.0) -> dict[str, float]:
    return {"train/samples": 0.0, f"rollout/groups/{kind}": count}


def test_mismatch_above_five_times_that_of_bfloat16_warns_once() -> None:
    alarm = MismatchAlarm(FP8_ENGINES)
    alarm.state = MismatchState(steps=2, k3_sum=0.004)
    mismatches = (0.009, 0.0101, 0.02, 0.01, float("nan"))
    warnings = [alarm.observe({"mismatch/k3_kl": mismatch}) for mismatch in mismatches]
    assert [text is not None for text in warnings] == [False, True, False, False, True]
    assert "0.0101 is 5.05 times" in str(warnings[1]) and "0.002" in str(warnings[1])


def test_mismatch_without_a_comparison_is_silent() -> None:
    alarm = MismatchAlarm(FP8_ENGINES)
    assert alarm.observe({"mismatch/k3_kl": 5.0}) is None
    assert alarm.state == MismatchState() and alarm.metrics() == {}
    alarm.state = MismatchState(steps=2, k3_sum=0.004)
    assert alarm.observe({}) is None, "the step trained nothing"


def test_mismatch_is_compared_with_bfloat16_steps_of_the_same_run() -> None:
    alarm = MismatchAlarm(EngineSettings(dtype="bfloat16"))
    for mismatch in (0.001, 0.003, float("nan"), 0.0):
        assert alarm.observe({"mismatch/k3_kl": mismatch}) is None
    assert alarm.state == MismatchState(steps=2, k3_sum=0.004)
    assert alarm.metrics() == {}, "step 1 of this run compares nothing"
    later_alarm = MismatchAlarm(FP8_ENGINES)
    later_alarm.state = alarm.state
    assert later_alarm.metrics() == {"mismatch/bf16/k3_kl": 0.002}
    assert later_alarm.observe({"mismatch/k3_kl": 0.009}) is None
    warning = later_alarm.observe({"mismatch/k3_kl": 0.0101})
    assert "0.0101 is 5.05 times" in str(warning)
    assert "0.002, the mean of 2 earlier step(s) of this run" in str(warning)
    assert later_alarm.state == alarm.state, "steps with FP8 engines do not count"


@pytest.mark.parametrize(
    "engine",
    [
        EngineSettings(dtype="float32"),
        EngineSettings(dtype="bfloat16", quantization="fp8"),
    ],
)
def test_mismatch_of_other_engines_is_not_that_of_bfloat16(engine: EngineSettings) -> None:
    alarm = MismatchAlarm(engine)
    alarm.observe({"mismatch/k3_kl": 0.001})
    assert alarm.state == MismatchState()


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


def engine_account(engine_tokens: float, unaccounted_tokens: float) -> dict[str, float]:
    return {
        "account/generated": engine_tokens - unaccounted_tokens,
        "account/engine_tokens": engine_tokens,
        "account/unaccounted": unaccounted_tokens,
    }


@pytest.mark.parametrize(("share", "is_warned"), [(0.0, False), (0.01, False), (0.011, True)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_small_share_of_unaccounted_tokens_is_no_warning(
    share: float, sign: int, is_warned: bool
) -> None:
    warning = AccountAlarm().observe(engine_account(1e6, sign * share * 1e6))
    assert (warning is not None) == is_warned


def test_unaccounted_tokens_warn_once_until_they_end() -> None:
    alarm = AccountAlarm()
    losses = (0, 300, 300, 0, 400)
    warnings = [alarm.observe(engine_account(1000.0, loss)) for loss in losses]
    assert [text is not None for text in warnings] == [False, True, False, False, True]
    assert "300 of 1000 tokens that the engines sampled are in no class" in str(warnings[1])
    assert "another program" in str(warnings[1])
    fewer = str(AccountAlarm().observe(engine_account(1000.0, -300.0)))
    assert "300 fewer" in fewer


@pytest.mark.parametrize(
    ("missing", "words"), [(3.0, "3 of 180 .* in no class"), (-7.0, "7 of 180 .* counted twice")]
)
def test_without_counts_of_the_engines_every_token_must_be_in_one_class(
    missing: float, words: str
) -> None:
    values = {"account/generated": 180.0, "account/unaccounted": missing}
    assert re.search(words, str(AccountAlarm().observe(values)))
    assert AccountAlarm().observe(values | {"account/unaccounted": 0.0}) is None
    assert AccountAlarm().observe({}) is None


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


@pytest.mark.parametrize("kind", ["all_incorrect", "tied_incorrect"])
def test_where_every_answer_is_incorrect_the_warning_names_the_supervised_start(kind: str) -> None:
    alarm = UnchangedWeightsAlarm()
    warnings = [alarm.observe(untrained_step(kind)) for _ in range(3)]
    check_whole_way(str(warnings[-1]))
    check_whole_way(str(alarm.summary()))


def check_whole_way(warning: str) -> None:
    """Check that a warning names a section of the docs that leads from rows to a report."""
    assert "experiment=cold_start" in warning
    page, heading = re.findall(r'\((docs/\w+\.md), "([^"]+)"\)', warning)[0]
    text = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2]
    section = text.partition("\n## ")[0]
    stages = (
        "python make_rows.py > reverse.jsonl",
        "experiment=cold_start",
        "run.name=start",
        "experiment=quickstart",
        "model.path=runs/start/checkpoints/step-",
        "run.name=practice",
        "launch/report.py samples runs/practice",
        "launch/report.py runs/practice",
    )
    places = [section.find(stage) for stage in stages]
    assert -1 not in places and places == sorted(places), dict(zip(stages, places, strict=True))


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


def test_unchanged_weights_names_the_probes_where_the_selection_stopped_them_all() -> None:
    stopped_probes = [group(1.0, 1.0), group(1.0, 1.0)]
    metrics = Credit(GrpoSettings()).assign([], stopped_probes).metrics()
    alarm = UnchangedWeightsAlarm()
    warnings = [alarm.observe(metrics | {"train/samples": 0.0}) for _ in range(3)]
    assert "the selection stopped every probe" in str(warnings[-1])
    check_whole_way(str(warnings[-1]))
    assert "incorrect:" not in str(warnings[-1])


def test_selection_warns_when_a_problem_begins_and_not_while_it_lasts() -> None:
    alarm = SelectionAlarm()
    assert alarm.observe({}) is None
    assert alarm.observe({"select/miscalibrated": 0.0, "select/unfilled": 0.0}) is None
    warning = str(alarm.observe({"select/miscalibrated": 0.125, "select/calibration_steps": 5.0}))
    assert warning.startswith("warning: over the last 5 steps")
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
