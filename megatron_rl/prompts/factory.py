"""From the data settings to prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields

from megatron_rl.config.schema import DataSettings
from megatron_rl.contracts.plugins import load_plugin, user_code
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts import column_addition, column_addition_mixed, two_digit_addition
from megatron_rl.prompts.gym import ReasoningGym
from megatron_rl.prompts.jsonl import Render, read_jsonl, refuse_messages
from megatron_rl.prompts.pass_rates import read_pass_rates
from megatron_rl.prompts.question import BadRows, PromptDataError, Question, Source
from megatron_rl.prompts.source import Excluded, PromptSource
from megatron_rl.prompts.split import Split, draw_split, hold_out, keep_apart

EMBEDDED: Mapping[str, Source] = {
    task.NAME: task for task in (column_addition, column_addition_mixed, two_digit_addition)
}
CheckAnswer = Callable[[str], None]
_MOST_CHARACTERS = 65_536  # of an id or a reference answer
_FIELDS = tuple(field.name for field in fields(Question))


def open_prompts(
    settings: DataSettings,
    tokenizer: Tokenizer,
    check_answer: CheckAnswer | None = None,
    *,
    render: Render = refuse_messages,
    demonstration: bool = False,
) -> PromptSource:
    """Open a source by name. Raises `PromptDataError` naming the key, or the file and line, and the
    remedy.

    Of a JSONL file all rows are used, and data.num_eval of them held out unless data.eval_path
    names others; other sources write data.num_train and data.num_eval questions. The seed never
    moves a question across the split. check_answer: raises ValueError for a reference answer that
    responses cannot be judged by (`Scorer.check_answer`), which makes the row a bad one. render: of
    rows with messages. worked: training questions without a worked response are bad ones too.
    Raises `PluginError` where a source of the user's own cannot be opened.
    """
    bad_rows = BadRows(settings.on_bad_row)
    if settings.source == "jsonl":
        split = _split_files(settings, render, bad_rows)
    else:
        split = draw_split(draw_questions(settings), settings.num_train, settings.num_eval)
    questions = _with_responses(split.train, bad_rows) if demonstration else split.train
    train = list(_usable(questions, tokenizer, settings.max_prompt_tokens, check_answer, bad_rows))
    held_out = list(
        _usable(split.held_out, tokenizer, settings.max_prompt_tokens, check_answer, bad_rows)
    )
    named, examples = tuple(bad_rows.named), tuple(bad_rows.examples)
    excluded = Excluded(bad_rows.count, split.duplicates, split.overlapping, examples, named)
    if not train:
        key = (
            f"data.train_path={settings.train_path}"
            if settings.train_path
            else f"data.source={settings.source}"
        )
        raise _nothing_left(key, "training", excluded)
    if not held_out:
        key = (
            f"data.eval_path={settings.eval_path}"
            if settings.eval_path
            else f"data.num_eval={settings.num_eval}"
        )
        raise _nothing_left(key, "held-out", excluded)
    rates = (
        read_pass_rates(settings.pass_rates, settings) if settings.pass_rates is not None else {}
    )
    return PromptSource(train, held_out, settings, excluded, rates)


def open_set(
    name: str,
    path: str,
    settings: DataSettings,
    tokenizer: Tokenizer,
    check_answer: CheckAnswer | None = None,
    *,
    render: Render = refuse_messages,
) -> list[Prompt]:
    """The questions of one of eval.sets, each once; bad rows are as in `open_prompts`. Raises
    `PromptDataError`.
    """
    key, bad_rows = f"eval.sets.{name}", BadRows(settings.on_bad_row)
    split = keep_apart([], read_jsonl(path, bad_rows, key=key, render=render), bad_rows)
    prompts = list(
        _usable(split.held_out, tokenizer, settings.max_prompt_tokens, check_answer, bad_rows)
    )
    if not prompts:
        excluded = Excluded(
            bad_rows.count, split.duplicates, 0, tuple(bad_rows.examples), tuple(bad_rows.named)
        )
        raise _nothing_left(f"{key}={path}", "held-out", excluded)
    return prompts


def open_source(settings: DataSettings) -> Source:
    """The source that writes the questions: any but `jsonl`, whose questions are in files."""
    if settings.source in EMBEDDED:
        return EMBEDDED[settings.source]
    if settings.source == "reasoning_gym":
        return ReasoningGym(settings.task, settings.task_config)
    methods = {"questions": ("seed",)}
    source: Source = load_plugin("data.source", settings.source, settings.options, methods=methods)
    return source


def draw_questions(settings: DataSettings) -> Iterator[Question]:
    """The questions of a source, checked: what a user's own yields may be anything. Raises
    `PromptDataError`.
    """
    source, opened = settings.source, open_source(settings)
    text_of_id: dict[str, str] = {}
    for question in _drawn(source, opened, settings.seed):
        if not isinstance(question, Question):
            raise PromptDataError(
                f"data.source={source}: it yields {type(question).__name__}, not a Question"
            )
        for name in _FIELDS:
            if not isinstance(value := getattr(question, name), str):
                raise PromptDataError(
                    f"data.source={source}: Question.{name}={value!r}: it must be a str"
                )
        first = text_of_id.setdefault(question.id, question.text)
        if first != question.text:
            raise PromptDataError(
                f"data.source={source}: id {question.id!r} names {first!r} and {question.text!r}. "
                "Give every question an id of its own"
            )
        yield question


def _drawn(name: str, source: Source, seed: int) -> Iterator[object]:
    """What `questions` yields.

    The embedded ones and generators tell for themselves what is wrong.
    """
    called = f"data.source={name}: questions({seed})"
    with user_code(called, propagate=(PromptDataError,), failure=PromptDataError):
        questions = source.questions(seed)
    if not isinstance(questions, Iterable):
        kind = type(questions).__name__
        raise PromptDataError(
            f"{called} returns {kind}, not an iterator. Write a generator that yields Questions"
        )
    with user_code(called, propagate=(PromptDataError,), failure=PromptDataError):
        yield from questions


def _split_files(settings: DataSettings, render: Render, bad_rows: BadRows) -> Split:
    assert settings.train_path is not None, "the rules of the configuration ask for it"
    train = read_jsonl(settings.train_path, bad_rows, key="data.train_path", render=render)
    if settings.eval_path is None:
        return hold_out(train, settings.num_eval, bad_rows)
    return keep_apart(
        train,
        read_jsonl(settings.eval_path, bad_rows, key="data.eval_path", render=render),
        bad_rows,
    )


def _with_responses(questions: Iterable[Question], bad_rows: BadRows) -> Iterator[Question]:
    for question in questions:
        if question.demonstration:
            yield question
        else:
            bad_rows.report(
                question.origin,
                "it shows no response, which environment=demonstration is to learn from",
            )


def _usable(
    questions: Iterable[Question],
    tokenizer: Tokenizer,
    max_tokens: int,
    check_answer: CheckAnswer | None,
    bad_rows: BadRows,
) -> Iterator[Prompt]:
    most_characters = max_tokens * tokenizer.longest_token
    for question in questions:
        try:
            _check_lengths(question, max_tokens, most_characters)
            if check_answer is not None:
                check_answer(question.answer)
            prompt = _prompt(question, tokenizer.encode(question.text), max_tokens)
        except ValueError as error:
            bad_rows.report(question.origin, str(error))
        else:
            yield prompt


def _check_lengths(question: Question, max_tokens: int, most_characters: int) -> None:
    """Before anything reads the texts: encoding megabytes takes minutes in which no signal is
    heard.
    """
    if len(question.text) > most_characters:
        raise ValueError(
            f"{len(question.text)} characters; data.max_prompt_tokens={max_tokens} of the longest token are "
            f"{most_characters}"
        )
    for name, value in (("id", question.id), ("answer", question.answer)):
        if len(value) > _MOST_CHARACTERS:
            raise ValueError(
                f"`{name}` has {len(value)} characters; at most {_MOST_CHARACTERS} are taken"
            )


def _prompt(question: Question, ids: tuple[int, ...], max_tokens: int) -> Prompt:
    if not 0 < len(ids) <= max_tokens:
        raise ValueError(f"{len(ids)} tokens; data.max_prompt_tokens allows 1 to {max_tokens}")
    return Prompt(
        id=question.id,
        token_ids=ids,
        answer=question.answer,
        task=question.task,
        difficulty=question.difficulty,
        demonstration=question.demonstration,
    )


def _nothing_left(key: str, side: str, excluded: Excluded) -> PromptDataError:
    return PromptDataError(
        f"{key}: no usable {side} prompt is left: {excluded.bad} bad row(s), {excluded.duplicates} repeated "
        f"question(s) and {excluded.overlapping} training row(s) that are held out too were left out. Correct the rows "
        "(data.on_bad_row=fail names the first bad one), or give other data"
        + "".join(f"\n  {example}" for example in excluded.examples[:3])
    )
