import time
from pathlib import Path

import pytest

from megatron_rl.models.tokenizer import Tokenizer, write_character_tokenizer
from megatron_rl.prompts.factory import open_prompts
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.worked import worked_examples
from megatron_rl.rewards import ExactMatch


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(directory)
    return Tokenizer.from_directory(directory)


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_the_quickstart_data_by_default(tokenizer: Tokenizer) -> None:
    start = time.process_time()
    source = open_prompts("column_addition", tokenizer)
    assert time.process_time() - start < 5, "goal: 2 s on an idle core"
    assert len(source.train) == 24_000
    assert len(source.held_out) == 512
    ids = [p.id for p in (*source.train, *source.held_out)]
    assert len(set(ids)) == len(ids)
    assert {p.difficulty for p in source.held_out} == {"4_digits", "5_digits", "6_digits"}
    prompt = source.train[0]
    assert prompt.id == f"column_addition/{tokenizer.decode(prompt.token_ids)}"


def test_the_smoke_data_can_be_as_large_as_its_recipe_says(tokenizer: Tokenizer) -> None:
    source = open_prompts("two_digit_addition", tokenizer)
    assert (len(source.train), len(source.held_out)) == (8000, 512)
    with pytest.raises(PromptDataError, match=r"data\.num_train=24000"):
        open_prompts("two_digit_addition", tokenizer, num_train=24_000)
    assert len(worked_examples("two_digit_addition", tokenizer)) == 8000


def test_files_in_their_own_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", *(f'{{"prompt": "{i}+1=", "answer": {i + 1}}}' for i in range(6)))
    held = write(tmp_path / "e.jsonl", '{"prompt": "3+1=", "answer": 4}')
    source = open_prompts("jsonl", tokenizer, train_path=train, eval_path=held, shuffle=False)
    assert [p.answer for p in source.take(4) + source.take(2)] == ["1", "2", "3", "5", "6", "1"]
    assert [p.answer for p in source.held_out] == ["4"]
    assert source.excluded.overlapping == 1
    split = open_prompts("jsonl", tokenizer, train_path=train, num_eval=2)
    assert (len(split.train), len(split.held_out)) == (4, 2)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("Übung", "no token for 'Ü'"), ("1" * 41, "41 tokens; data.max_prompt_tokens allows 1 to 40")],
)
def test_prompts_the_model_cannot_take_are_bad_rows(
    tokenizer: Tokenizer, tmp_path: Path, prompt: str, reason: str
) -> None:
    rows = (f'{{"prompt": "{text}", "answer": "2"}}' for text in ("1+1=", prompt, "2"))
    path = write(tmp_path / "t.jsonl", *rows)
    options = {"train_path": path, "num_eval": 0, "max_prompt_tokens": 40}
    with pytest.raises(PromptDataError, match=rf"t\.jsonl line 2: .*({reason})"):
        open_prompts("jsonl", tokenizer, **options)
    source = open_prompts("jsonl", tokenizer, on_bad_row="skip", **options)
    assert len(source.train) == 2
    assert source.excluded.bad == 1
    assert "line 2" in source.excluded.examples[0]


def test_answers_that_cannot_be_judged_by_are_bad_rows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", '{"prompt": "a", "answer": "paris"}', '{"prompt": "b", "answer": 3}')
    options = {"train_path": path, "num_eval": 0, "check_answer": ExactMatch("last_number").check_answer}
    with pytest.raises(PromptDataError, match=r"t\.jsonl line 1: reward\.answer=last_number: .*'paris' holds none"):
        open_prompts("jsonl", tokenizer, **options)
    assert [p.answer for p in open_prompts("jsonl", tokenizer, on_bad_row="skip", **options).train] == ["3"]


@pytest.mark.parametrize(
    ("train", "held_out", "options", "message"),
    [
        (
            ["1", "2"],
            ["x"],
            {},
            r"data\.eval_path=.*e\.jsonl: no usable held-out prompt is left: 1 bad row.*on_bad_row=fail.*x' holds none",
        ),
        (["x"], ["1"], {}, r"data\.train_path=.*t\.jsonl: no usable training prompt is left: 1 bad row.*x' holds none"),
        (["1"], ["1"], {}, r"data\.train_path=.*: no usable training prompt .* 1 training row\(s\) .* held out too"),
        (["1", "x", "2"], None, {"num_eval": 1}, r"data\.num_eval=1: no usable held-out prompt is left: 1 bad row"),
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
    with pytest.raises(PromptDataError, match=rf"(?s){message}"):
        open_prompts(
            "jsonl",
            tokenizer,
            on_bad_row="skip",
            check_answer=ExactMatch("last_number").check_answer,
            **paths,
            **options,
        )


def test_a_tokenizer_without_the_task_s_characters_is_named(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, "0123456789+=")
    digits_only = Tokenizer.from_directory(tmp_path)
    with pytest.raises(PromptDataError, match=r"column_addition a.*no token for 'a'"):
        open_prompts("column_addition", digits_only, num_train=10, num_eval=2)
    with pytest.raises(PromptDataError, match="no usable training prompt"):
        open_prompts("column_addition", digits_only, num_train=10, num_eval=2, on_bad_row="skip")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "csv"}, r"data\.source=csv: .*column_addition, two_digit_addition, jsonl, reasoning_gym"),
        ({"source": "jsonl", "on_bad_row": "drop"}, r"data\.on_bad_row=drop: must be fail or skip"),
        ({"source": "jsonl"}, r"data\.train_path: missing"),
        ({"source": "reasoning_gym"}, r"data\.task: missing"),
    ],
)
def test_what_is_missing_is_named(tokenizer: Tokenizer, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(PromptDataError, match=message):
        open_prompts(tokenizer=tokenizer, **arguments)


def test_worked_examples_end_and_are_never_held_out_questions(tokenizer: Tokenizer) -> None:
    examples = worked_examples("column_addition", tokenizer, num_train=500, seed=1)
    held_out = {p.token_ids for p in open_prompts("column_addition", tokenizer, num_train=1, seed=0).held_out}
    assert held_out.isdisjoint(e.prompt_ids for e in examples)
    for example in examples:
        assert example.response_ids[-1] == tokenizer.eos_ids[0]
        assert tokenizer.decode(example.response_ids).endswith(f">{example.answer}")
    with pytest.raises(PromptDataError, match="no worked responses"):
        worked_examples("jsonl", tokenizer)
