"""Parquet files and data set folders give the questions of the same rows in a JSONL file."""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from megatron_rl.contracts.prompt import Question
from megatron_rl.prompts.files.reader import DataLocation, digest_of, read_questions
from megatron_rl.prompts.question import BadRows, PromptDataError
from tests.support.question_files import write_parquet

Rows = Sequence[Mapping[str, Any]]
USER = {"role": "user", "content": "2+2"}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PLAIN_ROWS: Rows = [
    {"prompt": "1+1=", "answer": "2", "id": "one", "difficulty": "easy", "extra": 1},
    {"prompt": "é ü 日本", "answer": "4", "response": "so 4", "task": "sums"},
    {"prompt": "5+5=", "answer": "10", "response": None, "id": None},
    {"prompt": "big", "answer": str(2**70)},
]
CHAT_ROWS: Rows = [
    {"messages": [USER], "answer": "4"},
    {"messages": [{"role": "system", "content": "s"}, USER], "answer": "4", "tools": [TOOL]},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "4", "tool_call_id": "c"},
        ],
        "answer": "4",
    },
    {"messages": [USER, {"role": "assistant", "content": "it is 4"}]},
]


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    return json.dumps([list(messages), list(tools)], sort_keys=True)


def table_of(rows: Rows) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def write_jsonl(folder: Path, rows: Rows) -> DataLocation:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return location_of(file)


def write_table(folder: Path, rows: Rows) -> DataLocation:
    pa.parquet.write_table(table_of(rows), folder / "rows.parquet")
    return location_of(folder / "rows.parquet")


def write_two_tables(folder: Path, rows: Rows) -> DataLocation:
    """The rows in two files. As text, the name of the second one sorts first."""
    parts = folder / "parts"
    parts.mkdir()
    pa.parquet.write_table(table_of(rows[:1]), parts / "part-9.parquet")
    pa.parquet.write_table(table_of(rows[1:]), parts / "part-10.parquet")
    return location_of(parts)


