import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from megatron_rl.config.schema import DataSettings, RewardSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.environments.demonstration import Demonstration
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts, open_set
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.source import PromptSource
from megatron_rl.rewards import open_answer_reader
from tests.support.character_tokenizer import write_character_tokenizer
from tests.support.processor_time import processor_seconds
from tests.support.scripted_model import ScriptedModel, open_episode


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(directory)
    return Tokenizer.from_directory(directory)


READ_ANSWER = open_answer_reader(RewardSettings())


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def write_rows(path: Path, *texts: str, answer: str = "2") -> str:
    return write(path, *[json.dumps({"prompt": text, "answer": answer}) for text in texts])


def open_source(source: str, tokenizer: Tokenizer, **settings: Any) -> PromptSource:
    return open_prompts(DataSettings(source=source, **settings), tokenizer)


@pytest.fixture
def held_out_file(tmp_path: Path) -> str:
    return write(tmp_path / "e.jsonl", '{"prompt": "3+1=", "answer": 4}')


@pytest.mark.slow
def test_default_data_of_the_quickstart(tokenizer: Tokenizer) -> None:
    sources: list[PromptSource] = []
    seconds = processor_seconds(lambda: sources.append(open_source("column_addition", tokenizer)))
    assert seconds < 5, "goal: 2 s"
    (source,) = sources
    assert len(source.train) == 24_000
    assert len(source.held_out) == 512
    ids = [prompt.id for prompt in (*source.train, *source.held_out)]
    assert len(set(ids)) == len(ids)
    difficulties = {prompt.difficulty for prompt in source.held_out}
    assert difficulties == {"4_digits", "5_digits", "6_digits"}
    prompt = source.train[0]
    assert prompt.id == f"column_addition/{tokenizer.decode(prompt.token_ids)}"


@pytest.mark.slow
def test_smoke_data_have_the_size_of_their_recipe(tokenizer: Tokenizer) -> None:
    source = open_source("two_digit_addition", tokenizer, num_train=8000)
    assert (len(source.train), len(source.held_out)) == (8000, 512)
    with pytest.raises(PromptDataError, match=r"data\.num_train=24000"):
        open_source("two_digit_addition", tokenizer, num_train=24_000)


def numbered_rows(path: Path) -> str:
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(6)]
    return write(path / "t.jsonl", *map(json.dumps, rows))


def test_files_keep_their_order(tokenizer: Tokenizer, tmp_path: Path, held_out_file: str) -> None:
    train = numbered_rows(tmp_path)
    source = open_source(
        "jsonl", tokenizer, train_path=train, eval_path=held_out_file, shuffle=False
    )
    prompts = source.take(4) + source.take(2)
    assert [prompt.answer for prompt in prompts] == ["1", "2", "3", "5", "6", "1"]
    assert [prompt.answer for prompt in source.held_out] == ["4"]
    assert source.excluded_rows.overlapping == 1


def test_one_file_is_split(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = open_source("jsonl", tokenizer, train_path=numbered_rows(tmp_path), num_eval=1)
    assert (len(source.train), len(source.held_out)) == (5, 1)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("Übung", "no token for 'Ü'"),
        ("1" * 41, "41 tokens; data.max_prompt_tokens allows 1 to 40; raise it"),
    ],
)
def test_prompts_that_the_model_cannot_read_are_bad_rows(
    tokenizer: Tokenizer, tmp_path: Path, held_out_file: str, prompt: str, reason: str
) -> None:
    path = write_rows(tmp_path / "t.jsonl", "1+1=", prompt, "2")
    options = {"train_path": path, "eval_path": held_out_file, "max_prompt_tokens": 40}
    with pytest.raises(PromptDataError, match=rf"t\.jsonl line 2: .*({reason})"):
        open_source("jsonl", tokenizer, **options)
    source = open_source("jsonl", tokenizer, on_bad_row="skip", **options)
    assert len(source.train) == 2
    assert source.excluded_rows.bad == 1
    assert "line 2" in source.excluded_rows.examples[0]


