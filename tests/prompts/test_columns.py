"""Files of other trainers: `data.columns` names the columns that hold the keys of a row."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from megatron_rl.config.schema import DataSettings, SourceSettings
from megatron_rl.contracts.prompt import Question
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts, open_set
from megatron_rl.prompts.files.columns import Columns
from megatron_rl.prompts.files.reader import DataLocation, read_questions
from megatron_rl.prompts.pass_rates import identity_of
from megatron_rl.prompts.question import BadRows, PromptDataError
from tests.support.policies import TWO_DIGIT_ADDITION

USER = {"role": "user", "content": "48/2 + 48?"}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
VERL = {
    "messages": "prompt",
    "answer": "reward_model.ground_truth",
    "task": "data_source",
    "id": "extra_info.index",
}
MATH = {"prompt": "problem", "answer": "solution"}


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


def write(path: Path, *rows: Any) -> Path:
    """Write rows as JSONL, or as Parquet if the name says so."""
    if path.suffix != ".parquet":
        return write_lines(path, *rows)
    pa.parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def read(path: Path, policy: Any = "fail", **names: str) -> list[Question]:
    location = DataLocation(str(path), "data.train_path", columns=Columns(names))
    return read_questions(location, BadRows(policy), render=render)


FORMATS = pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])


@FORMATS
def test_rows_of_verl(tmp_path: Path, name: str) -> None:
    first, second = read(write(tmp_path / name, verl_row(0), verl_row(1, "1.50")), **VERL)
    assert (first.id, first.task) == ("0", "openai/gsm8k")
    assert (first.answer, second.answer) == ("72", "1.50")
    assert json.loads(first.text) == [[{"role": "user", "content": "0 clips?"}], []]


@FORMATS
def test_rows_with_other_names(tmp_path: Path, name: str) -> None:
    """The column `prompt` has another meaning here, and `difficulty` its own."""
    row = {"problem": "1/2+4", "solution": 4.5, "prompt": "Solve.", "difficulty": "hard"}
    (question,) = read(write(tmp_path / name, row), **MATH)
    assert (question.text, question.answer, question.difficulty) == ("1/2+4", "4.5", "hard")


def test_digits_of_a_nested_number_stay(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "a", "x": {"y": {"z": 4.50}}}\n\n{"q": "b", "x.y.z": 1e3, "x": 2}\n')
    assert [q.answer for q in read(file, prompt="q", answer="x.y.z")] == ["4.50", "1000"]


def narrow_table(answer: Any, kind: pa.DataType, *, other: float = 0.5) -> pa.Table:
    """Two rows: the second one has `answer`. other: a number that nothing reads."""
    info = pa.struct([("truth", kind), ("other", pa.float32())])
    rows = [{"truth": None, "other": 1.0}, {"truth": answer, "other": other}]
    return pa.table({"q": ["a", "b"], "info": pa.array(rows, info)}).slice(1)


def read_narrow(path: Path, table: pa.Table, answer: str = "info.truth") -> str:
    pa.parquet.write_table(table, path)
    (question,) = read(path, prompt="q", answer=answer)
    return question.answer


@pytest.mark.parametrize(
    ("answer", "kind", "digits"),
    [
        (0.1, pa.float32(), "0.1"),
        (0.1, pa.float64(), "0.1"),
        (np.float16(0.1), pa.float16(), "0.1"),
        (16777216.0, pa.float32(), "16777216.0"),
        ([0.1], pa.list_(pa.float32()), "0.1"),
        ([0.1], pa.large_list(pa.float32()), "0.1"),
        ([0.1], pa.list_(pa.float32(), 1), "0.1"),
        ([Decimal("0.10")], pa.list_(pa.decimal128(5, 2)), "0.10"),
        (Decimal("1E+3"), pa.decimal128(9, 0), "1000"),
        (7, pa.int64(), "7"),
    ],
)
def test_a_nested_number_has_the_digits_of_a_column(
    tmp_path: Path, answer: Any, kind: pa.DataType, digits: str
) -> None:
    path = tmp_path / "rows.parquet"
    assert read_narrow(path, narrow_table(answer, kind)) == digits
    inner = narrow_table({"deep": answer}, pa.struct([("deep", kind)]))
    assert read_narrow(path, inner, "info.truth.deep") == digits
    column = pa.table({"q": ["b"], "target": pa.array([answer], kind)})
    assert read_narrow(path, column, "target") == digits


def test_a_map_of_texts_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    answers = pa.array([[("truth", 0.1), ("other", 0.5)]], pa.map_(pa.string(), pa.float32()))
    pa.parquet.write_table(pa.table({"q": ["b"], "info": answers}), path)
    (question,) = read(path, prompt="q", answer="info.truth")
    assert question.answer == "0.1"


def test_a_nested_nan_is_refused_only_where_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    nan = float("nan")
    assert read_narrow(path, narrow_table(0.1, pa.float32(), other=nan)) == "0.1"
    for answer, kind in ((nan, pa.float32()), ([nan], pa.list_(pa.float64()))):
        with pytest.raises(PromptDataError, match=r"`info\.truth` is nan, which is no number"):
            read_narrow(path, narrow_table(answer, kind))


@FORMATS
def test_rows_of_slime(tmp_path: Path, name: str) -> None:
    """A text becomes a user's message, also beside messages. Tools may be JSON text."""
    rows = [
        {
            "prompt": json.dumps([USER]),
            "label": "34",
            "t": None,
            "metadata": {"difficulty": "hard"},
        },
        {
            "prompt": "[2]+2",
            "label": "4",
            "t": json.dumps([TOOL]),
            "metadata": {"difficulty": None},
        },
    ]
    names = {"messages": "prompt", "answer": "label", "tools": "t"}
    first, second = read(write(tmp_path / name, *rows), **names, difficulty="metadata.difficulty")
    assert json.loads(first.text) == [[USER], []]
    assert (first.answer, first.difficulty, second.difficulty) == ("34", "hard", "")
    assert json.loads(second.text) == [[{"role": "user", "content": "[2]+2"}], [TOOL]]


