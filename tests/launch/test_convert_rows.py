"""Rows of slime and verl become rows that the trainer reads."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from launch.convert_rows import main
from megatron_rl.prompts.files.reader import DataLocation, read_questions
from megatron_rl.prompts.question import BadRows, Question

USER = {"role": "user", "content": "48/2 + 48?"}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}


def verl_row(index: int, answer: Any = "72", **changes: Any) -> dict[str, Any]:
    """A row as verl's examples/data_preprocess/gsm8k.py writes it."""
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{index} clips?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": index, "answer": "#### 72", "question": "q"},
    }
    return row | changes


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    return json.dumps([list(messages), list(tools)])


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def convert(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["convert_rows.py", *map(str, arguments)])
    return main()


def read(path: Path) -> list[Question]:
    return read_questions(DataLocation(str(path), "k"), BadRows("fail"), render=render)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    source = tmp_path / "train.parquet"
    rows = [verl_row(0), verl_row(1, "1.50")]
    pa.parquet.write_table(pa.Table.from_pylist(rows), source)
    target = tmp_path / f"rows.{suffix}"
    assert convert(monkeypatch, source, target, "--format", "verl") == 0
    first, second = read(target)
    assert first.id == "openai/gsm8k/train/0" and first.task == "openai/gsm8k"
    assert (first.answer, second.answer) == ("72", "1.50")
    assert json.loads(first.text) == [[{"role": "user", "content": "0 clips?"}], []]


def test_rows_of_slime_with_a_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = USER | {"step_loss_mask": 1}
    source = write_lines(
        tmp_path / "dapo.jsonl",
        {"prompt": [message], "label": "34", "metadata": {"difficulty": "hard", "x": 1}},
        {"prompt": "2+2", "label": 4, "t": json.dumps([TOOL])},
    )
    target = tmp_path / "rows.jsonl"
    flags = ("--apply-chat-template", "--tool-key", "t")
    assert convert(monkeypatch, source, target, *flags) == 0
    first, second = read(target)
    assert json.loads(first.text) == [[USER], []]
    assert (first.answer, first.difficulty) == ("34", "hard")
    assert json.loads(second.text) == [[{"role": "user", "content": "2+2"}], [TOOL]]


def test_rows_with_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "gsm8k.jsonl"
    source.write_text('{"question": "1/2+4", "answer": 4.50}\n\n{"question": "q", "answer": "a"}\n')
    target = tmp_path / "rows.jsonl"
    keys = ("--input-key", "question", "--label-key", "answer")
    assert convert(monkeypatch, source, target, *keys) == 0
    assert [(q.text, q.answer) for q in read(target)] == [("1/2+4", "4.50"), ("q", "a")]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (verl_row(1, ["1", "2"]), "`reward_model.ground_truth` must be a text or a number"),
        (verl_row(1, None), "must be a text or a number, got null"),
        (verl_row(1, True), "must be a text or a number, got true"),
        (verl_row(1, reward_model={"style": "rule"}), "`reward_model.ground_truth` is missing"),
        (verl_row(1, reward_model={"style": "model", "ground_truth": "1"}), "style` is 'model'"),
        (verl_row(1, prompt=None), "the row has neither `prompt`"),
        (
            verl_row(1, prompt=[{"role": "user", "content": [{"type": "image"}]}]),
            "messages[0].content",
        ),
        (verl_row(1, images=["x.png"]), "has `images`"),
        (verl_row(0), "id 'openai/gsm8k/train/0' is already used in"),
        (3, "Expected `object`"),
    ],
)
def test_rows_that_cannot_be_converted_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    row: Any,
    words: str,
) -> None:
    source = write_lines(tmp_path / "t.jsonl", verl_row(0), row, verl_row(2, ["72"]))
    target = tmp_path / "rows.parquet"
    assert convert(monkeypatch, source, target, "--format", "verl") == 3
    error = capsys.readouterr().err
    assert f"{source} line 2: " in error and words in error
    assert "1 of 3 rows cannot be converted" in error
    assert not target.exists()
    assert convert(monkeypatch, source, target, "--format", "verl", "--skip") == 0
    assert [question.answer for question in read(target)] == ["72", "72"]


def test_messages_need_the_flag_and_files_need_their_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "t.jsonl", {"prompt": [USER], "label": "1"})
    target = tmp_path / "rows.jsonl"
    assert convert(monkeypatch, source, target) == 3
    assert "Give --apply-chat-template" in capsys.readouterr().err
    assert convert(monkeypatch, source, tmp_path / "rows.csv") == 3
    assert "ends with .jsonl or .parquet" in capsys.readouterr().err
    assert convert(monkeypatch, tmp_path / "none", target) == 3
    assert "none cannot be read" in capsys.readouterr().err
    assert convert(monkeypatch, source, source) == 3
    assert "exists already" in capsys.readouterr().err


def test_the_command_runs_without_torch(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "t.jsonl", verl_row(0))
    program = (
        "import sys; sys.argv = ['convert_rows.py', *sys.argv[1:]]\n"
        "from launch.convert_rows import main\n"
        "assert main() == 0 and 'torch' not in sys.modules and 'pyarrow' not in sys.modules\n"
    )
    arguments = [str(source), str(tmp_path / "rows.jsonl"), "--format", "verl"]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True)


CSV = {
    "plain": ("question,answer\n1+1=?,2\n2+3=?,5\n", ["1+1=?", "2+3=?"]),
    "byte order mark, CRLF": ("\ufeffquestion,answer\r\n1+1=?,2\r\n", ["1+1=?"]),
    "quotes, commas, lines": ('question,answer\n"a, ""b""\n1+1=?",2\n', ['a, "b"\n1+1=?']),
    "no value for an extra column": ("question,note,answer\n1+1=?,,2\n", ["1+1=?"]),
}


@pytest.mark.parametrize("name", CSV)
def test_rows_of_a_csv_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text, prompts = CSV[name]
    source = tmp_path / "rows.csv"
    source.write_bytes(text.encode())
    target = tmp_path / "rows.jsonl"
    keys = ("--input-key", "question", "--label-key", "answer")
    assert convert(monkeypatch, source, target, *keys) == 0
    assert [question.text for question in read(target)] == prompts


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"question,answer\n1+1=?,2,3\n", "line 2: more values than the first line has names"),
        (b'question,answer\n"1+1=?,2\n', "unexpected end of data"),
        (b"question;answer\n1+1=?;2\n", "`question` is missing. The row has: question;answer"),
        (b"question,answer\n\xff,2\n", "can't decode byte 0xff"),
        (b"question,answer\n1+1=?,\n", "`answer` is missing"),
    ],
)
def test_csv_files_with_problems_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    problem: str,
) -> None:
    source = tmp_path / "rows.csv"
    source.write_bytes(content)
    keys = ("--input-key", "question", "--label-key", "answer")
    assert convert(monkeypatch, source, tmp_path / "rows.jsonl", *keys) == 3
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()