def test_every_excluded_row_is_reported_with_its_reason(
    tokenizer: Tokenizer, tmp_path: Path, held_out_file: str
) -> None:
    texts = ("1+1=", "Übung", "1+1=", "2+2=", "3+1=")
    path = write_rows(tmp_path / "t.jsonl", *texts, answer="4")
    source = open_source(
        "jsonl", tokenizer, on_bad_row="skip", train_path=path, eval_path=held_out_file
    )
    first, *messages = source.excluded_rows.report().splitlines()
    assert first == "not used: 1 bad rows, 1 duplicates, 1 that are also held out"
    assert sorted(messages) == [
        f"{path} line 2: the tokenizer has no token for 'Ü'",
        f"{path} line 3: repeats the question of {path} line 1",
        f"{path} line 5: repeats the question of {held_out_file} line 1, which is held out",
    ]


@pytest.mark.slow
def test_the_report_names_ten_thousand_rows_and_counts_others(
    tokenizer: Tokenizer, tmp_path: Path, held_out_file: str
) -> None:
    path = write_rows(tmp_path / "t.jsonl", "1+1=", *[f"Ü{i}" for i in range(10_003)])
    source = open_source(
        "jsonl", tokenizer, on_bad_row="skip", train_path=path, eval_path=held_out_file
    )
    lines = source.excluded_rows.report().splitlines()
    assert len(lines) == 1 + 10_000 + 1
    assert lines[-1] == "... and 3 more"


def test_without_excluded_rows_the_report_is_empty(tokenizer: Tokenizer) -> None:
    source = open_source("column_addition", tokenizer, num_train=100, num_eval=10)
    assert source.excluded_rows.report() == ""


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "1" * 5_000_000, "answer": "2"}, "5000000 characters.*=40 allows at most 200"),
        ({"prompt": "1", "answer": "2" * 5_000_000}, "`answer` has 5000000 .* at most 65536"),
        ({"prompt": "1", "answer": "2", "id": "2" * 5_000_000}, "`id` has 5000000 characters"),
        (
            {"prompt": "1+1=", "answer": "2 3 " * 1_000_000},
            "repeats the question of .* with another answer .*…$",
        ),
    ],
    ids=["prompt", "answer", "id", "repetition"],
)
def test_rows_of_megabytes_are_refused_quickly(
    tokenizer: Tokenizer, tmp_path: Path, held_out_file: str, row: dict[str, str], reason: str
) -> None:
    """Encoding such a row takes minutes in which no signal is handled."""
    settings = DataSettings(
        source="jsonl",
        train_path=write(tmp_path / "t.jsonl", '{"prompt": "1+1=", "answer": 2}', json.dumps(row)),
        eval_path=held_out_file,
        max_prompt_tokens=40,
        on_bad_row="skip",
        num_eval=1,
    )
    sources: list[PromptSource] = []
    seconds = processor_seconds(
        lambda: sources.append(open_prompts(settings, tokenizer, READ_ANSWER))
    )
    assert seconds < 3
    excluded_rows = sources[0].excluded_rows
    assert excluded_rows.bad == 1
    (message,) = excluded_rows.examples
    assert re.search(f"line 2: .*{reason}", message)
    assert len(message) < 400


def test_answers_that_the_scorer_refuses_are_bad_rows(
    tokenizer: Tokenizer, tmp_path: Path, held_out_file: str
) -> None:
    path = write(
        tmp_path / "t.jsonl", '{"prompt": "a", "answer": "paris"}', '{"prompt": "b", "answer": 3}'
    )
    settings = DataSettings(source="jsonl", train_path=path, eval_path=held_out_file)
    with pytest.raises(PromptDataError, match=r"t\.jsonl line 1: .*last_number: .*'paris'"):
        open_prompts(settings, tokenizer, READ_ANSWER)
    with_skip = replace(settings, on_bad_row="skip")
    prompts = open_prompts(with_skip, tokenizer, READ_ANSWER).train
    assert [prompt.answer for prompt in prompts] == ["3"]


