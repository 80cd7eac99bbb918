import re
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.prompt import Question
from megatron_rl.prompts import column_addition, two_digit_addition
from megatron_rl.prompts.question import BadRows, PromptDataError
from megatron_rl.prompts.split import (
    Split,
    hold_out,
    keep_apart,
    keep_sources_apart,
    split_generator,
)
from megatron_rl.rewards import open_answer_reader


def make_question(text: str, answer: str = "1", origin: str = "", id: str = "") -> Question:
    return Question(id=id or text, text=text, answer=answer, task="t", origin=origin)


def endless_questions() -> Iterator[Question]:
    return (make_question(f"question {i}") for i in count())


def texts_of(questions: list[Question]) -> list[str]:
    return [question.text for question in questions]


@pytest.mark.parametrize("generator", [column_addition.questions, two_digit_addition.questions])
def test_no_seed_trains_on_held_out_questions_of_another(
    generator: Callable[[int], Iterator[Question]],
) -> None:
    splits = [split_generator(generator(seed), 2000, 300) for seed in range(3)]
    train_identities = {q.identity for split in splits for q in split.train}
    held_out_identities = {q.identity for split in splits for q in split.held_out}
    assert train_identities.isdisjoint(held_out_identities)
    assert all(len(split.train) == 2000 for split in splits)
    assert all(len(split.held_out) == 300 for split in splits)


def test_a_larger_split_extends_a_smaller_one() -> None:
    small = split_generator(endless_questions(), 10, 5)
    large = split_generator(endless_questions(), 100, 20)
    assert large.train[:10] == small.train
    assert large.held_out[:5] == small.held_out


def test_repeated_texts_are_used_once() -> None:
    twice = (question for question in endless_questions() for _ in range(2))
    split = split_generator(twice, 20, 4)
    assert len(set(texts_of(split.train))) == 20
    assert split.duplicates > 0


FINITE = list(islice(endless_questions(), 40))


@pytest.mark.parametrize("repeat", [iter, cycle])
@pytest.mark.parametrize(("num_train", "num_eval"), [(50, 0), (5, 50), (0, 50)])
def test_too_few_questions_are_refused(
    repeat: Callable[[list[Question]], Iterator[Question]], num_train: int, num_eval: int
) -> None:
    words = rf"data\.num_train={num_train}, .* only \d+ training and \d+ held-out"
    with pytest.raises(PromptDataError, match=words):
        split_generator(repeat(FINITE), num_train, num_eval)


def hold_out_texts(size: int, num_eval: int) -> tuple[set[str], set[str]] | None:
    """Return the texts of both sides, None if the split is refused."""
    questions = list(islice(endless_questions(), size))
    try:
        split = hold_out(questions, num_eval, BadRows("fail"))
    except PromptDataError as error:
        assert "data.eval_path" in str(error)
        return None
    assert len(split.held_out) == num_eval
    assert len(split.train) + len(split.held_out) + len(split.reserved) == size
    return set(texts_of(split.train)), set(texts_of(split.held_out))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(size=st.integers(2, 700), num_eval=st.integers(1, 120), other_num_eval=st.integers(1, 120))
def test_no_num_eval_trains_on_questions_that_another_holds_out(
    size: int, num_eval: int, other_num_eval: int
) -> None:
    first_sides = hold_out_texts(size, num_eval)
    second_sides = hold_out_texts(size, other_num_eval)
    if first_sides is None or second_sides is None:
        return
    first_train, first_held_out = first_sides
    second_train, second_held_out = second_sides
    assert first_train == second_train
    assert first_train.isdisjoint(first_held_out | second_held_out)
    smaller_set, larger_set = sorted((first_held_out, second_held_out), key=len)
    assert smaller_set <= larger_set


@pytest.mark.parametrize(("size", "limit"), [(2, 1), (7, 1), (50, 12), (300, 64)])
def test_a_small_file_reserves_a_quarter_and_at_most_64_questions(size: int, limit: int) -> None:
    assert hold_out_texts(size, limit) is not None
    assert hold_out_texts(size, limit + 1) is None


def test_a_large_file_reserves_one_question_in_eight_and_rows_added_later_move_none() -> None:
    questions = list(islice(endless_questions(), 4000))
    small_split = hold_out(questions[:2000], 200, BadRows("fail"))
    large_split = hold_out(questions, 200, BadRows("fail"))
    assert len(small_split.train) == pytest.approx(2000 * 7 / 8, rel=0.02)
    assert set(texts_of(small_split.train)) <= set(texts_of(large_split.train))


