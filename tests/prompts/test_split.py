from collections.abc import Iterator
from itertools import count, cycle, islice

import pytest

from megatron_rl.prompts import column_addition, two_digit_addition
from megatron_rl.prompts.question import BadRows, PromptDataError, Question
from megatron_rl.prompts.split import draw_split, hold_out, keep_apart


def ask(text: str, answer: str = "1", origin: str = "", id: str = "") -> Question:
    return Question(id=id or text, text=text, answer=answer, task="t", origin=origin)


def endless() -> Iterator[Question]:
    return (ask(f"question {i}") for i in count())


def failing() -> BadRows:
    return BadRows("fail")


@pytest.mark.parametrize("questions", [column_addition.questions, two_digit_addition.questions])
def test_no_seed_trains_on_what_another_holds_out(questions) -> None:
    splits = [draw_split(questions(seed), 2000, 300) for seed in range(3)]
    trained = {q.identity for split in splits for q in split.train}
    held_out = {q.identity for split in splits for q in split.held_out}
    assert trained.isdisjoint(held_out)
    assert all(len(s.train) == 2000 and len(s.held_out) == 300 for s in splits)


def test_the_split_does_not_depend_on_how_much_is_asked_for() -> None:
    small, large = draw_split(endless(), 10, 5), draw_split(endless(), 100, 20)
    assert large.train[:10] == small.train
    assert large.held_out[:5] == small.held_out


def test_repeated_texts_are_used_once() -> None:
    doubled = (q for q in endless() for _ in range(2))
    split = draw_split(doubled, 20, 4)
    assert len({q.text for q in split.train}) == 20
    assert split.duplicates > 0


@pytest.mark.parametrize("wanted", [(50, 0), (5, 50), (0, 50)])
def test_a_task_with_too_few_questions_says_how_many_it_has(wanted: tuple[int, int]) -> None:
    finite = list(islice(endless(), 40))
    for questions in (finite, cycle(finite)):
        with pytest.raises(
            PromptDataError, match=r"data\.num_train=.* gave only \d+ training and \d+ held-out"
        ):
            draw_split(questions, *wanted)


def test_holding_out_of_a_file_is_a_partition_that_order_does_not_change() -> None:
    questions = list(islice(endless(), 50))
    split = hold_out(questions, 8, failing())
    assert len(split.held_out) == 8
    assert sorted(q.text for q in split.train + split.held_out) == sorted(q.text for q in questions)
    again = hold_out(questions[::-1], 8, failing())
    assert {q.text for q in again.held_out} == {q.text for q in split.held_out}


def test_holding_out_everything_is_refused() -> None:
    with pytest.raises(
        PromptDataError, match=r"data\.num_eval=2: .* 2 usable questions .*data\.eval_path"
    ):
        hold_out([ask("a"), ask("b")], 2, failing())


def test_a_repeated_question_is_used_once_and_a_contradiction_is_a_bad_row() -> None:
    rows = [
        ask("2+2=", "4", "f line 1"),
        ask("2 + 2 =", "4"),
        ask("1+1=", "2"),
        ask("2+2=", "4", "f line 4"),
    ]
    split = hold_out(rows, 1, failing())
    assert split.duplicates == 1
    rows.append(ask("2+2=", "5", "f line 5"))
    with pytest.raises(
        PromptDataError, match=r"f line 5: repeats the question of f line 1 with .* \('5'\)"
    ):
        hold_out(rows, 1, failing())
    bad = BadRows("skip")
    assert len(hold_out(rows, 1, bad).train) == 2
    assert bad.count == 1


def test_held_out_questions_leave_the_training_file() -> None:
    split = keep_apart([ask("What is  x?"), ask("b")], [ask("what is x?"), ask("c")], failing())
    assert [q.text for q in split.train] == ["b"]
    assert split.overlapping == 1


def test_an_id_of_both_files_is_a_bad_row_unless_it_is_the_same_question() -> None:
    train = [ask("a", id="1", origin="t line 1"), ask("b", id="2", origin="t line 2")]
    held_out = [ask("a", id="1", origin="e line 1"), ask("c", id="2", origin="e line 2")]
    with pytest.raises(PromptDataError, match="e line 2: id '2' is already used in t line 2"):
        keep_apart(train, held_out, failing())
    bad = BadRows("skip")
    split = keep_apart(train, held_out, bad)
    assert ([q.text for q in split.train], [q.text for q in split.held_out]) == (["b"], ["a"])
    assert (split.overlapping, bad.count) == (1, 1)