@pytest.mark.parametrize(
    ("train", "held_out", "num_eval", "words"),
    [
        (["1", "2"], ["x"], 512, r"data\.eval_path=.*e\.jsonl: .*held-out prompt.*bad rows: 1.*x'"),
        (["x"], ["1"], 512, r"data\.train_path=.*t\.jsonl: .*training prompt.*bad rows: 1.*x'"),
        (["1"], ["1"], 512, r"data\.train_path=.*training prompt.*held out, too: 1\)"),
        (["3", "x", "6"], None, 1, r"data\.num_eval=1: .*held-out prompt.*bad rows: 1"),
    ],
)
def test_a_side_without_usable_prompt_is_named(
    tokenizer: Tokenizer,
    tmp_path: Path,
    train: list[str],
    held_out: list[str] | None,
    num_eval: int,
    words: str,
) -> None:
    """The file of the last case holds x+0= out, whose answer the scorer refuses."""

    def write_answers(path: Path, answers: list[str]) -> str:
        rows = [{"prompt": f"{answer}+0=", "answer": answer} for answer in answers]
        return write(path, *map(json.dumps, rows))

    settings = DataSettings(
        source="jsonl",
        on_bad_row="skip",
        num_eval=num_eval,
        train_path=write_answers(tmp_path / "t.jsonl", train),
        eval_path=None if held_out is None else write_answers(tmp_path / "e.jsonl", held_out),
    )
    with pytest.raises(PromptDataError, match=rf"(?s){words}"):
        open_prompts(settings, tokenizer, READ_ANSWER)


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize(
    ("answer", "options", "reason"),
    [
        ("2", {"max_prompt_tokens": 3}, "the prompt has 4 tokens"),
        ("two", {}, "'two' holds no answer"),
        ("2", {"demonstration": True}, "it has no response"),
    ],
)
def test_a_file_whose_rows_are_all_bad_is_named_once(
    tokenizer: Tokenizer, tmp_path: Path, policy: Any, answer: str, options: Any, reason: str
) -> None:
    """Leaving the bad rows out would leave nothing."""
    path = write_rows(tmp_path / "t.jsonl", *[f"{i}+1=" for i in range(9)], answer=answer)
    held_out = write(tmp_path / "e.jsonl", '{"prompt": "3=", "answer": 4, "response": "4"}')
    settings = DataSettings(
        source="jsonl",
        on_bad_row=policy,
        train_path=path,
        eval_path=held_out,
        max_prompt_tokens=options.get("max_prompt_tokens", 8),
    )
    check = check_demonstration(tokenizer) if "demonstration" in options else None
    words = rf"(?s)^data\.train_path=.*no usable training prompt.*bad rows: 9\).*line 1: .*{reason}"
    with pytest.raises(PromptDataError, match=words) as error:
        open_prompts(settings, tokenizer, READ_ANSWER, check_demonstration=check)
    message = str(error.value)
    assert "on_bad_row" not in message and " 0 " not in message
    assert message.count(reason) == 1


def test_a_tokenizer_without_the_characters_of_a_task_is_named(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, "0123456789+=")
    tokenizer = Tokenizer.from_directory(tmp_path)
    options = {"num_train": 10, "num_eval": 2}
    for policy in ("fail", "skip"):
        words = r"(?s)no usable training prompt.*column_addition/a.*no token for 'a'"
        with pytest.raises(PromptDataError, match=words):
            open_source("column_addition", tokenizer, on_bad_row=policy, **options)


def test_embedded_tasks_have_demonstrations(tokenizer: Tokenizer) -> None:
    source = open_source("column_addition", tokenizer, num_train=100, num_eval=10)
    for prompt in (*source.train, *source.held_out):
        assert prompt.demonstration.endswith(f">{prompt.answer}")


