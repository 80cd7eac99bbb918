"""From the data settings to prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts import gym
from megatron_rl.prompts.embedded import EMBEDDED
from megatron_rl.prompts.jsonl import read_jsonl
from megatron_rl.prompts.question import BadRows, PromptDataError, Question
from megatron_rl.prompts.source import Excluded, PromptSource
from megatron_rl.prompts.split import Split, draw_split, hold_out, keep_apart

SOURCES = (*EMBEDDED, "jsonl", "reasoning_gym")
_NUM_TRAIN = 24_000


def open_prompts(
    source: str,
    tokenizer: Tokenizer,
    *,
    num_train: int | None = None,
    num_eval: int = 512,
    seed: int = 0,
    shuffle: bool = True,
    on_bad_row: str = "fail",
    max_prompt_tokens: int = 1024,
    train_path: str | None = None,
    eval_path: str | None = None,
    task: str | None = None,
    task_config: Mapping[str, Any] | None = None,
    check_answer: Callable[[str], None] | None = None,
) -> PromptSource:
    """Open a source by name. Raises `PromptDataError` naming the key, or the file and line, and the remedy.

    source: `column_addition`, `two_digit_addition`, `jsonl` or `reasoning_gym`. num_train, num_eval: questions to
    generate (num_train None: the embedded task's usual number, else 24,000); of a JSONL file all rows are used, and
    num_eval of them held out unless eval_path names others.
    seed: generates (embedded tasks, reasoning_gym) and shuffles; it never moves a question across the split.
    check_answer: raises ValueError for a reference answer that responses cannot be judged by (`Scorer.check_answer`),
    which makes the row a bad one.
    """
    bad_rows = BadRows.named(on_bad_row)
    if source == "jsonl":
        split = _split_files(train_path, eval_path, num_eval, bad_rows)
    else:
        usual = EMBEDDED[source].num_train if source in EMBEDDED else _NUM_TRAIN
        wanted = usual if num_train is None else num_train
        split = draw_split(_generator(source, seed, task, task_config), wanted, num_eval)
    train = list(_usable(split.train, tokenizer, max_prompt_tokens, check_answer, bad_rows))
    held_out = list(_usable(split.held_out, tokenizer, max_prompt_tokens, check_answer, bad_rows))
    excluded = Excluded(bad_rows.count, split.duplicates, split.overlapping, tuple(bad_rows.examples))
    if not train:
        key = f"data.source={source}" if train_path is None else f"data.train_path={train_path}"
        raise _nothing_left(key, "training", excluded)
    if not held_out and (num_eval or eval_path is not None):
        key = f"data.num_eval={num_eval}" if eval_path is None else f"data.eval_path={eval_path}"
        raise _nothing_left(key, "held-out", excluded)
    return PromptSource(train, held_out, seed=seed, shuffle=shuffle, excluded=excluded)


def _nothing_left(key: str, side: str, excluded: Excluded) -> PromptDataError:
    return PromptDataError(
        f"{key}: no usable {side} prompt is left: {excluded.bad} bad row(s), {excluded.duplicates} repeated "
        f"question(s) and {excluded.overlapping} training row(s) that are held out too were left out. Correct the rows "
        "(data.on_bad_row=fail names the first bad one), or give other data"
        + "".join(f"\n  {example}" for example in excluded.examples[:3])
    )


def _generator(source: str, seed: int, task: str | None, task_config: Mapping[str, Any] | None) -> Iterable[Question]:
    if source in EMBEDDED:
        return EMBEDDED[source].questions(seed)
    if source != "reasoning_gym":
        raise PromptDataError(f"data.source={source}: there is no such source. Choose one of {', '.join(SOURCES)}")
    if task is None:
        raise PromptDataError("data.task: missing. data.source=reasoning_gym needs a generator's name, e.g. chain_sum")
    return gym.questions(task, seed, task_config or {})


def _split_files(train_path: str | None, eval_path: str | None, num_eval: int, bad_rows: BadRows) -> Split:
    if train_path is None:
        raise PromptDataError("data.train_path: missing. data.source=jsonl needs a JSONL file of training questions")
    train = read_jsonl(train_path, bad_rows, key="data.train_path")
    if eval_path is None:
        return hold_out(train, num_eval, bad_rows)
    return keep_apart(train, read_jsonl(eval_path, bad_rows, key="data.eval_path"), bad_rows)


def _usable(
    questions: Iterable[Question],
    tokenizer: Tokenizer,
    max_tokens: int,
    check_answer: Callable[[str], None] | None,
    bad_rows: BadRows,
) -> Iterator[Prompt]:
    for question in questions:
        try:
            if check_answer is not None:
                check_answer(question.answer)
            prompt = _prompt(question, tokenizer.encode(question.text), max_tokens)
        except ValueError as error:
            bad_rows.report(question.origin, str(error))
        else:
            yield prompt


def _prompt(question: Question, ids: tuple[int, ...], max_tokens: int) -> Prompt:
    if not 0 < len(ids) <= max_tokens:
        raise ValueError(f"{len(ids)} tokens; data.max_prompt_tokens allows 1 to {max_tokens}")
    return Prompt(
        id=question.id, token_ids=ids, answer=question.answer, task=question.task, difficulty=question.difficulty
    )
