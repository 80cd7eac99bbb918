"""Split of questions into training and held-out questions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.prompts.question import BadRows, PromptDataError, Question, identity_of_text

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

    duplicates: number of rows left out because they repeat a question.
    overlapping: number of training rows left out because their question is held out.
    num_reserved: number of questions that are in neither side, because another data.num_eval holds
    them out.
    withheld: identities of all questions of the file that never train, whether held out or not.
    """

    train: list[Question]
    held_out: list[Question]
    duplicates: int = 0
    overlapping: int = 0
    num_reserved: int = 0
    withheld: frozenset[str] = frozenset()


def split_generator(
    questions: Iterable[Question], num_train: int, num_eval: int, *, section: str = "data"
) -> Split:
    """Fill both sides from a generator. One identity in eight belongs to the held-out side.

    A question with a repeated text is skipped. section: that of the keys, for messages.

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

    A repeated question is used once. If it is repeated with another answer, it is a bad row.
    section: that of the keys, for messages.

    Raises `PromptDataError` if fewer than `num_eval` questions are reserved, or if the file has a
    single question.
    """
    unique, duplicates = _drop_duplicates(questions, bad_rows)
    if len(unique) < 2:
        raise PromptDataError(
            f"{section}.num_eval={num_eval}: the file has only {len(unique)} usable question, so "
            "none is left to train on. Add questions, or name a file of held-out questions in "
            f"{section}.eval_path"
        )
    by_rank = sorted(unique, key=lambda question: (_rank(question.identity), question.identity))
    reserve = by_rank[: _reserve_size(by_rank)]
    if num_eval > len(reserve):
        raise PromptDataError(
            f"{section}.num_eval={num_eval}: the file reserves {len(reserve)} of its {len(unique)} "
            "questions for evaluation, so that no run trains on questions that another run holds "
            f"out. Set at most {section}.num_eval={len(reserve)}, or name a file of held-out "
            f"questions in {section}.eval_path"
        )
    reserved_identities = {question.identity for question in reserve}
    held_out_identities = {question.identity for question in reserve[:num_eval]}
    return Split(
        train=[question for question in unique if question.identity not in reserved_identities],
        held_out=[question for question in unique if question.identity in held_out_identities],
        duplicates=duplicates,
        num_reserved=len(reserve) - num_eval,
        withheld=frozenset(reserved_identities),
    )


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
    """Split two files: questions that are held out are left out of the training questions.

    An id on both sides that names two different questions makes the held-out one a bad row.
    """
    unique_train, train_duplicates = _drop_duplicates(train, bad_rows)
    unique_held_out, held_out_duplicates = _drop_duplicates(held_out, bad_rows)
    held_out_identities = {question.identity for question in unique_held_out}
    distinct_train = []
    for question in unique_train:
        if question.identity in held_out_identities:
            bad_rows.leave_out(question.origin, "the question is held out, too")
        else:
            distinct_train.append(question)
    origin_by_id = {question.id: question.origin for question in distinct_train}
    distinct_held_out = []
    for question in unique_held_out:
        if question.id in origin_by_id:
            bad_rows.report(
                question.origin,
                f"id {question.id!r} is already used in {origin_by_id[question.id]}. Ids must be "
                "unique",
            )
        else:
            distinct_held_out.append(question)
    return Split(
        distinct_train,
        distinct_held_out,
        duplicates=train_duplicates + held_out_duplicates,
        overlapping=len(unique_train) - len(distinct_train),
    )


def keep_sources_apart(splits: Mapping[str, Split], bad_rows: BadRows) -> dict[str, Split]:
    """Leave out of every source's training questions what any source holds out or reserves.

    Questions are the same if their identities or their texts are, apart from case and white space.
    A question whose text is in two sources stays in the first of them.
    """
    withheld: set[str] = set()
    for split in splits.values():
        withheld |= split.withheld
        for question in split.held_out:
            withheld |= {question.identity, identity_of_text(question.text)}
    first_by_text: dict[str, Question] = {}
    first_held_out: dict[str, Question] = {}
    results = {}
    for name, split in splits.items():
        train = []
        for question in split.train:
            text = identity_of_text(question.text)
            first = first_by_text.setdefault(text, question)
            if text in withheld or question.identity in withheld:
                bad_rows.leave_out(question.origin, "the question is held out in another source")
            elif first is not question:
                bad_rows.leave_out(question.origin, f"repeats the question of {first.origin}")
            else:
                train.append(question)
        held_out = [
            question
            for question in split.held_out
            if first_held_out.setdefault(identity_of_text(question.text), question) is question
        ]
        num_missing = len(split.train) - len(train)
        results[name] = replace(
            split, train=train, held_out=held_out, overlapping=split.overlapping + num_missing
        )
    return results


def _drop_duplicates(
    questions: Sequence[Question], bad_rows: BadRows
) -> tuple[list[Question], int]:
    """Return the first question of each identity, and the number of duplicates."""
    first_by_identity: dict[str, Question] = {}
    duplicates = 0
    for question in questions:
        first = first_by_identity.setdefault(question.identity, question)
        if first is question:
            continue
        if first.answer == question.answer:
            duplicates += 1
            bad_rows.leave_out(question.origin, f"repeats the question of {first.origin}")
        else:
            bad_rows.report(
                question.origin,
                f"repeats the question of {first.origin} with another answer ({question.answer!r})",
            )
    return list(first_by_identity.values()), duplicates


def _rank(identity: str) -> int:
    key = identity.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