def test_rows_without_response_have_no_demonstration(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", "a", "b")
    source = open_source("jsonl", tokenizer, train_path=path, num_eval=1)
    assert source.train[0].demonstration == ""


def test_rows_without_response_are_bad_rows_if_demonstrations_are_needed(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    row = {"prompt": "1+1=", "answer": "2", "response": "2"}
    lines = [json.dumps(row | {"prompt": f"{i}+1="}) for i in range(4)]
    path = write(tmp_path / "t.jsonl", *lines, '{"prompt": "5+1=", "answer": "6"}')
    settings = DataSettings(source="jsonl", train_path=path, num_eval=1)
    words = r"t\.jsonl line 5: .*environment=demonstration.*data\.on_bad_row=skip"
    with pytest.raises(PromptDataError, match=words):
        open_prompts(settings, tokenizer, check_demonstration=check_demonstration(tokenizer))


def check_demonstration(
    tokenizer: Tokenizer, *, max_new_tokens: int = 8, with_calls: bool = False
) -> Callable[[Prompt], None]:
    environment = Demonstration(with_calls=with_calls)
    return lambda prompt: environment.check(prompt, tokenizer, max_new_tokens)


@pytest.mark.parametrize(
    ("response", "with_calls", "num_tokens", "limit"),
    [
        ("2", False, 2, 1),  # with its end-of-sequence token
        ("2345678", False, 8, 7),
        ("2345678", False, 8, 8),
        ("3+8=11", True, 8, 7),  # the call with its end, the result, and the end of an empty rest
        ("3+8=11", True, 8, 8),
        ("1+3=04b3+8=11", True, 16, 15),
        ("1+3=04b3+8=11", True, 16, 16),
        ("3+8=11", False, 7, 7),
        ("12" * 500, False, 1001, 1000),
        ("12" * 500, False, 1001, 1001),
    ],
)
def test_demonstrations_that_are_too_long_are_bad_rows(
    tokenizer: Tokenizer,
    tmp_path: Path,
    response: str,
    with_calls: bool,
    num_tokens: int,
    limit: int,
) -> None:
    """All tokens of an episode count, and the row is named while the data is read."""
    row = {"prompt": "5+1=", "answer": "6", "response": response}
    path = write(tmp_path / "t.jsonl", json.dumps(row))
    held_out = write(tmp_path / "e.jsonl", '{"prompt": "3=", "answer": 4}')
    settings = DataSettings(source="jsonl", train_path=path, eval_path=held_out)
    check = check_demonstration(tokenizer, max_new_tokens=limit, with_calls=with_calls)
    if num_tokens <= limit:
        (prompt,) = open_prompts(settings, tokenizer, check_demonstration=check).train
        model = ScriptedModel([])
        episode = open_episode(model, routes=None, prompt=prompt, tokenizer=tokenizer, budget=limit)
        Demonstration(with_calls=with_calls).demonstrate(episode)
        assert episode.rollout().num_tokens == len(prompt.token_ids) + num_tokens
        return
    words = (
        rf"t\.jsonl line 1: .*demonstration has {num_tokens} tokens, and "
        rf"rollout\.max_new_tokens={limit}\. Raise it, or shorten"
    )
    with pytest.raises(PromptDataError, match=words):
        open_prompts(settings, tokenizer, check_demonstration=check)


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("3+8=12", r"another result than 11 after '3\+8='"),
        ("é", "no token for 'é'"),
        ("3+8=11é", "no token for 'é'"),
    ],
)
def test_demonstrations_that_no_episode_can_play_are_bad_rows(
    tokenizer: Tokenizer, tmp_path: Path, response: str, words: str
) -> None:
    rows = [{"prompt": "5+1=", "answer": "6", "response": text} for text in ("6", response)]
    rows[1]["prompt"] = "4+2="
    path = write(tmp_path / "t.jsonl", *map(json.dumps, rows))
    held_out = write(tmp_path / "e.jsonl", '{"prompt": "3=", "answer": 4}')
    settings = DataSettings(source="jsonl", train_path=path, eval_path=held_out)
    check = check_demonstration(tokenizer, with_calls=True)
    with pytest.raises(PromptDataError, match=rf"t\.jsonl line 2: .*{words}"):
        open_prompts(settings, tokenizer, check_demonstration=check)
    settings = DataSettings(source="jsonl", train_path=path, eval_path=held_out, on_bad_row="skip")
    (prompt,) = open_prompts(settings, tokenizer, check_demonstration=check).train
    assert prompt.demonstration == "6"


