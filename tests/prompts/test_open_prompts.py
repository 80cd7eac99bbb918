import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from launch.testbed.character_tokenizer import write_character_tokenizer
from megatron_rl.config.schema import DataSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts, open_set
from megatron_rl.prompts.question import PromptDataError, Question
from megatron_rl.prompts.source import PromptSource
from megatron_rl.rewards import ExactMatch


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(directory)
    return Tokenizer.from_directory(directory)


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def opened(source: str, tokenizer: Tokenizer, **settings: object) -> PromptSource:
    return open_prompts(DataSettings(source=source, **settings), tokenizer)


def test_the_quickstart_data_by_default(tokenizer: Tokenizer) -> None:
    start = time.process_time()
    source = opened("column_addition", tokenizer)
    assert time.process_time() - start < 5, "goal: 2 s on an idle core"
    assert len(source.train) == 24_000
    assert len(source.held_out) == 512
    ids = [p.id for p in (*source.train, *source.held_out)]
    assert len(set(ids)) == len(ids)
    assert {p.difficulty for p in source.held_out} == {"4_digits", "5_digits", "6_digits"}
    prompt = source.train[0]
    assert prompt.id == f"column_addition/{tokenizer.decode(prompt.token_ids)}"


def test_the_smoke_data_can_be_as_large_as_its_recipe_says(tokenizer: Tokenizer) -> None:
    source = opened("two_digit_addition", tokenizer, num_train=8000)
    assert (len(source.train), len(source.held_out)) == (8000, 512)
    with pytest.raises(PromptDataError, match=r"data\.num_train=24000"):
        opened("two_digit_addition", tokenizer, num_train=24_000)


def test_files_in_their_own_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    train = write(
        tmp_path / "t.jsonl", *(f'{{"prompt": "{i}+1=", "answer": {i + 1}}}' for i in range(6))
    )
    held = write(tmp_path / "e.jsonl", '{"prompt": "3+1=", "answer": 4}')
    source = opened("jsonl", tokenizer, train_path=train, eval_path=held, shuffle=False)
    assert [p.answer for p in source.take(4) + source.take(2)] == ["1", "2", "3", "5", "6", "1"]
    assert [p.answer for p in source.held_out] == ["4"]
    assert source.excluded.overlapping == 1
    split = opened("jsonl", tokenizer, train_path=train, num_eval=2)
    assert (len(split.train), len(split.held_out)) == (4, 2)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("Übung", "no token for 'Ü'"), ("1" * 41, "41 tokens; data.max_prompt_tokens allows 1 to 40")],
)
def test_prompts_the_model_cannot_take_are_bad_rows(
    tokenizer: Tokenizer, tmp_path: Path, prompt: str, reason: str
) -> None:
    rows = (f'{{"prompt": "{text}", "answer": "2"}}' for text in ("1+1=", prompt, "2"))
    held = write(tmp_path / "e.jsonl", '{"prompt": "3+1=", "answer": 4}')
    path = write(tmp_path / "t.jsonl", *rows)
    options = {"train_path": path, "eval_path": held, "max_prompt_tokens": 40}
    with pytest.raises(PromptDataError, match=rf"t\.jsonl line 2: .*({reason})"):
        opened("jsonl", tokenizer, **options)
    source = opened("jsonl", tokenizer, on_bad_row="skip", **options)
    assert len(source.train) == 2
    assert source.excluded.bad == 1
    assert "line 2" in source.excluded.examples[0]