def save_stream(folder: Path, rows: Rows, *, split: str | None = None) -> Path:
    """Write the files that `Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    table = table_of(rows)
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_saved_data_set(folder: Path, rows: Rows) -> DataLocation:
    return location_of(save_stream(folder / "saved", rows))


def write_saved_splits(folder: Path, rows: Rows) -> DataLocation:
    save_stream(folder / "splits" / "train", rows, split="train")
    save_stream(folder / "splits" / "test", rows[:1], split="test")
    (folder / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return location_of(folder / "splits")


def write_hub_copy(folder: Path, rows: Rows) -> DataLocation:
    """A copy of a data set of the hub, with the names that `push_to_hub` gives."""
    data = folder / "hub" / "data"
    data.mkdir(parents=True)
    pa.parquet.write_table(table_of(rows), data / "train-00000-of-00001.parquet")
    pa.parquet.write_table(table_of(rows[:1]), data / "test-00000-of-00001.parquet")
    (folder / "hub" / ".gitattributes").write_text("x")
    return location_of(folder / "hub")


def write_json_text_cells(folder: Path, rows: Rows) -> DataLocation:
    write_parquet(folder / "cells.parquet", rows)
    return location_of(folder / "cells.parquet")


def location_of(path: Path, split: str | None = None) -> DataLocation:
    return DataLocation(str(path), "data.train_path", split, side="train_path")


def read(location: DataLocation) -> list[Question]:
    return read_questions(location, BadRows("fail"), render=render)


def without_origins(questions: Sequence[Question]) -> list[Question]:
    return [replace(question, origin="?") for question in questions]


@pytest.mark.parametrize("rows", [PLAIN_ROWS, CHAT_ROWS], ids=["plain", "chats"])
@pytest.mark.parametrize(
    "write",
    [
        write_table,
        write_two_tables,
        write_saved_data_set,
        write_saved_splits,
        write_hub_copy,
        write_json_text_cells,
    ],
)
def test_every_format_gives_the_questions_of_the_jsonl_file(
    tmp_path: Path, write: Callable[[Path, Rows], DataLocation], rows: Rows
) -> None:
    rows_without_nulls = [{k: v for k, v in row.items() if v is not None} for row in rows]
    expectation = read(write_jsonl(tmp_path, rows_without_nulls))
    assert len(expectation) == len(rows)
    assert without_origins(read(write(tmp_path, rows))) == without_origins(expectation)


@pytest.mark.parametrize(
    ("column", "answers"),
    [
        (pa.array([7, -3], pa.int8()), ["7", "-3"]),
        (pa.array([2**63, 5], pa.uint64()), ["9223372036854775808", "5"]),
        (pa.array([42.0, 0.1]), ["42.0", "0.1"]),
        (pa.array([1e-5, 1e16]), ["0.00001", "10000000000000000"]),
        (pa.array([0.1, 16777216.0], pa.float32()), ["0.1", "16777216.0"]),
        (pa.array(np.array([0.1, 2], np.float16)), ["0.1", "2.0"]),
        (pa.array([Decimal("4.50"), Decimal("0.01")], pa.decimal128(5, 2)), ["4.50", "0.01"]),
        (pa.array(["a", "a"]).dictionary_encode(), ["a", "a"]),
        (pa.array(["x", "y"], pa.large_string()), ["x", "y"]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_numbers_keep_their_value(tmp_path: Path, column: pa.Array, answers: list[str]) -> None:
    table = pa.table({"prompt": ["p", "q"], "answer": column})
    pa.parquet.write_table(table, tmp_path / "n.parquet")
    assert [q.answer for q in read(location_of(tmp_path / "n.parquet"))] == answers


def test_a_float_becomes_the_text_of_pythons_json(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=200).tolist()
    rows = [{"prompt": str(i), "answer": value} for i, value in enumerate(values)]
    expectation = read(write_jsonl(tmp_path, rows))
    assert without_origins(read(write_table(tmp_path, rows))) == without_origins(expectation)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"question": ["p"], "answer": ["4"]}, r"neither a column `prompt`.*question, answer"),
        ({"prompt": ["p"], "answer": [b"4"]}, r"column `answer`.*binary.*text or a number"),
        ({"prompt": [b"p"], "answer": ["4"]}, r"column `prompt`.*must be text"),
        ({"prompt": ["p"], "answer": ["4"], "id": [1.5]}, r"`id`.*text or an integer"),
        ({"messages": [[{"content": b"x"}]], "answer": ["4"]}, r"`messages`.*a list of objects"),
        ({"prompt": ["p"], "answer": [True]}, r"`answer`.*bool"),
    ],
)
def test_columns_of_other_types_are_refused(
    tmp_path: Path, columns: dict[str, list[Any]], words: str
) -> None:
    pa.parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(PromptDataError, match=rf"data\.train_path=.*t\.parquet.*{words}"):
        read(location_of(tmp_path / "t.parquet"))


@pytest.mark.parametrize(
    ("bad_row", "words"),
    [
        ({"prompt": "p", "answer": None}, "`answer` is missing"),
        ({"prompt": "p", "answer": " "}, "`answer` is empty"),
        ({"prompt": "", "answer": "1"}, "`prompt` is empty"),
        ({"prompt": "p", "answer": "1", "response": ""}, "`response` is empty"),
        ({"prompt": "p", "answer": "1", "id": "a"}, "'a' is already used in row 1"),
        ({"prompt": "p" * (16 * 2**20), "answer": "1"}, "more than 16777216 bytes"),
    ],
)
def test_bad_rows_of_tables_are_named(tmp_path: Path, bad_row: dict[str, Any], words: str) -> None:
    good_row = {"prompt": "p", "answer": "1", "id": "a"}
    location = write_table(tmp_path, [good_row, bad_row, good_row | {"id": "b"}])
    with pytest.raises(PromptDataError, match=rf"rows\.parquet row 2: .*{words}"):
        read(location)
    bad_rows = BadRows("skip")
    assert [q.id for q in read_questions(location, bad_rows)] == ["a", "b"]
    assert bad_rows.count == 1


def test_a_number_that_is_none_is_a_bad_row(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 1.0}, {"prompt": "b", "answer": float("nan")}]
    with pytest.raises(PromptDataError, match=r"row 2: .*`answer` is nan, which is no number"):
        read(write_table(tmp_path, rows))


def test_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    texts = pa.array([b"ok", b"\xff\xfe"]).cast(pa.string(), safe=False)
    pa.parquet.write_table(
        pa.table({"prompt": texts, "answer": ["1", "2"]}), tmp_path / "u.parquet"
    )
    bad_rows = BadRows("skip")
    (question,) = read_questions(location_of(tmp_path / "u.parquet"), bad_rows)
    assert question.text == "ok" and "row 2: the row cannot be decoded" in bad_rows.messages[0]


@pytest.mark.parametrize("cut", [6, 60, 200])
def test_damaged_tables_are_refused(tmp_path: Path, cut: int) -> None:
    location = write_table(tmp_path, PLAIN_ROWS)
    file = Path(location.path)
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(PromptDataError, match=r"rows\.parquet cannot be read as Parquet"):
        read(location)
    folder = write_saved_data_set(tmp_path, PLAIN_ROWS)
    arrow = Path(folder.path) / "data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[: cut * 2])
    with pytest.raises(PromptDataError, match="cannot be read as an Arrow stream"):
        read(folder)


def test_a_damaged_offset_of_an_arrow_file_is_refused(tmp_path: Path) -> None:
    """An offset beyond its buffer would read memory outside of the file."""
    folder = save_stream(tmp_path / "saved", [{"prompt": "abcd", "answer": "1"}])
    file = folder / "data-00000-of-00001.arrow"
    offsets = np.array([0, 4], np.int32).tobytes()
    damaged_offsets = np.array([0, 1_000_000], np.int32).tobytes()
    before, _, after = file.read_bytes().rpartition(offsets)
    file.write_bytes(before + damaged_offsets + after)
    with pytest.raises(PromptDataError, match="cannot be read as an Arrow stream"):
        read(location_of(folder))


@pytest.mark.parametrize("write", [write_saved_splits, write_hub_copy])
def test_splits_are_chosen_by_name(
    tmp_path: Path, write: Callable[[Path, Rows], DataLocation]
) -> None:
    folder = write(tmp_path, PLAIN_ROWS).path
    assert len(read(DataLocation(folder, "data.eval_path", "test"))) == 1
    with pytest.raises(PromptDataError, match=r"no split 'dev'\. Its splits are test, train\."):
        read(DataLocation(folder, "data.eval_path", "dev"))


def readme(data_files: str) -> str:
    return f"---\nlicense: mit\nconfigs:\n{data_files}\n---\n# Data\n"


def test_readme_says_which_files_a_split_has(tmp_path: Path) -> None:
    folder = Path(write_hub_copy(tmp_path, PLAIN_ROWS).path)
    text = "- config_name: default\n  data_files:\n  - split: train\n    path: data/test-*"
    (folder / "README.md").write_text(readme(text))
    assert len(read(location_of(folder))) == 1
    text = "- config_name: a\n  data_files:\n    train: [data/train-*]\n    dev: data/test-*"
    (folder / "README.md").write_text(readme(text))
    assert len(read(location_of(folder))) == len(PLAIN_ROWS)
    assert len(read(location_of(folder, "dev"))) == 1


def test_an_id_in_two_files_of_one_name_is_used_twice(tmp_path: Path) -> None:
    for folder, prompt in (("algebra", "1+1="), ("geometry", "2+2=")):
        (tmp_path / folder).mkdir()
        row = {"prompt": prompt, "answer": "1", "id": "a"}
        (tmp_path / folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    text = "- config_name: a\n  data_files:\n    train: '*/train.jsonl'"
    (tmp_path / "README.md").write_text(readme(text))
    with pytest.raises(PromptDataError, match=r"geometry/train\.jsonl.*already used in algebra/"):
        read(location_of(tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- config_name: a\n  data_files: /etc/*", "not in the folder"),
        ("- config_name: a\n  data_files: ../*", "not in the folder"),
        ("- config_name: a\n  data_files: https://h/x.parquet", "not in the folder"),
        ("- config_name: a\n  data_files: none-*", "no Parquet or JSONL file matches"),
        (
            "- config_name: main\n  data_files: data/*\n- config_name: other\n  data_files: x/*",
            r"several subsets \(main, other\)",
        ),
        ("- [", "no YAML"),
    ],
)
def test_readmes_that_name_no_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    folder = Path(write_hub_copy(tmp_path, PLAIN_ROWS).path)
    (folder / "README.md").write_text(readme(text))
    with pytest.raises(PromptDataError, match=rf"data\.train_path=.*{words}"):
        read(location_of(folder))


ROW = '{"prompt": "1+1=", "answer": "2"}\n'
# Files that are there, data_files of README.md ("" without README.md), words of the error
INCOMPLETE_FOLDERS = {
    "part": ("train-00000-of-00003.jsonl train-00002-of-00003.jsonl", "", "train-00001-of-00003"),
    "part of the hub": ("train-00000-of-00002-0a1b.jsonl", "", "1 of 2"),
    "part from 1 on": ("train-00002-of-00002.jsonl", "", "train-00001-of-00002"),
    "part that README.md names": ("a-00000-of-00002.jsonl", "a-*", "a-00001-of-00002"),
    "compressed": ("train-0.jsonl train-1.jsonl.gz", "", "train-1.jsonl.gz"),
    "compressed without a split": ("one.jsonl two.parquet.zst", "", "two.parquet.zst"),
    "json": ("train-0.jsonl train-1.json", "", "train-1.json"),
    "csv": ("train.jsonl train_more.csv", "", "train_more.csv"),
    "compressed that README.md names": ("a.jsonl b.jsonl.gz", "*", "b.jsonl.gz"),
}
COMPLETE_FOLDERS = {
    "parts": ("train-00000-of-00002.jsonl train-00001-of-00002.jsonl", ""),
    "parts from 1 on": ("train-00001-of-00002.jsonl train-00002-of-00002.jsonl", ""),
    "one part that README.md names": ("a-00000-of-00002.jsonl", "a-00000-of-00002.jsonl"),
    "other split": ("train.jsonl test.csv test-00000-of-00002.jsonl", ""),
    "descriptions": ("rows.jsonl dataset_infos.json LICENSE images.tar.gz notes.txt", ""),
    "descriptions that README.md names": ("rows.jsonl dataset_infos.json", "*"),
}


def write_folder(folder: Path, names: str, data_files: str) -> DataLocation:
    for name in names.split():
        (folder / name).write_text(ROW)
    if data_files:
        (folder / "README.md").write_text(readme(f'- data_files: "{data_files}"'))
    return location_of(folder, "train" if "train" in names else None)


@pytest.mark.parametrize("case", INCOMPLETE_FOLDERS)
def test_a_split_of_which_a_part_would_be_left_out_is_refused(tmp_path: Path, case: str) -> None:
    names, data_files, words = INCOMPLETE_FOLDERS[case]
    location = write_folder(tmp_path, names, data_files)
    with pytest.raises(PromptDataError, match=f"^data.train_path=.*{words}.*(Copy|Convert)"):
        read(location)


@pytest.mark.parametrize("case", COMPLETE_FOLDERS)
def test_files_of_other_kinds_and_splits_may_lie_beside_a_complete_split(
    tmp_path: Path, case: str
) -> None:
    assert read(write_folder(tmp_path, *COMPLETE_FOLDERS[case]))


def test_folders_without_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.py").write_text("raise SystemExit('this script was executed')")
    with pytest.raises(PromptDataError, match=r"holds no data set.*\.py.*are not executed"):
        read(location_of(tmp_path))


def test_folders_that_may_be_several_data_sets_are_refused(tmp_path: Path) -> None:
    for name in ("main", "socratic"):
        (tmp_path / name).mkdir()
        write_parquet(tmp_path / name / "train-0.parquet", PLAIN_ROWS)
    with pytest.raises(PromptDataError, match=r"several folders \(main, socratic\)"):
        read(location_of(tmp_path))
    write_parquet(tmp_path / "rest.parquet", PLAIN_ROWS)
    with pytest.raises(PromptDataError, match=r"others do not, such as rest\.parquet"):
        read(location_of(tmp_path))


@pytest.mark.parametrize("name", ["../data-00000-of-00001.arrow", "/etc/passwd", ".."])
def test_saved_data_sets_name_no_file_outside(tmp_path: Path, name: str) -> None:
    folder = save_stream(tmp_path / "saved", PLAIN_ROWS)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(PromptDataError, match="outside of it"):
        read(location_of(folder))


def test_saved_data_sets_with_indices_or_damage_are_refused(tmp_path: Path) -> None:
    folder = save_stream(tmp_path / "saved", PLAIN_ROWS)
    indices = {"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}
    (folder / "state.json").write_text(json.dumps(indices))
    with pytest.raises(PromptDataError, match="flatten_indices"):
        read(location_of(folder))
    (folder / "state.json").write_text("{")
    with pytest.raises(PromptDataError, match=r"state\.json is damaged"):
        read(location_of(folder))


def test_the_digest_is_that_of_all_files(tmp_path: Path) -> None:
    location = write_two_tables(tmp_path, PLAIN_ROWS)
    digest = digest_of(location)
    assert digest == digest_of(location)
    write_parquet(Path(location.path) / "part-10.parquet", PLAIN_ROWS[2:])
    assert digest_of(location) != digest


@pytest.mark.parametrize("write", [write_table, write_saved_data_set, write_hub_copy])
def test_nothing_of_a_data_set_is_executed_or_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, Rows], DataLocation]
) -> None:
    """Columns have an extension type that older versions of pyarrow unpickle."""
    witness = tmp_path / "executed"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (witness,)

    metadata = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Payload()),
    }

    make_table = table_of

    def hostile_table(rows: Rows) -> pa.Table:
        table = make_table(rows)
        fields = [field.with_metadata(metadata) for field in table.schema]
        return pa.Table.from_arrays(table.columns, schema=pa.schema(fields))

    pickle.loads(metadata["ARROW:extension:metadata"])  # type: ignore[arg-type]
    assert witness.exists(), "the payload works"
    witness.unlink()
    monkeypatch.setitem(globals(), "table_of", hostile_table)
    location = write(tmp_path, PLAIN_ROWS[:2])
    path = Path(location.path)
    folder = path if path.is_dir() else path.parent
    script = f"open({str(witness)!r}, 'w')"
    for name in ("__init__.py", "conftest.py", f"{folder.name}.py", "data.py"):
        (folder / name).write_text(script)
    assert [question.text for question in read(location)] == ["1+1=", "é ü 日本"]
    assert not witness.exists()


def test_jsonl_files_of_a_folder_are_one_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "lines"
    folder.mkdir()
    for name, text in (("a-2.jsonl", "first"), ("a-10.jsonl", "second")):
        (folder / name).write_text(json.dumps({"prompt": text, "answer": 1}) + "\n")
    first, second = read(location_of(folder))
    assert (first.text, first.id) == ("first", "data.train_path:1")
    assert (second.text, second.id) == ("second", "data.train_path:2")
    write_parquet(folder / "a-3.parquet", PLAIN_ROWS)
    with pytest.raises(PromptDataError, match=r"two formats \(\.jsonl and \.parquet\)"):
        read(location_of(folder))