@FORMATS
def test_a_list_with_one_answer_and_objects_as_json_text(tmp_path: Path, name: str) -> None:
    rows = [verl_row(n, ["72"], reward_model=json.dumps({"ground_truth": ["72"]})) for n in (0, 1)]
    assert [q.answer for q in read(write(tmp_path / name, *rows), **VERL)] == ["72", "72"]
    (question,) = read(
        write(tmp_path / name, {"prompt": "q", "answer": ["7"]}), answer="answer", prompt="prompt"
    )
    assert question.answer == "7"


COLUMN = r" \(data\.columns\.answer=reward_model\.ground_truth\)"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (verl_row(1, ["1", "2"]), rf"`answer` is a list of 2 values.*reward=custom\){COLUMN}"),
        (verl_row(1, None), f"`answer` is missing.*{COLUMN}"),
        (verl_row(1, True), f"`answer` must be a string or a number, got true{COLUMN}"),
        (verl_row(1, reward_model={"style": "rule"}), f"`answer` is missing.*{COLUMN}"),
        (verl_row(1, reward_model=3), f"`answer` is missing.*{COLUMN}"),
        (verl_row(1, prompt=None), "neither `prompt` nor `messages`"),
        ({"question": "q"}, r"no column `prompt`, which data\.columns\.messages names.*: question"),
        (
            verl_row(1, prompt=[{"role": "user", "content": [{"type": "image"}]}]),
            r"messages\[0\]\.content.*\(data\.columns\.messages=prompt",
        ),
        (verl_row(1, images=["x.png"]), "the row has `images`, which models of texts"),
        (verl_row(0), "id '0' is already used in line 1"),
        (3, "Expected `object`"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, row: Any, words: str) -> None:
    file = write_lines(tmp_path / "t.jsonl", verl_row(0), row, verl_row(2))
    with pytest.raises(PromptDataError, match=rf"^{file} line 2: .*{words}"):
        read(file, **VERL)
    assert [question.id for question in read(file, "skip", **VERL)] == ["0", "2"]