def test_every_row_that_is_left_out_is_named_with_its_reason(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = ("1+1=", "Übung", "1+1=", "2+2=", "3+1=")
    held = write(tmp_path / "e.jsonl", '{"prompt": "3+1=", "answer": 4}')
    path = write(tmp_path / "t.jsonl", *(f'{{"prompt": "{text}", "answer": "2"}}' for text in rows))
    source = opened("jsonl", tokenizer, on_bad_row="skip", train_path=path, eval_path=held)
    first, *named = source.excluded.report().splitlines()
    assert first == "left out: 1 bad rows, 1 duplicates, 1 that are also held out"
    assert sorted(named) == [
        f"{path} line 2: the tokenizer has no token for 'Ü'",
        f"{path} line 3: repeats the question of {path} line 1",
        f"{path} line 5: is held out too",
    ]


def test_ten_thousand_of_them_are_named_and_the_others_counted(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    bad = [f'{{"prompt": "Ü{i}", "answer": "{i}"}}' for i in range(10_003)]
    path = write(tmp_path / "t.jsonl", '{"prompt": "1+1=", "answer": 2}', *bad)
    held = write(tmp_path / "e.jsonl", '{"prompt": "3+1=", "answer": 4}')
    lines = (
        opened("jsonl", tokenizer, on_bad_row="skip", train_path=path, eval_path=held)
        .excluded.report()
        .splitlines()
    )
    assert len(lines) == 1 + 10_000 + 1 and lines[-1] == "... and 3 more"


def test_nothing_left_out_is_nothing_to_report(tokenizer: Tokenizer) -> None:
    assert opened("column_addition", tokenizer, num_train=100, num_eval=10).excluded.report() == ""


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": "1" * 5_000_000, "answer": "2"},
            "5000000 characters; data.max_prompt_tokens=40 of .* are 200",
        ),
        (
            {"prompt": "1", "answer": "2" * 5_000_000},
            "`answer` has 5000000 characters; at most 65536 are taken",
        ),
        ({"prompt": "1", "answer": "2", "id": "2" * 5_000_000}, "`id` has 5000000 characters"),
        (
            {"prompt": "1+1=", "answer": "2 3 " * 1_000_000},
            "repeats the question of .* with another answer .*…$",
        ),
    ],
)
def test_a_row_of_megabytes_is_refused_before_anything_reads_it(
    tokenizer: Tokenizer, tmp_path: Path, row: dict[str, str], reason: str
) -> None:
    """Encoding one takes minutes in which nobody could stop the run."""
    held = write(tmp_path / "e.jsonl", '{"prompt": "3+1=", "answer": 4}')
    path = write(tmp_path / "t.jsonl", '{"prompt": "1+1=", "answer": 2}', json.dumps(row))
    settings = DataSettings(
        source="jsonl",
        train_path=path,
        eval_path=held,
        max_prompt_tokens=40,
        on_bad_row="skip",
        num_eval=1,
    )
    start = time.process_time()
    excluded = open_prompts(settings, tokenizer, ExactMatch("last_number").check_answer).excluded
    assert time.process_time() - start < 3
    assert excluded.bad == 1 and re.search(f"line 2: {reason}", excluded.examples[0])
    assert len(excluded.examples[0]) < 400


def test_answers_that_cannot_be_judged_by_are_bad_rows(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "t.jsonl", '{"prompt": "a", "answer": "paris"}', '{"prompt": "b", "answer": 3}'
    )
    held = write(tmp_path / "e.jsonl", '{"prompt": "3+1=", "answer": 4}')
    settings = DataSettings(source="jsonl", train_path=path, eval_path=held)
    check = ExactMatch("last_number").check_answer
    with pytest.raises(
        PromptDataError, match=r"t\.jsonl line 1: reward\.answer=last_number: .*'paris' holds no answer"
    ):
        open_prompts(settings, tokenizer, check)
    skipping = replace(settings, on_bad_row="skip")
    assert [p.answer for p in open_prompts(skipping, tokenizer, check).train] == ["3"]


@pytest.mark.parametrize(
    ("train", "held_out", "options", "message"),
    [
        (
            ["1", "2"],
            ["x"],
            {},
            r"data\.eval_path=.*e\.jsonl: no usable held-out prompt is left: 1 bad row.*on_bad_row=fail.*x' holds no answer",
        ),
        (
            ["x"],
            ["1"],
            {},
            r"data\.train_path=.*t\.jsonl: no usable training prompt is left: 1 bad row.*x' holds no answer",
        ),
        (
            ["1"],
            ["1"],
            {},
            r"data\.train_path=.*: no usable training prompt .* 1 training row\(s\) .* held out too",
        ),
        (
            ["1", "x", "2"],
            None,
            {"num_eval": 1},
            r"data\.num_eval=1: no usable held-out prompt is left: 1 bad row",
        ),
    ],
)
def test_a_side_without_a_usable_prompt_is_named(
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: list[str],
    held_out: list[str] | None,
    options: dict[str, int],
    message: str,
) -> None:
    # The smallest hash is held out: make it that of the row whose answer cannot be judged by.
    monkeypatch.setattr("megatron_rl.prompts.split._rank", lambda identity: int(identity != "x+0="))
    rows = [f'{{"prompt": "{i}+0=", "answer": "{i}"}}' for i in train]
    paths = {"train_path": write(tmp_path / "t.jsonl", *rows)}
    if held_out is not None:
        rows = [f'{{"prompt": "{i}+0=", "answer": "{i}"}}' for i in held_out]
        paths["eval_path"] = write(tmp_path / "e.jsonl", *rows)
    settings = DataSettings(source="jsonl", on_bad_row="skip", **paths, **options)
    with pytest.raises(PromptDataError, match=rf"(?s){message}"):
        open_prompts(settings, tokenizer, ExactMatch("last_number").check_answer)


