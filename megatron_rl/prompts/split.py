"""Train and held-out questions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.prompts.question import BadRows, PromptDataError, Question

_HELD_OUT_ONE_IN = 8
_PATIENCE = 20_000


@dataclass(frozen=True)
class Split:
    """duplicates: rows left out because they repeat a question; overlapping: because they were held
    out.
    """

    train: list[Question]
    held_out: list[Question]
    duplicates: int = 0
    overlapping: int = 0


def draw_split(questions: Iterable[Question], num_train: int, num_eval: int) -> Split:
    """Fill both sides from a generator: one identity in eight belongs to the held-out side.

    Repeated texts are drawn again. Raises `PromptDataError` when the generator ends, or gives
    20,000 questions in a row that neither side can use, before both sides are full.
    """
    sides: tuple[list[Question], list[Question]] = ([], [])
    wanted = (num_train, num_eval)
    seen: set[str] = set()
    unused_in_a_row = duplicates = 0
    for question in questions:
        side = int(_rank(question.identity) % _HELD_OUT_ONE_IN == 0)
        if question.text in seen:
            duplicates += 1
            unused_in_a_row += 1
        elif len(sides[side]) < wanted[side]:
            seen.add(question.text)
            sides[side].append(question)
            unused_in_a_row = 0
        else:
            unused_in_a_row += 1
        if len(sides[0]) == num_train and len(sides[1]) == num_eval:
            return Split(*sides, duplicates=duplicates)
        if unused_in_a_row > _PATIENCE:
            break
    raise PromptDataError(
        f"data.num_train={num_train}, data.num_eval={num_eval}: the task gave only {len(sides[0])} training and "
        f"{len(sides[1])} held-out questions. Ask for fewer, or widen the task's settings"
    )


def hold_out(questions: Sequence[Question], num_eval: int, bad_rows: BadRows) -> Split:
    """Hold `num_eval` questions out of a finite set: those whose identities have the smallest
    hashes.

    A repeated question is used once; repeated with another answer it is a bad row.
    """
    unique, duplicates = _without_repeats(questions, bad_rows)
    if num_eval >= len(unique):
        raise PromptDataError(
            f"data.num_eval={num_eval}: holding that many out of {len(unique)} usable questions leaves none to train "
            "on. Lower data.num_eval, or name a file of held-out questions in data.eval_path"
        )
    held = {
        q.identity for q in sorted(unique, key=lambda q: (_rank(q.identity), q.identity))[:num_eval]
    }
    return Split(
        train=[q for q in unique if q.identity not in held],
        held_out=[q for q in unique if q.identity in held],
        duplicates=duplicates,
    )


def keep_apart(train: Sequence[Question], held_out: Sequence[Question], bad_rows: BadRows) -> Split:
    """Two given sets: what is in the held-out set is left out of the training set, and counted.

    An id that is left on both sides names two different questions: the held-out one is a bad row.
    """
    unique_train, repeated = _without_repeats(train, bad_rows)
    unique_held, repeated_held = _without_repeats(held_out, bad_rows)
    held = {q.identity for q in unique_held}
    kept = []
    for question in unique_train:
        if question.identity in held:
            bad_rows.leave_out(question.origin, "is held out too")
        else:
            kept.append(question)
    origin_of_id = {q.id: q.origin for q in kept}
    distinct_held = []
    for question in unique_held:
        if question.id in origin_of_id:
            bad_rows.report(
                question.origin,
                f"id {question.id!r} is already used in {origin_of_id[question.id]}",
            )
        else:
            distinct_held.append(question)
    return Split(kept, distinct_held, repeated + repeated_held, len(unique_train) - len(kept))


def _without_repeats(
    questions: Sequence[Question], bad_rows: BadRows
) -> tuple[list[Question], int]:
    first: dict[str, Question] = {}
    duplicates = 0
    for question in questions:
        known = first.setdefault(question.identity, question)
        if known is question:
            continue
        if known.answer == question.answer:
            duplicates += 1
            bad_rows.leave_out(question.origin, f"repeats the question of {known.origin}")
        else:
            bad_rows.report(
                question.origin,
                f"repeats the question of {known.origin} with another answer ({question.answer!r})",
            )
    return list(first.values()), duplicates


def _rank(identity: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )
