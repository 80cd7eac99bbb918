"""Rows that are not used: how many are kept for messages, and how long their reasons are."""

import pytest

from megatron_rl.prompts.question import BadRows, CheckedRows, PromptDataError, shorten


def test_the_first_twenty_bad_rows_are_examples() -> None:
    bad_rows = BadRows("skip")
    for number in range(1, 26):
        bad_rows.report(f"f line {number}", "no answer")
        bad_rows.leave_out(f"f line {number}", "repeats another")
    assert bad_rows.count == 25
    assert bad_rows.examples == [f"f line {number}: no answer" for number in range(1, 21)]
    assert len(bad_rows.messages) == 50


def test_the_first_ten_thousand_rows_are_listed() -> None:
    bad_rows = BadRows("skip")
    for number in range(10_001):
        bad_rows.leave_out(f"f line {number}", "repeats another")
    assert bad_rows.count == 0
    assert len(bad_rows.messages) == 10_000


def test_a_text_is_cut_after_three_hundred_characters() -> None:
    assert shorten("x" * 300) == "x" * 300
    assert shorten("x" * 301) == "x" * 300 + "…"
    assert shorten("one\n  two\t") == "one two"


def test_the_first_three_reasons_are_examples_with_their_first_row() -> None:
    checked_rows = CheckedRows(BadRows("fail"))
    for number in range(1, 13):
        checked_rows.add_bad(f"line {number}", f"reason {number % 6}")
    assert checked_rows.num_bad == 12
    assert checked_rows.examples == "".join(f"\n  line {n}: reason {n}" for n in (1, 2, 3))


def test_a_bad_row_before_the_first_usable_one_is_reported_with_it() -> None:
    checked_rows = CheckedRows(BadRows("fail"))
    checked_rows.add_bad("line 1", "no answer")
    checked_rows.add_bad("line 2", "no prompt")
    with pytest.raises(PromptDataError, match=r"^line 1: no answer\. .*data\.on_bad_row=skip"):
        checked_rows.add_usable()
    with pytest.raises(PromptDataError, match=r"^line 4: no answer\. .*data\.on_bad_row=skip"):
        checked_rows.add_bad("line 4", "no answer")


def test_bad_rows_that_are_left_out_are_reported_at_once() -> None:
    bad_rows = BadRows("skip")
    checked_rows = CheckedRows(bad_rows)
    checked_rows.add_bad("line 1", "no answer")
    checked_rows.add_usable()
    checked_rows.add_bad("line 3", "no answer")
    assert bad_rows.count == checked_rows.num_bad == 2