def test_images_of_a_table_are_found(tmp_path: Path) -> None:
    rows = [verl_row(0, images=[]), verl_row(1, images=[{"bytes": b"\xff\xd8"}])]
    with pytest.raises(PromptDataError, match="row 2: the row has `images`"):
        read(write(tmp_path / "t.parquet", *rows), **VERL)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_a_column_that_no_row_has_is_refused(tmp_path: Path, name: str) -> None:
    if name == "rows.csv":
        (tmp_path / name).write_text("problem,solution\n1+1=,2\n")
    else:
        write(tmp_path / name, {"problem": "1+1=", "solution": "2"})
    with pytest.raises(PromptDataError, match=r"^data\.columns\.difficulty=levl: .*rows\."):
        read(tmp_path / name, **MATH, difficulty="levl")
    with pytest.raises(PromptDataError, match=r"column `?qestion|qestion: .*no such column"):
        read(tmp_path / name, prompt="qestion", answer="solution")


def test_a_nested_column_that_no_row_has_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.parquet", verl_row(0))
    with pytest.raises(
        PromptDataError, match=r"data\.columns\.difficulty=extra_info\.levl: no row"
    ):
        read(file, **VERL, difficulty="extra_info.levl")


CSV = {
    "plain": ("question,answer\n1+1=?,2\n2+3=?,5\n", ["1+1=?", "2+3=?"]),
    "byte order mark, CRLF": ("\ufeffquestion,answer\r\n1+1=?,2\r\n", ["1+1=?"]),
    "quotes, commas, lines": ('question,answer\n"a, ""b""\n1+1=?",2\n', ['a, "b"\n1+1=?']),
    "no value for an extra column": ("question,note,answer\n1+1=?,,2\n", ["1+1=?"]),
}


@pytest.mark.parametrize("name", CSV)
def test_rows_of_a_csv_file(tmp_path: Path, name: str) -> None:
    text, prompts = CSV[name]
    file = tmp_path / "rows.csv"
    file.write_bytes(text.encode())
    questions = read(file, prompt="question")
    assert [question.text for question in questions] == prompts
    assert [q.id for q in questions] == [f"data.eval_path:{n + 1}" for n in range(len(prompts))]


def test_a_csv_file_with_the_names_of_a_row_needs_no_columns(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('messages,answer,id\n"[{""role"": ""user"", ""content"": ""a""}]",2,x\n')
    (question,) = read(file)
    assert (question.id, question.answer) == ("x", "2")
    assert json.loads(question.text) == [[{"role": "user", "content": "a"}], []]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"question,answer\n1+1=?,2,3\n", "line 2: the row has more values than the first line"),
        (b"question,answer\n1+1=?\n", "line 2: the row has fewer values than the first line"),
        (b'question,answer\n"1+1=?,2\n', "after line 1 .*unexpected end of data"),
        (b"question;answer\n1+1=?;2\n", "has no such column. It has: question;answer"),
        (b"question,answer\n\xff,2\n", "is not UTF-8 .*byte 0xff"),
        (b"question,answer\n1+1=?,\n", "line 2: `answer` is missing"),
        (b"", "has no such column. It has: no columns"),
    ],
)
def test_csv_files_with_problems_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(content)
    with pytest.raises(PromptDataError, match=problem):
        read(file, prompt="question")


