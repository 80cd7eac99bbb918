"""Split of questions into training and held-out questions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.evaluations import HELD_OUT
from megatron_rl.contracts.prompt import Question, identity_of_text
from megatron_rl.prompts.question import BadRows, PromptDataError

# One identity in so many belongs to the held-out side.
_HELD_OUT_DIVISOR = 8
# A small file reserves one question in four, and at most so many.
_SMALL_FILE_DIVISOR = 4
_MAX_SMALL_RESERVE = 64
_HASH_RANGE = 1 << 64
# A generator that yields more unusable questions in a row is exhausted.
_MAX_UNUSABLE = 20_000


@dataclass(frozen=True)
class Split:
    """Questions of both sides.

    duplicates: number of rows that are not used because they repeat a question.
    overlapping: number of training rows that are not used because their question is held out.
    reserved: questions that are in neither side, because another data.num_eval holds them out.
    """

    train: list[Question]
    held_out: list[Question]
    duplicates: int = 0
    overlapping: int = 0
    reserved: Sequence[Question] = ()


def split_generator(
    questions: Iterable[Question], num_train: int, num_eval: int, *, section: str = "data"
) -> Split:
    """Fill both sides from a generator. One identity in eight belongs to the held-out side.

    A question with a repeated text is skipped. section: of the keys, for messages.

    Raises `PromptDataError` if the generator ends, or yields 20,000 unusable questions in a row,
    before both sides are full.
    """
    train: list[Question] = []
    held_out: list[Question] = []
    texts: set[str] = set()
    num_unusable = 0
    duplicates = 0
    for question in questions:
        is_held_out = _rank(question.identity) % _HELD_OUT_DIVISOR == 0
        side = held_out if is_held_out else train
        limit = num_eval if is_held_out else num_train
        is_duplicate = question.text in texts
        duplicates += is_duplicate
        if is_duplicate or len(side) == limit:
            num_unusable += 1
        else:
            texts.add(question.text)
            side.append(question)
            num_unusable = 0
        if len(train) == num_train and len(held_out) == num_eval:
            return Split(train, held_out, duplicates=duplicates)
        if num_unusable > _MAX_UNUSABLE:
            break
    raise PromptDataError(
        f"{section}.num_train={num_train}, {section}.num_eval={num_eval}: the source has only "
        f"{len(train)} training and {len(held_out)} held-out questions. Lower these keys, or "
        "change the source's settings so that it has more questions"
    )


def hold_out(
    questions: Sequence[Question], num_eval: int, bad_rows: BadRows, *, section: str = "data"
) -> Split:
    """Reserve questions of a file for evaluation, and hold `num_eval` of them out.

    The file alone decides which questions are reserved: those whose identities have the smallest
    hashes, one in eight, or one in four of a small file. They never train, so runs with different
    `num_eval` on one file do not train on each other's held-out questions.

    A repeated question is used once. So is a prompt that the chat template writes for several
    questions, which does not change what is reserved. With another answer, it is a bad row.

    section: of the keys, for messages.

    Raises `PromptDataError` if fewer than `num_eval` questions are reserved, or if the file has a
    single question.
    """
    unique, duplicates = _drop_repeats(questions, _identity, bad_rows)
    if len(unique) < 2:
        raise PromptDataError(
            f"{section}.num_eval={num_eval}: the file has only {len(unique)} usable question, so "
            "none is left to train on. Add questions, or name a file of held-out questions in "
            f"{section}.eval_path"
        )
    reserve = _reserve_of(unique)
    reserved_identities = {question.identity for question in reserve}
    reserve, reserve_repeats = _drop_repeats(reserve, _text, bad_rows)
    if num_eval > len(reserve):
        raise PromptDataError(
            f"{section}.num_eval={num_eval}: the file reserves {len(reserve)} of its {len(unique)} "
            "questions for evaluation, so that no run trains on questions that another run holds "
            f"out. Set at most {section}.num_eval={len(reserve)}, or name a file of held-out "
            f"questions in {section}.eval_path"
        )
    train = [question for question in unique if question.identity not in reserved_identities]
    train, overlapping = _drop_held_out(train, reserve, bad_rows)
    train, train_repeats = _drop_repeats(train, _text, bad_rows)
    held_out_identities = {question.identity for question in reserve[:num_eval]}
    return Split(
        train=train,
        held_out=[question for question in unique if question.identity in held_out_identities],
        duplicates=duplicates + reserve_repeats + train_repeats,
        overlapping=overlapping,
        reserved=reserve[num_eval:],
    )


def _reserve_of(unique: Sequence[Question]) -> list[Question]:
    """Return the questions that a file reserves, in the order of their hashes."""
    by_rank = sorted(unique, key=lambda question: (_rank(question.identity), question.identity))
    return by_rank[: _reserve_size(by_rank)]


def _reserve_size(by_rank: Sequence[Question]) -> int:
    """Return the number of questions that a file reserves: at least one, and not all.

    by_rank: at least two questions in the order of their hashes.

    With 64 questions or more below the threshold, each question's hash alone decides. Rows that are
    added to such a file move no question to the other side.
    """
    threshold = _HASH_RANGE // _HELD_OUT_DIVISOR
    below_threshold = sum(_rank(question.identity) < threshold for question in by_rank)
    small_reserve = min(len(by_rank) // _SMALL_FILE_DIVISOR, _MAX_SMALL_RESERVE)
    return min(max(below_threshold, small_reserve, 1), len(by_rank) - 1)


def keep_apart(train: Sequence[Question], held_out: Sequence[Question], bad_rows: BadRows) -> Split:
    """Split two files: questions that are held out are not training questions.

    A training question that is held out with another answer is a bad row. Each file may number its
    rows from 0: a held-out question with the id of a different training question gets a longer id.
    """
    unique_train, train_duplicates = _drop_all_repeats(train, bad_rows)
    unique_held_out, held_out_duplicates = _drop_all_repeats(held_out, bad_rows)
    distinct_train, overlapping = _drop_held_out(unique_train, unique_held_out, bad_rows)
    return Split(
        distinct_train,
        _with_other_ids(unique_held_out, {question.id for question in distinct_train}),
        duplicates=train_duplicates + held_out_duplicates,
        overlapping=overlapping,
    )


def _with_other_ids(questions: Sequence[Question], ids: Collection[str]) -> list[Question]:
    """Return questions with a prefix before each id that is in `ids`. All ids stay unique."""
    all_ids = {*ids, *(question.id for question in questions)}
    results = []
    for question in questions:
        if question.id in ids:
            new_id = question.id
            while new_id in all_ids:
                new_id = f"{HELD_OUT}/{new_id}"
            all_ids.add(new_id)
            question = replace(question, id=new_id)
        results.append(question)
    return results


def keep_sources_apart(splits: Mapping[str, Split], bad_rows: BadRows) -> dict[str, Split]:
    """Leave out of every source's training questions what any source holds out or reserves.

    Questions are the same if their identities or their texts are, apart from case and white space.
    A question whose text is in two sources stays in the first of them. If it has another answer in
    the second one, it is a bad row there.
    """
    withheld = [q for split in splits.values() for q in (*split.held_out, *split.reserved)]
    without_held_out = [
        _drop_held_out(split.train, withheld, bad_rows) for split in splits.values()
    ]
    train = _drop_repeats_between([questions for questions, _ in without_held_out], bad_rows)
    # What one source holds out stays held out if another one only reserves it.
    held_out_and_reserved = _drop_repeats_between(
        [split.held_out for split in splits.values()]
        + [split.reserved for split in splits.values()],
        bad_rows,
    )
    results = {}
    for index, (name, split) in enumerate(splits.items()):
        sides = (train[index], *held_out_and_reserved[index :: len(splits)])
        train_side, held_out_side, reserved_side = (questions for questions, _ in sides)
        results[name] = Split(
            train_side,
            held_out_side,
            duplicates=split.duplicates + sum(num_repeats for _, num_repeats in sides),
            overlapping=split.overlapping + without_held_out[index][1],
            reserved=reserved_side,
        )
    return results


def _identity(question: Question) -> str:
    return question.identity


def _text(question: Question) -> str:
    return identity_of_text(question.text)


def _drop_all_repeats(
    questions: Sequence[Question], bad_rows: BadRows
) -> tuple[list[Question], int]:
    """Return the first question of each identity and of each text, and the number of repeats."""
    unique, num_questions = _drop_repeats(questions, _identity, bad_rows)
    unique, num_prompts = _drop_repeats(unique, _text, bad_rows)
    return unique, num_questions + num_prompts


def _drop_repeats(
    questions: Sequence[Question], key: Callable[[Question], str], bad_rows: BadRows
) -> tuple[list[Question], int]:
    """Return the first question of each key, and the number of repeats."""
    first_by_key: dict[str, Question] = {}
    num_repeats = 0
    for question in questions:
        first = first_by_key.setdefault(key(question), question)
        if first is not question:
            is_same = bad_rows.is_same_answer(question, first)
            num_repeats += _leave_out(question, first, bad_rows, is_same_answer=is_same)
    return list(first_by_key.values()), num_repeats


def _drop_repeats_between(
    sides: Sequence[Sequence[Question]], bad_rows: BadRows
) -> list[tuple[list[Question], int]]:
    """Leave out of each side the texts of an earlier side. Returns the number of repeats with each.

    The texts of one side may be equal apart from case and white space.
    """
    first_by_text: dict[str, Question] = {}
    results = []
    for questions in sides:
        rest, num_repeats = _drop_known(questions, first_by_text, {}, bad_rows)
        results.append((rest, num_repeats))
        for question in rest:
            first_by_text.setdefault(_text(question), question)
    return results


def _drop_held_out(
    train: Sequence[Question], held_out: Sequence[Question], bad_rows: BadRows
) -> tuple[list[Question], int]:
    """Leave out the training questions that are held out. Returns the number of them, too."""
    by_text = {_text(question): question for question in held_out}
    by_identity = {question.identity: question for question in held_out}
    return _drop_known(train, by_text, by_identity, bad_rows, ", which is held out,")


def _drop_known(
    questions: Sequence[Question],
    by_text: Mapping[str, Question],
    by_identity: Mapping[str, Question],
    bad_rows: BadRows,
    note: str = "",
) -> tuple[list[Question], int]:
    """Leave out questions with the text or the identity of another one. Returns their number, too.

    Variants of a question may have different answers.
    """
    rest = []
    num_repeats = 0
    for question in questions:
        same_text = by_text.get(_text(question))
        first = same_text or by_identity.get(question.identity)
        if first is None:
            rest.append(question)
        else:
            is_same = same_text is None or bad_rows.is_same_answer(question, same_text)
            num_repeats += _leave_out(question, first, bad_rows, is_same_answer=is_same, note=note)
    return rest, num_repeats


def _leave_out(
    question: Question, first: Question, bad_rows: BadRows, *, is_same_answer: bool, note: str = ""
) -> bool:
    """Record a repeated question. Returns False if it is a bad row: it has another answer.

    note: about the first one, for the message.
    """
    what = "question" if question.identity == first.identity else "prompt"
    reason = f"repeats the {what} of {first.origin}{note}"
    if is_same_answer:
        bad_rows.leave_out(question.origin, reason.removesuffix(","))
    else:
        bad_rows.report(question.origin, f"{reason} with another answer ({question.answer!r})")
    return is_same_answer


def _rank(identity: str) -> int:
    key = identity.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