def test_order_does_not_change_the_held_out_questions() -> None:
    questions = list(islice(endless_questions(), 50))
    split = hold_out(questions, 8, BadRows("fail"))
    reverse_split = hold_out(questions[::-1], 8, BadRows("fail"))
    assert set(texts_of(reverse_split.held_out)) == set(texts_of(split.held_out))


def test_holding_out_more_than_the_reserve_is_refused() -> None:
    questions = [make_question("a"), make_question("b")]
    words = r"data\.num_eval=2: .*1 of its 2 .*data\.num_eval=1, .*data\.eval_path"
    with pytest.raises(PromptDataError, match=words):
        hold_out(questions, 2, BadRows("fail"))


def test_a_single_question_cannot_be_split() -> None:
    with pytest.raises(PromptDataError, match=r"1 usable question, .*data\.eval_path"):
        hold_out([make_question("a")], 1, BadRows("fail"))


def test_repeated_questions_are_used_once() -> None:
    questions = [
        make_question("2+2=", "4", "f line 1"),
        make_question("2 + 2 =", "4"),
        make_question("1+1=", "2"),
        make_question("2+2=", "4", "f line 4"),
    ]
    assert hold_out(questions, 1, BadRows("fail")).duplicates == 1


def test_a_repeated_question_with_another_answer_is_a_bad_row() -> None:
    questions = [
        make_question("2+2=", "4", "f line 1"),
        make_question("1+1=", "2"),
        make_question("1+2=", "3"),
        make_question("2+2=", "5", "f line 5"),
    ]
    words = r"f line 5: repeats the question of f line 1 .* \('5'\)"
    with pytest.raises(PromptDataError, match=words):
        hold_out(questions, 1, BadRows("fail"))
    bad_rows = BadRows("skip")
    assert len(hold_out(questions, 1, bad_rows).train) == 2
    assert bad_rows.count == 1


def test_held_out_questions_leave_the_training_file() -> None:
    train = [make_question("What is  x?"), make_question("b")]
    held_out = [make_question("what is x?"), make_question("c")]
    split = keep_apart(train, held_out, BadRows("fail"))
    assert texts_of(split.train) == ["b"]
    assert split.overlapping == 1


def test_a_training_question_that_is_held_out_with_another_answer_is_a_bad_row() -> None:
    train = [make_question("2+2=", "4", "t 1"), make_question("b")]
    held_out = [make_question("2+2=", "5", "e 1"), make_question("c")]
    words = r"t 1: repeats the question of e 1, which is held out, with another answer \('4'\)"
    with pytest.raises(PromptDataError, match=words):
        keep_apart(train, held_out, BadRows("fail"))
    bad_rows = BadRows("skip")
    split = keep_apart(train, held_out, bad_rows)
    assert (texts_of(split.train), texts_of(split.held_out)) == (["b"], ["2+2=", "c"])
    assert (split.overlapping, bad_rows.count) == (0, 1)


SAME_ANSWERS = [
    ("last_number", "2", "2.0"),
    ("last_number", "1,234.50", "1234.5"),
    ("last_number", "The answer is 7.", "#### 7"),
    ("last_number", "-0", "0"),
    ("last_number", "Paris", "Paris"),  # a bad row for another reason
    ("last_line", "so\nParis", "Paris"),
    ("boxed", r"\boxed{x + 1}", "x+1"),
]
OTHER_ANSWERS = [
    ("last_number", "2", "2.5"),
    ("last_number", "2", "Paris"),
    ("last_number", "Paris", "Rome"),
    ("last_line", "1 2", "12"),
    ("last_line", "Paris", "paris"),
]


def count_contradictions(rule: str, first: str, second: str) -> list[int]:
    """Return the number of bad rows if one question has two answers in one, two and two files."""
    questions = [
        make_question("2+2=", first, "f 1"),
        make_question(" 2+2=", second, "f 2"),
        make_question("1+1="),
        make_question("1+2="),
    ]
    splits = {"a": Split(questions[:1], []), "b": Split(questions[1:], [])}
    calls: list[Callable[[BadRows], object]] = [
        lambda bad_rows: hold_out(questions, 1, bad_rows),
        lambda bad_rows: keep_apart(questions[:1], questions[1:], bad_rows),
        lambda bad_rows: keep_sources_apart(splits, bad_rows),
    ]
    counts = []
    for call in calls:
        bad_rows = BadRows("skip", open_answer_reader(RewardSettings(answer=rule)))
        call(bad_rows)
        counts.append(bad_rows.count)
    return counts