class FixedQuestions:
    """User-defined source that yields fixed values."""

    VALUES = MappingProxyType(
        {
            "text": ["1+1="],
            "number": [Question(id="1", text="1+1=", answer=2, task="t")],  # type: ignore[arg-type]
            "one_id": [
                Question(id="1", text=text, answer="2", task="t") for text in ("1+1=", "2+0=")
            ],
            "few": [Question(id="1", text="1+1=", answer="2", task="t")] * 3,
        }
    )

    def __init__(self, name: str) -> None:
        self.name = name

    def questions(self, seed: int) -> Iterator[Any]:
        return iter(self.VALUES[self.name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text", r"data\.source=.*:FixedQuestions: it yields str, not a Question"),
        ("number", r"data\.source=.*:FixedQuestions: Question\.answer=2: it must be a str"),
        ("one_id", r"data\.source=.*:FixedQuestions: id '1' .*'1\+1=' and '2\+0='.*unique id"),
        ("few", r"data\.num_train=24000, data\.num_eval=512: .* only \d training"),
    ],
)
def test_mistakes_of_a_user_defined_source_are_named(
    tokenizer: Tokenizer, name: str, words: str
) -> None:
    with pytest.raises(PromptDataError, match=words) as error:
        open_source(f"{__name__}:FixedQuestions", tokenizer, options={"name": name})
    assert error.value.exit_code is ExitCode.BAD_DATA


def test_unknown_options_of_a_user_defined_source_are_refused(tokenizer: Tokenizer) -> None:
    words = r"data\.options\.nmae: .*:FixedQuestions\(name\).*Did you mean name\?"
    with pytest.raises(PluginError, match=words):
        open_source(f"{__name__}:FixedQuestions", tokenizer, options={"nmae": "few"})


def test_rows_without_an_id_are_named_by_their_line_in_the_file(
    tokenizer: Tokenizer, tmp_path: Path, held_out_file: str
) -> None:
    """Bad rows, repeated ones and empty lines count."""
    path = write(
        tmp_path / "t.jsonl",
        '{"prompt": "1+1=", "answer": 2}',
        "",
        "no JSON",
        '{"prompt": "1+1=", "answer": 2}',
        '{"prompt": "2+2=", "answer": 4, "id": "own"}',
        '{"prompt": "5+2=", "answer": 7}',
    )
    source = open_source(
        "jsonl", tokenizer, train_path=path, eval_path=held_out_file, on_bad_row="skip"
    )
    ids = [prompt.id for prompt in source.train]
    assert ids == ["data.train_path:1", "own", "data.train_path:6"]
    assert [prompt.id for prompt in source.held_out] == ["data.eval_path:1"]


class WithoutQuestions:
    """Lacks the method `questions`."""


def test_a_user_defined_source_without_questions_is_refused(tokenizer: Tokenizer) -> None:
    words = r"data\.source=.*:WithoutQuestions: it has no method `questions`"
    with pytest.raises(PluginError, match=words):
        open_source(f"{__name__}:WithoutQuestions", tokenizer)


def test_questions_that_another_num_eval_holds_out_are_counted(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(40)]
    path = write(tmp_path / "t.jsonl", *map(json.dumps, rows))
    source = open_source("jsonl", tokenizer, train_path=path, num_eval=2)
    num_reserved = 40 - len(source.train) - 2
    assert num_reserved >= 8, "a quarter of a small file is reserved"
    assert source.excluded_rows.num_reserved == num_reserved
    assert source.notes()[0].endswith(f", {num_reserved} reserved for evaluation")


SET_SETTINGS = DataSettings(source="jsonl", on_bad_row="skip", max_prompt_tokens=64)


def test_an_evaluation_set_has_each_question_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "sums.jsonl", "2+2=", "1+3=", "2+2=", "9" * 600, answer="4")
    prompts = open_set("sums", file, SET_SETTINGS, tokenizer)
    assert [prompt.answer for prompt in prompts] == ["4", "4"]
    with pytest.raises(PromptDataError, match=r"sums\.jsonl line 4: .* 600 tokens"):
        open_set("sums", file, replace(SET_SETTINGS, on_bad_row="fail"), tokenizer)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (None, r"eval\.sets\.s=.*cannot be read"),
        (["9" * 600], r"eval\.sets\.s=.*no usable held-out"),
    ],
)
def test_evaluation_sets_without_usable_question_are_named(
    tokenizer: Tokenizer, tmp_path: Path, texts: list[str] | None, words: str
) -> None:
    file = tmp_path / "s.jsonl"
    if texts is not None:
        write_rows(file, *texts)
    with pytest.raises(PromptDataError, match=words):
        open_set("s", str(file), SET_SETTINGS, tokenizer)
