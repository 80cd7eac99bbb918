"""A run that learns nothing says so."""

from megatron_rl.records.idle_steps import UnchangedWeightsAlarm

USEFUL = {"train/samples": 8.0}


def flat(kind: str, count: float = 4.0) -> dict[str, float]:
    return {"train/samples": 0.0, f"rollout/groups/{kind}": count}


def test_a_run_that_trained_every_step_says_nothing() -> None:
    idle = UnchangedWeightsAlarm()
    assert [idle.note(USEFUL) for _ in range(5)] == [None] * 5
    assert idle.summary() is None


def test_steps_in_a_row_without_a_gradient_warn_with_what_to_change() -> None:
    idle = UnchangedWeightsAlarm()
    said = [idle.note(flat("all_incorrect")) for _ in range(13)]
    assert [i + 1 for i, text in enumerate(said) if text] == [3, 6, 12]
    assert said[2] is not None and said[2].startswith(
        "warning: 3 steps in a row trained nothing; every answer is wrong"
    )
    assert "rollout.samples_per_prompt" in said[2]


def test_a_step_that_trains_begins_the_count_again() -> None:
    idle = UnchangedWeightsAlarm()
    steps = [
        flat("all_correct"),
        flat("all_correct"),
        USEFUL,
        flat("all_correct"),
        flat("all_correct"),
    ]
    assert [idle.note(step) for step in steps] == [None] * 5


def test_the_end_sums_up_and_names_what_most_groups_were() -> None:
    idle = UnchangedWeightsAlarm()
    for step in [USEFUL, flat("all_correct"), USEFUL, *[flat("too_few_verdicts", 9.0)] * 2]:
        idle.note(step)
    summary = idle.summary()
    assert summary is not None and summary.startswith(
        "3 of 5 steps trained nothing: the reward gives no verdicts"
    )
