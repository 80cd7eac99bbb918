"""Rows as other programs write them: nulls, and columns of other trainers."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.prompts.files.reader import DataLocation, read_questions
from megatron_rl.prompts.files.row import parse_question, refuse_messages
from megatron_rl.prompts.question import BadRows, PromptDataError

NULL_ROWS = [
    '{"prompt": "1+1=", "answer": "2", "response": null}',
    '{"prompt": "1+1=", "answer": "2", "messages": null}',
    '{"prompt": "1+1=", "answer": null, "response": "2"}',
    '{"prompt": "1+1=", "answer": "2", "id": null, "task": null, "difficulty": null}',
    '{"prompt": "1+1=", "answer": "2", "tools": null}',
    '{"prompt": "1+1=", "answer" : null , "response": "2"}',
    '{"prompt": "1+1=", "answer": 2, "response": null, "messages": null, "extra": null}',
]


@pytest.mark.parametrize("row", NULL_ROWS)
def test_a_null_is_a_missing_key(row: str) -> None:
    question = parse_question(
        row.encode(), "line 1", refuse_messages, default_id="1", default_task="t"
    )
    values = (question.id, question.text, question.answer, question.task, question.difficulty)
    assert values == ("1", "1+1=", "2", "t", "")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": null, "answer": "2"}', "neither `prompt` nor `messages`"),
        ('{"prompt": "1+1=", "answer": null}', "`answer` is missing"),
        ('{"prompt": "1+1=", "answer": null, "response": null}', "`answer` is missing"),
    ],
)
def test_a_null_of_a_needed_key_is_named(row: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_question(row.encode(), "line 1", refuse_messages, default_id="1", default_task="t")


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        (
            {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"style": "rule"}},
            r"data\.columns\.messages=prompt$",
        ),
        ({"prompt": "1+1=", "answer": ["2"]}, r"data\.columns\.answer=answer$"),
        ({"prompt": {"text": "1+1="}, "answer": "2"}, r"data\.columns\.prompt=COLUMN$"),
        (
            {"problem": "1+1=", "solution": "2"},
            r"It has: problem, solution\. .*data\.columns\.prompt=COLUMN",
        ),
    ],
    ids=["verl", "lists", "objects", "names"],
)
def test_a_parquet_of_another_trainer_gets_the_setting_that_reads_it(
    tmp_path: Path, row: dict[str, Any], remedy: str
) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([row]), file)
    location = DataLocation(str(file), "data.train_path")
    with pytest.raises(PromptDataError, match=remedy):
        read_questions(location, BadRows("fail"), render=refuse_messages)
