from megatron_rl.records.selection_alarm import SelectionAlarm


def test_what_is_wrong_is_said_when_it_begins_and_not_again_while_it_lasts() -> None:
    alarm = SelectionAlarm()
    assert (
        alarm.note({}) is None
        and alarm.note({"select/miscalibrated": 0.0, "select/unfilled": 0.0}) is None
    )
    said = alarm.note({"select/miscalibrated": 0.125})
    assert (
        said is not None
        and said.startswith("warning: over 20 steps")
        and "0.12" in said
        and "missing" not in said
    )
    assert alarm.note({"select/miscalibrated": 0.2}) is None
    said = alarm.note({"select/miscalibrated": 0.2, "select/unfilled": 7.0})
    assert (
        said is not None
        and said.startswith("warning: 7 mixed groups are missing")
        and "0.2" not in said
    )
    assert alarm.note({}) is None
    assert "selection.budget" in str(alarm.note({"select/unfilled": 1.0})), "it began again"