@pytest.mark.parametrize(("rule", "first", "second"), SAME_ANSWERS)
def test_answers_that_the_scorer_takes_for_the_same_are_no_contradiction(
    rule: str, first: str, second: str
) -> None:
    assert count_contradictions(rule, first, second) == [0, 0, 0]


@pytest.mark.parametrize(("rule", "first", "second"), OTHER_ANSWERS)
def test_answers_that_the_scorer_tells_apart_are_a_contradiction(
    rule: str, first: str, second: str
) -> None:
    assert count_contradictions(rule, first, second) == [1, 1, 1]


def make_chat(number: int, text: str, answer: str = "1") -> Question:
    """A question whose identity is not its text, such as a row with messages."""
    return Question(str(number), text, answer, "t", identity=f"chat {number}")


@pytest.mark.parametrize("num_prompts", [400, 60, 10, 2, 1])
def test_prompts_do_not_change_which_questions_are_reserved(num_prompts: int) -> None:
    """A template that drops parts of the chats writes the same prompt for several of them."""
    chats = [make_chat(i, f"prompt {i}") for i in range(400)]
    same_prompts = [make_chat(i, f"prompt {i % num_prompts}") for i in range(400)]
    whole = hold_out(chats, 1, BadRows("fail"))
    split = hold_out(same_prompts, 1, BadRows("fail"))
    for side in ("train", "held_out", "reserved"):
        ids = {q.id for q in getattr(split, side)}
        assert ids <= {q.id for q in getattr(whole, side)} | {q.id for q in whole.reserved}
    assert {q.id for q in split.train} <= {q.id for q in whole.train}
    prompts = texts_of(split.train) + texts_of(split.held_out) + texts_of(list(split.reserved))
    assert sorted(prompts) == sorted({q.text for q in same_prompts}), "each prompt is used once"
    assert len(prompts) + split.duplicates + split.overlapping == 400


@pytest.mark.parametrize("apart", [False, True])
def test_a_prompt_with_two_answers_is_a_bad_row(apart: bool) -> None:
    chats = [make_chat(i, f"prompt {i}") for i in range(40)]
    chats += [make_chat(i + 40, f"prompt {i}", "2") for i in range(40)]
    bad_rows = BadRows("skip")
    sides = (chats[::2], chats[1::2])
    split = keep_apart(*sides, bad_rows) if apart else hold_out(chats, 4, bad_rows)
    assert bad_rows.count == 40 and split.duplicates == split.overlapping == 0
    assert all(re.search(r"repeats the prompt of \d+.* with another", m) for m in bad_rows.messages)
    assert len(split.train) + len(split.held_out) + len(split.reserved) == 40


def named_questions(**text_by_id: str) -> list[Question]:
    return [make_question(text, id=id_) for id_, text in text_by_id.items()]


def test_an_id_of_two_questions_in_both_files_gets_a_prefix_in_the_held_out_one() -> None:
    """Two files often number their rows from 0, as those of verl do."""
    train = named_questions(row_0="a", row_1="b", row_2="c")
    held_out = named_questions(row_0="a", row_1="d", row_2="e", row_3="f")
    split = keep_apart(train, held_out, BadRows("fail"))
    assert [(q.id, q.text) for q in split.train] == [("row_1", "b"), ("row_2", "c")]
    assert [(q.id, q.text) for q in split.held_out] == [
        ("row_0", "a"),
        ("held_out/row_1", "d"),
        ("held_out/row_2", "e"),
        ("row_3", "f"),
    ]
    assert split.overlapping == 1


def test_an_id_with_the_prefix_stays_unique() -> None:
    train = [make_question("a", id="x"), make_question("b", id="held_out/held_out/x")]
    held_out = [make_question("c", id="x"), make_question("d", id="held_out/x")]
    split = keep_apart(train, held_out, BadRows("fail"))
    assert [q.id for q in split.held_out] == ["held_out/held_out/held_out/x", "held_out/x"]
