"""Opens the prompts that the data settings name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

from megatron_rl.config.schema import DataSettings
from megatron_rl.contracts.plugins import load_plugin, user_code
from megatron_rl.contracts.prompt import Prompt, Question, ReadAnswer, answer_as_written
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts import (
    column_addition,
    column_addition_calls,
    column_addition_mixed,
    letter_sorting,
    two_digit_addition,
)
from megatron_rl.prompts.files.columns import Columns
from megatron_rl.prompts.files.reader import FILE_SOURCES, DataLocation, read_questions
from megatron_rl.prompts.files.row import Render, refuse_messages
from megatron_rl.prompts.gym import ReasoningGym
from megatron_rl.prompts.locations import held_out_data, settings_of_source, training_data
from megatron_rl.prompts.mixture import PromptMixture
from megatron_rl.prompts.pass_rates import PassRate, read_pass_rates
from megatron_rl.prompts.question import (
    MAX_CHARACTERS,
    BadRows,
    CheckedRows,
    PromptDataError,
    Source,
)
from megatron_rl.prompts.source import ExcludedRows, PromptSource
from megatron_rl.prompts.split import (
    Split,
    hold_out,
    keep_apart,
    keep_sources_apart,
    split_generator,
)

EMBEDDED: Mapping[str, Source] = {
    task.NAME: task
    for task in (
        column_addition,
        column_addition_calls,
        column_addition_mixed,
        two_digit_addition,
        letter_sorting,
    )
}
_MAX_RESPONSE_CHARACTERS = 2**20
_QUICK_CHARACTERS = 10_000  # a text of so many is encoded at once, to name its number of tokens
# Raises ValueError for a prompt whose demonstration cannot train
CheckDemonstration = Callable[[Prompt], None]
_QUESTION_FIELDS = tuple(field.name for field in fields(Question))


def open_prompts(
    settings: DataSettings,
    tokenizer: Tokenizer,
    read_answer: ReadAnswer = answer_as_written,
    *,
    render: Render = refuse_messages,
    check_demonstration: CheckDemonstration | None = None,
) -> PromptSource:
    """Open the source of prompts.

    A file gives all of its rows. Unless data.eval_path or data.eval_split names held-out rows, one
    row in eight is reserved for evaluation, and data.num_eval of these are held out. Other sources
    generate data.num_train and data.num_eval questions. The seed never moves a question from one
    side of the split to the other.

    Each source of a mixture is opened like that. No question that is held out in one source trains
    in another.

    read_answer: rows whose answer it refuses are bad rows (`rewards.open_answer_reader`).
    render: renders rows with messages.
    check_demonstration: training rows without a demonstration are bad rows, and those that it
    refuses with a ValueError.

    Raises `PromptDataError`, which names the key, or the file and line, and the remedy. Raises
    `PluginError` if a user-defined source cannot be loaded.
    """
    opener = _Opener(settings, tokenizer, read_answer, render, check_demonstration)
    rates: dict[str, PassRate] = {}
    if settings.source != "mixture":
        split = opener.split(settings, "data")
        train, held_out = opener.build(settings, split, "data")
        if settings.pass_rates is not None:
            rates = read_pass_rates(settings.pass_rates, settings)
        return PromptSource(train, held_out, settings, opener.excluded_rows([split]), rates)
    source_settings = {name: settings_of_source(settings, name) for name in settings.sources}
    splits = keep_sources_apart(
        {
            name: opener.split(source, f"data.sources.{name}", source=name)
            for name, source in source_settings.items()
        },
        opener.bad_rows,
    )
    prompts = {
        name: opener.build(source_settings[name], split, f"data.sources.{name}", source=name)
        for name, split in splits.items()
    }
    if settings.pass_rates is not None:
        rates = read_pass_rates(settings.pass_rates, settings)
    return PromptMixture(prompts, settings, opener.excluded_rows(splits.values()), rates)


def open_set(
    name: str,
    path: str,
    settings: DataSettings,
    tokenizer: Tokenizer,
    read_answer: ReadAnswer = answer_as_written,
    *,
    render: Render = refuse_messages,
    columns: Mapping[str, str] | None = None,
) -> list[Prompt]:
    """Open one of eval.sets, each question once.

    columns: where the file has the keys of a row.
    Bad rows are the same as in `open_prompts`. Raises `PromptDataError`.
    """
    key = f"eval.sets.{name}"
    bad_rows = BadRows(settings.on_bad_row, read_answer)
    location = DataLocation(path, key, columns=Columns(columns or {}, f"{key}.columns"))
    questions = read_questions(location, bad_rows, render=render)
    split = keep_apart([], questions, bad_rows)
    builder = PromptBuilder(tokenizer, settings.max_prompt_tokens, bad_rows, split)
    return builder.build(split.held_out, f"{key}={path}: no usable held-out prompt")


def open_source(settings: DataSettings) -> Source:
    """Open the source that generates questions. Formats of files are none.

    Raises `PromptDataError`, or `PluginError` if a user-defined source cannot be loaded.
    """
    if settings.source in EMBEDDED:
        return EMBEDDED[settings.source]
    if settings.source == "reasoning_gym":
        return ReasoningGym(settings.options)
    methods = {"questions": ("seed",)}
    source: Source = load_plugin("data.source", settings.source, settings.options, methods=methods)
    return source


def generate_questions(settings: DataSettings) -> Iterator[Question]:
    """Yield the questions of a source after checks: a user-defined source may yield anything.

    Raises `PromptDataError`, or `PluginError` if a user-defined source cannot be loaded.
    """
    key = f"data.source={settings.source}"
    source = open_source(settings)
    text_by_id: dict[str, str] = {}
    for question in _call_questions(key, source, settings):
        if not isinstance(question, Question):
            raise PromptDataError(
                f"{key}: it yields {type(question).__name__}, not a Question. Yield Questions"
            )
        _check_fields(key, question)
        first_text = text_by_id.setdefault(question.id, question.text)
        if first_text != question.text:
            raise PromptDataError(
                f"{key}: id {question.id!r} stands for {first_text!r} and {question.text!r}. Give "
                "every question a unique id"
            )
        yield question


def _check_fields(key: str, question: Question) -> None:
    for name in _QUESTION_FIELDS:
        value = getattr(question, name)
        if not isinstance(value, str):
            raise PromptDataError(
                f"{key}: Question.{name}={value!r}: it must be a str. Convert it with str()"
            )


def _call_questions(key: str, source: Source, settings: DataSettings) -> Iterator[object]:
    """Yield from `questions` and convert exceptions of user-defined code.

    The project's own sources raise `PromptDataError` themselves.
    """
    call = f"{key}: questions({settings.seed})"
    conversion = partial(
        user_code,
        call,
        propagate=(PromptDataError,),
        failure=PromptDataError,
        options=settings.options,
    )
    with conversion():
        questions = source.questions(settings.seed)
    if not isinstance(questions, Iterable):
        raise PromptDataError(
            f"{call} returns {type(questions).__name__}, not an iterator. Write a generator that "
            "yields Questions"
        )
    with conversion():
        yield from questions


class _Opener:
    """Opens the questions of one or several sources.

    bad_rows: the bad rows of all sources.
    """

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: Tokenizer,
        read_answer: ReadAnswer,
        render: Render,
        check_demonstration: CheckDemonstration | None,
    ) -> None:
        self.bad_rows = BadRows(settings.on_bad_row, read_answer)
        self._tokenizer = tokenizer
        self._render = render
        self._check_demonstration = check_demonstration

    def split(self, settings: DataSettings, section: str, *, source: str = "") -> Split:
        """Read or generate the questions of a source. section: of its keys, for messages.

        source: name of a source in a mixture. It is the task of rows that name none.
        """
        if settings.source not in FILE_SOURCES:
            questions = generate_questions(settings)
            return split_generator(
                questions, settings.num_train, settings.num_eval, section=section
            )
        train = self._read(training_data(settings, section), source)
        held_out_location = held_out_data(settings, section)
        if held_out_location is None:
            return hold_out(train, settings.num_eval, self.bad_rows, section=section)
        return keep_apart(train, self._read(held_out_location, source), self.bad_rows)

    def build(
        self, settings: DataSettings, split: Split, section: str, *, source: str = ""
    ) -> tuple[list[Prompt], list[Prompt]]:
        """Return the prompts of both sides. source: name of a source in a mixture."""
        builder = PromptBuilder(
            self._tokenizer,
            settings.max_prompt_tokens,
            self.bad_rows,
            split,
            source,
        )
        train_key = _name_key(settings, section, "train_path", "source")
        train = builder.build(
            split.train,
            f"{train_key}: no usable training prompt",
            check_demonstration=self._check_demonstration,
        )
        eval_key = _name_key(settings, section, "eval_path", "num_eval")
        return train, builder.build(split.held_out, f"{eval_key}: no usable held-out prompt")

    def excluded_rows(self, splits: Iterable[Split]) -> ExcludedRows:
        """Return the rows of all splits that are in neither side."""
        splits = list(splits)
        return ExcludedRows(
            bad=self.bad_rows.count,
            duplicates=sum(split.duplicates for split in splits),
            overlapping=sum(split.overlapping for split in splits),
            num_reserved=sum(len(split.reserved) for split in splits),
            examples=tuple(self.bad_rows.examples),
            messages=tuple(self.bad_rows.messages),
        )

    def _read(self, location: DataLocation, source: str) -> list[Question]:
        if source:
            location = replace(location, task=source)
        return read_questions(location, self.bad_rows, render=self._render)


@dataclass(frozen=True)
class PromptBuilder:
    """Tokenizes questions and reports those that cannot be used.

    max_tokens: limit of a prompt's tokens. split: where the questions come from, for messages.
    source: name of the source in a mixture, which precedes the ids of its questions.
    """

    tokenizer: Tokenizer
    max_tokens: int
    bad_rows: BadRows
    split: Split
    source: str = ""

    def build(
        self,
        questions: Iterable[Question],
        failure: str,
        *,
        check_demonstration: CheckDemonstration | None = None,
    ) -> list[Prompt]:
        """Return the prompts of all usable questions.

        failure: the beginning of the message if there are none. check_demonstration: as in
        `open_prompts`. Raises `PromptDataError`.
        """
        max_characters = self.max_tokens * self.tokenizer.longest_token
        checked_rows = CheckedRows(self.bad_rows)
        prompts = []
        for question in questions:
            try:
                self._check_lengths(question, max_characters)
                self.bad_rows.read_answer(question)
                prompt = self._tokenize(question)
                if check_demonstration is not None:
                    _require_demonstration(question)
                    check_demonstration(prompt)
            except ValueError as error:
                checked_rows.add_bad(question.origin, str(error))
            else:
                checked_rows.add_usable()
                prompts.append(prompt)
        if not prompts:
            raise self._no_prompt_left(failure, checked_rows)
        return prompts

    def _no_prompt_left(self, failure: str, checked_rows: CheckedRows) -> PromptDataError:
        numbers = {
            "bad rows": self.bad_rows.count or checked_rows.num_bad,
            "repeated questions": self.split.duplicates,
            "training rows that are held out, too": self.split.overlapping,
        }
        counts = ", ".join(f"{name}: {number}" for name, number in numbers.items() if number)
        examples = checked_rows.examples or "".join(
            f"\n  {example}" for example in self.bad_rows.examples[:3]
        )
        failure += f" is left ({counts})" if counts else " is left"
        return PromptDataError(f"{failure}. Correct the rows, or give other data{examples}")

    def _check_lengths(self, question: Question, max_characters: int) -> None:
        """Check lengths first: encoding megabytes takes minutes in which no signal is handled."""
        if len(question.text) > max(max_characters, _QUICK_CHARACTERS):
            raise ValueError(
                f"the prompt has {len(question.text)} characters. "
                f"data.max_prompt_tokens={self.max_tokens} allows at most {max_characters}, "
                f"because the longest token has {self.tokenizer.longest_token}; raise it, or "
                "shorten the prompt"
            )
        for name, value, limit in (
            ("id", question.id, MAX_CHARACTERS),
            ("answer", question.answer, MAX_CHARACTERS),
            ("details", question.details, MAX_CHARACTERS),
            ("response", question.demonstration, _MAX_RESPONSE_CHARACTERS),
        ):
            if len(value) > limit:
                raise ValueError(
                    f"`{name}` has {len(value)} characters; at most {limit} are allowed"
                )

    def _tokenize(self, question: Question) -> Prompt:
        token_ids = self.tokenizer.encode(question.text)
        if not 0 < len(token_ids) <= self.max_tokens:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; data.max_prompt_tokens allows 1 to "
                f"{self.max_tokens}; raise it, or shorten the prompt"
            )
        return Prompt(
            id=f"{self.source}/{question.id}" if self.source else question.id,
            token_ids=token_ids,
            answer=question.answer,
            task=question.task,
            difficulty=question.difficulty,
            demonstration=question.demonstration,
            source=self.source,
            details=question.details,
            text=question.text,
        )


def _require_demonstration(question: Question) -> None:
    if question.demonstration_problem:
        raise ValueError(question.demonstration_problem)
    if not question.demonstration:
        raise ValueError(
            "it has no response, and environment=demonstration needs one to learn from"
        )


def _name_key(settings: DataSettings, section: str, path_key: str, other_key: str) -> str:
    """Return `key=value` of a path, or of another key if the path is not set."""
    key = path_key if getattr(settings, path_key) else other_key
    return f"{section}.{key}={getattr(settings, key)}"