def test_files_of_a_mixture_and_sets_have_columns_of_their_own(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(TWO_DIGIT_ADDITION)
    plain = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(8)]
    named = [{"problem": f"{n}+2=", "solution": n + 2} for n in range(8)]
    paths = {
        "a": str(write_lines(tmp_path / "a.jsonl", *plain)),
        "b": str(write_lines(tmp_path / "b.jsonl", *named)),
    }
    sources = {
        name: SourceSettings(source="jsonl", weight=1, train_path=path, num_eval=1)
        for name, path in paths.items()
    }
    sources["b"] = replace(sources["b"], columns=MATH)
    settings = DataSettings(source="mixture", sources=sources)
    prompts = open_prompts(settings, tokenizer)
    assert {prompt.source for prompt in prompts.train} == {"a", "b"}
    words = r"^data\.sources\.a\.columns\.prompt=problem: |no column `problem`"
    with pytest.raises(PromptDataError, match=words):
        open_prompts(
            replace(settings, sources=sources | {"a": replace(sources["a"], columns=MATH)}),
            tokenizer,
        )
    assert len(open_set("s", paths["b"], settings, tokenizer, columns=MATH)) == 8
    with pytest.raises(PromptDataError, match=r"eval\.sets\.s\.columns\.task=x: no row"):
        open_set("s", paths["b"], settings, tokenizer, columns=MATH | {"task": "x"})


def test_held_out_files_have_the_columns_of_the_training_file(tmp_path: Path) -> None:
    train = write_lines(tmp_path / "t.jsonl", {"problem": "1+1=", "solution": "2"})
    held_out = tmp_path / "e.csv"
    held_out.write_text("problem,solution\n1+2=,3\n")
    settings = DataSettings(
        source="jsonl", train_path=str(train), eval_path=str(held_out), columns=MATH
    )
    prompts = open_prompts(settings, Tokenizer.from_directory(TWO_DIGIT_ADDITION))
    assert [len(prompts.train), len(prompts.held_out)] == [1, 1]


@pytest.mark.parametrize("is_mixture", [False, True])
def test_two_files_that_number_their_rows_from_0(tmp_path: Path, is_mixture: bool) -> None:
    def write_rows(name: str, numbers: Sequence[int]) -> str:
        rows = [{"q": f"{n}+1=", "a": n + 1, "info": {"row": i}} for i, n in enumerate(numbers)]
        return str(write_lines(tmp_path / name, *rows))

    columns = {"prompt": "q", "answer": "a", "id": "info.row"}
    train = write_rows("t.jsonl", [10, 11, 12])
    held_out = write_rows("e.jsonl", [20, 11, 22, 23])
    settings = DataSettings(source="jsonl", train_path=train, eval_path=held_out, columns=columns)
    if is_mixture:
        source = SourceSettings(
            source="jsonl", train_path=train, eval_path=held_out, columns=columns, weight=1
        )
        settings = DataSettings(source="mixture", sources={"s": source})
    tokenizer = Tokenizer.from_directory(TWO_DIGIT_ADDITION)
    prompts = open_prompts(settings, tokenizer)
    place = "s/" if is_mixture else ""
    assert [prompt.id for prompt in prompts.train] == [f"{place}{name}" for name in ("0", "2")]
    names = ["held_out/0", "1", "held_out/2", "3"]
    assert [prompt.id for prompt in prompts.held_out] == [f"{place}{name}" for name in names]
    assert prompts.excluded_rows.bad == 0
    questions = open_set("other", held_out, settings, tokenizer, columns=columns)
    assert [prompt.id for prompt in questions] == ["0", "1", "2", "3"]


def test_pass_rates_belong_to_the_columns(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", {"problem": "1+1=", "solution": "2"})
    settings = DataSettings(source="jsonl", train_path=str(file))
    assert "columns" not in identity_of(settings)
    assert identity_of(settings) != identity_of(replace(settings, columns=MATH))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_that_a_file_has_twice_is_refused_if_it_is_read(tmp_path: Path, kind: str) -> None:
    """A column name that occurs twice is refused: it does not say which column has the answers."""
    names = ["prompt", "answer", "answer", "note", "note"]
    file = tmp_path / f"rows.{kind}"
    if kind == "csv":
        file.write_text(f"{','.join(names)}\n1+1=,2,3,x,y\n")
    else:
        table = pa.table([["1+1="], ["2"], ["3"], ["x"], ["y"]], names=names)
        pyarrow.parquet.write_table(table, file)
    with pytest.raises(PromptDataError, match=r"has two columns `answer`\. Remove one"):
        read_questions(DataLocation(str(file), "data.train_path"), BadRows("fail"))