def test_a_tokenizer_without_the_task_s_characters_is_named(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, "0123456789+=")
    digits_only = Tokenizer.from_directory(tmp_path)
    with pytest.raises(PromptDataError, match=r"column_addition/a.*no token for 'a'"):
        opened("column_addition", digits_only, num_train=10, num_eval=2)
    with pytest.raises(PromptDataError, match="no usable training prompt"):
        opened("column_addition", digits_only, num_train=10, num_eval=2, on_bad_row="skip")


def test_worked_responses_come_with_their_prompts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = opened("column_addition", tokenizer, num_train=100, num_eval=10)
    for prompt in (*source.train, *source.held_out):
        assert prompt.demonstration.endswith(f">{prompt.answer}")
    path = write(
        tmp_path / "t.jsonl", '{"prompt": "a", "answer": 1}', '{"prompt": "b", "answer": 3}'
    )
    assert opened("jsonl", tokenizer, train_path=path, num_eval=1).train[0].demonstration == ""


class Yields:
    """A source of a user's own that yields what it is told to, by name."""

    GIVEN = MappingProxyType(
        {
            "text": ["1+1="],
            "number": [Question(id="1", text="1+1=", answer=2, task="t")],
            "one_id": [
                Question(id="1", text=text, answer="2", task="t") for text in ("1+1=", "2+0=")
            ],
            "few": [Question(id="1", text="1+1=", answer="2", task="t")] * 3,
        }
    )

    def __init__(self, what: str) -> None:
        self.what = what

    def questions(self, seed: int) -> Iterator[Question]:
        return iter(self.GIVEN[self.what])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("text", r"data\.source=.*:Yields: it yields str, not a Question"),
        ("number", r"data\.source=.*:Yields: Question\.answer=2: it must be a str"),
        (
            "one_id",
            r"data\.source=.*:Yields: id '1' names '1\+1=' and '2\+0='\. Give every question an id of its own",
        ),
        ("few", r"data\.num_train=24000, data\.num_eval=512: the task gave only \d training"),
    ],
)
def test_what_a_source_of_ones_own_does_wrong_is_named(
    tokenizer: Tokenizer, what: str, message: str
) -> None:
    with pytest.raises(PromptDataError, match=message) as caught:
        opened(f"{__name__}:Yields", tokenizer, options={"what": what})
    assert caught.value.exit_code is ExitCode.BAD_DATA


def test_options_that_a_source_does_not_take_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        PluginError, match=r"data\.options\.whta: .*:Yields\(what\).*Did you mean what\?"
    ):
        opened(f"{__name__}:Yields", tokenizer, options={"whta": "few"})


def test_a_set_of_questions_is_read_without_repeats_and_bad_rows_are_named(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [
        json.dumps({"prompt": text, "answer": "4"}) for text in ("2+2=", "1+3=", "2+2=", "9" * 600)
    ]
    file, settings = (
        write(tmp_path / "sums.jsonl", *rows),
        DataSettings(source="jsonl", on_bad_row="skip", max_prompt_tokens=64),
    )
    assert [prompt.answer for prompt in open_set("sums", file, settings, tokenizer)] == ["4", "4"]
    with pytest.raises(PromptDataError, match=r"sums\.jsonl line 4.*tokens"):
        open_set("sums", file, replace(settings, on_bad_row="fail"), tokenizer)
    with pytest.raises(PromptDataError, match=r"eval\.sets\.gone=.*cannot be read"):
        open_set("gone", str(tmp_path / "gone.jsonl"), settings, tokenizer)
    only_long = write(tmp_path / "long.jsonl", rows[3])
    with pytest.raises(PromptDataError, match=r"eval\.sets\.long=.*no usable held-out"):
        open_set("long", only_long, settings, tokenizer)
