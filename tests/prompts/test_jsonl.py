from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_rl.contracts.prompt import Question
from megatron_rl.prompts.jsonl import is_line_id
from megatron_rl.prompts.question import BadRows, PromptDataError
from tests.support.processor_time import processor_seconds
from tests.support.question_files import read_jsonl

GOOD_ROW = b'{"prompt": "2+2=", "answer": "4"}'
MAX_LINE_BYTES = 16 * 2**20


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def render_loudly(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    parts = [f"{message['role']}: {message['content']}! " for message in messages]
    return "".join(parts) + ("assistant:" if add_generation_prompt else "")


def read_row(path: Path, row: bytes) -> Question:
    file = write(path / "t.jsonl", row)
    (question,) = read_jsonl(file, BadRows("fail"), key="k", render=render_loudly)
    return question


def test_row_without_optional_keys(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", b"\xef\xbb\xbf" + GOOD_ROW)
    (question,) = read_jsonl(file, BadRows("fail"), key="data.train_path")
    assert question.id == "data.train_path:1"
    assert (question.text, question.answer) == ("2+2=", "4")
    assert (question.task, question.difficulty) == ("jsonl", "")
    assert is_line_id(question.id)


def test_row_with_optional_and_unknown_keys(tmp_path: Path) -> None:
    row = b'{"prompt": "3+3=", "answer": 6, "id": 17, "task": "sums", "difficulty": 2, "x": "y"}'
    file = write(tmp_path / "t.jsonl", GOOD_ROW, b"", row)
    _, question = read_jsonl(file, BadRows("fail"), key="data.train_path")
    assert (question.id, question.answer) == ("17", "6")
    assert (question.task, question.difficulty) == ("sums", "2")
    assert question.origin == f"{file} line 3"
    assert not is_line_id(question.id)


@pytest.mark.parametrize(
    ("value", "details"),
    [
        (b'{"cases": [1, 2.50]}', '{"cases": [1, 2.50]}'),
        (rb'"{\"a\": null}"', '{"a": null}'),
        (b"null", ""),
        (b"[]", "[]"),
    ],
)
def test_details_are_json_text_as_the_row_has_it(
    tmp_path: Path, value: bytes, details: str
) -> None:
    question = read_row(tmp_path, b'{"prompt": "p", "answer": "4", "details": ' + value + b"}")
    assert question.details == details


def test_a_row_with_details_needs_no_answer(tmp_path: Path) -> None:
    assert read_row(tmp_path, b'{"prompt": "p", "details": {"tests": []}}').answer == ""
    with pytest.raises(PromptDataError, match=r"`answer` is missing. A row needs .*`details` for"):
        read_row(tmp_path, b'{"prompt": "p"}')
    with pytest.raises(PromptDataError, match=r"`details` is a string that holds no JSON text"):
        read_row(tmp_path, b'{"prompt": "p", "details": "4 tests"}')


USER = '{"role": "user", "content": "2+2"}'
ASSISTANT = '{"role": "assistant", "content": "it is 4"}'
SYSTEM = '{"role": "system", "content": "s", "name": "x"}'


@pytest.mark.parametrize(
    ("row", "text", "demonstration", "answer"),
    [
        ('"prompt": "2+2=", "response": "4"', "2+2=", "4", "4"),
        ('"prompt": "2+2=", "answer": 4, "response": "so: 4"', "2+2=", "so: 4", "4"),
        (f'"messages": [{USER}], "answer": 4', "user: 2+2! assistant:", "", "4"),
        (f'"messages": [{USER}, {ASSISTANT}]', "user: 2+2! assistant:", " it is 4! ", "it is 4"),
        (
            f'"messages": [{SYSTEM}, {ASSISTANT}, {USER}], "response": "r"',
            "system: s! assistant: it is 4! user: 2+2! assistant:",
            " r! ",
            "r",
        ),
    ],
)
def test_responses_and_messages(
    tmp_path: Path, row: str, text: str, demonstration: str, answer: str
) -> None:
    question = read_row(tmp_path, f"{{{row}}}".encode())
    assert question.text == text
    assert question.demonstration == demonstration
    assert question.answer == answer


@pytest.mark.parametrize("number", ["123456789012345678901234567890", "0.1", "-3", "3.0"])
def test_numbers_keep_their_digits(tmp_path: Path, number: str) -> None:
    row = b'{"prompt": "p", "answer": %s}' % number.encode()
    assert read_row(tmp_path, row).answer == number


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("1e5", "100000"),
        ("-2.5E-3", "-0.0025"),
        ("1.50e1", "15.0"),
        ("0e0", "0"),
        ("1e-999", f"0.{'0' * 998}1"),
    ],
)
def test_exponents_are_written_out(tmp_path: Path, number: str, answer: str) -> None:
    row = b'{"prompt": "p", "answer": %s}' % number.encode()
    assert read_row(tmp_path, row).answer == answer


DEEP_ROW = b'{"prompt": "p", "answer": "4", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "2+2=", "answer": ', "truncated"),
        (b"[1, 2]", "Expected `object`"),
        (
            b'{"question": "2+2=", "answer": "4"}',
            "neither `prompt` nor `messages`. It has: question, answer",
        ),
        (b"{}", "neither `prompt` nor `messages`. It has: no keys"),
        (b'{"prompt": "p", "messages": [], "answer": 4}', "both `prompt` and `messages`"),
        (b'{"prompt": "2+2="}', "`answer` is missing. A row needs"),
        (b'{"prompt": "p", "response": " "}', "`response` is empty. Leave it out"),
        (b'{"prompt": 5, "answer": "4"}', "Expected `str | null`"),
        (b'{"prompt": "  ", "answer": "4"}', "`prompt` is empty. Give"),
        (b'{"prompt": "p", "answer": ""}', "`answer` is empty. Give"),
        (b'{"prompt": "p", "answer": null}', "`answer` is missing"),
        (b'{"prompt": "p", "answer": true}', "`answer` must be a string or a number, got true"),
        (b'{"prompt": "p", "answer": ["4"]}', "`answer` must be a string or a number"),
        (b'{"prompt": "p", "answer": NaN}', "invalid"),
        (b'{"prompt": "p", "answer": 1e1000}', "exponent of 1e1000 exceeds 999. Write"),
        (b'{"prompt": "p", "answer": 1e-99999999999999999999}', "exponent .* exceeds 999"),
        (DEEP_ROW, "nested too deeply"),
        (b'{"prompt": "\xff\xfe", "answer": "4"}', "[Uu][Tt][Ff]-8"),
        (b'{"prompt": "p", "answer": "4", "difficulty": [1]}', "difficulty"),
        (b"\x00\x01", "[Ii]nvalid"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, line: bytes, words: str) -> None:
    file = write(tmp_path / "t.jsonl", GOOD_ROW, line, b'{"prompt": "q", "answer": "1"}')
    pattern = rf"t\.jsonl line 2: .*{words}.*data\.on_bad_row=skip"
    with pytest.raises(PromptDataError, match=pattern):
        read_jsonl(file, BadRows("fail"), key="data.train_path")
    bad_rows = BadRows("skip")
    questions = read_jsonl(file, bad_rows, key="data.train_path")
    assert [question.text for question in questions] == ["2+2=", "q"]
    assert bad_rows.count == 1
    assert "line 2" in bad_rows.examples[0]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('"messages": [], "answer": 4', "no message for the assistant .* End it with"),
        ('"messages": [{"role": "user"}], "answer": 4', "'user' has neither `content` nor"),
        (f'"messages": [{ASSISTANT}]', "no message for the assistant"),
        (
            f'"messages": [{USER}, {{"role": "assistant", "content": " "}}]',
            "assistant's last message is empty. Leave it out",
        ),
        (
            f'"messages": [{USER}, {ASSISTANT}], "response": "4"',
            "two responses: .* Leave one of them out",
        ),
        (f'"messages": [{USER}], "answer": 4', "no such template. Write the text to `prompt`"),
    ],
)
def test_malformed_messages_are_named(tmp_path: Path, row: str, words: str) -> None:
    file = write(tmp_path / "t.jsonl", f"{{{row}}}".encode())
    with pytest.raises(PromptDataError, match=rf"t\.jsonl line 1: .*{words}"):
        read_jsonl(file, BadRows("fail"), key="data.train_path")


@pytest.mark.slow
def test_lines_of_megabytes_are_bad_rows_and_skipped_quickly(tmp_path: Path) -> None:
    huge = b'{"prompt": "%s", "answer": "4"}' % (b"1 " * 25_000_000)
    at_limit = b'{"prompt": "%s", "answer": "5"}' % (b"2" * (MAX_LINE_BYTES - 30))
    file = write(tmp_path / "t.jsonl", huge, GOOD_ROW, b" " * 2**25 + GOOD_ROW, at_limit)
    bad_rows = BadRows("skip")
    questions: list[Question] = []

    def read() -> None:
        questions.extend(read_jsonl(file, bad_rows, key="data.train_path"))

    assert processor_seconds(read) < 5
    assert [question.origin[-6:] for question in questions] == ["line 2", "line 4"]
    assert questions[1].answer == "5"
    for number, example in zip((1, 3), bad_rows.examples, strict=True):
        assert example.startswith(f"{file} line {number}: the line has more than 16777216 bytes")


def test_an_id_of_two_rows_is_a_bad_row(tmp_path: Path) -> None:
    row = b'{"prompt": "%s", "answer": "4", "id": "x"}'
    file = write(tmp_path / "t.jsonl", row % b"a", row % b"b")
    with pytest.raises(PromptDataError, match="line 2: id 'x' is already used in line 1"):
        read_jsonl(file, BadRows("fail"), key="data.train_path")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(PromptDataError, match=r"data\.train_path=.*absent.*No such file"):
        read_jsonl(tmp_path / "absent.jsonl", BadRows("skip"), key="data.train_path")
    with pytest.raises(PromptDataError, match=r"data\.eval_path=.*Is a directory"):
        read_jsonl(tmp_path, BadRows("skip"), key="data.eval_path")


WRONG_KEY = b'{"question": "2+2=", "answer": "4"}'


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n", "the file is empty"),
        (b"{\n", r"none of its 1 rows is usable.*\n.*line 1"),
        (b"\n".join([WRONG_KEY] * 3), r"none of its 3 rows is usable.*\n.*It has: question"),
        (GOOD_ROW.decode().encode("utf-16"), "UTF-16.* UTF-8"),
        (GOOD_ROW.decode().encode("utf-16-le"), "UTF-16.* UTF-8"),
        (b"prompt,answer\n2+2=,4\n", "CSV.*one JSON object a line"),
        (b"[" + GOOD_ROW + b"]", "JSON array.*one JSON object a line"),
        (b"[\n" + GOOD_ROW + b",\n" + GOOD_ROW + b"\n]", "JSON array"),
        (b'{\n "prompt": "p",\n "answer": "4"\n}\n', "object of several lines.*one JSON object"),
        (b"\x1f\x8b\x08\x00\x4f", "is compressed with gzip. Decompress it"),
        (b"PAR1\x15\x04\x15\x10", "a Parquet file.*one JSON object a line"),
        (b"PK\x03\x04\x00", "a ZIP archive. Extract"),
    ],
)
def test_files_without_usable_row_are_named(
    tmp_path: Path, policy: Literal["fail", "skip"], content: bytes, words: str
) -> None:
    """Leaving the bad rows out would leave nothing."""
    file = tmp_path / "t.jsonl"
    file.write_bytes(content)
    with pytest.raises(PromptDataError, match=rf"(?s)data\.train_path=.*{words}") as error:
        read_jsonl(file, BadRows(policy), key="data.train_path")
    assert "on_bad_row" not in str(error.value)


def test_the_first_bad_row_is_named_when_a_later_one_is_usable(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", WRONG_KEY, b"{", GOOD_ROW)
    with pytest.raises(PromptDataError, match=r"t\.jsonl line 1: .*data\.on_bad_row=skip"):
        read_jsonl(file, BadRows("fail"), key="data.train_path")


def test_reasons_that_rows_share_are_named_once(tmp_path: Path) -> None:
    lines = [WRONG_KEY] * 40 + [b'{"prompt": "p"}'] * 40
    file = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(PromptDataError, match="none of its 80 rows") as error:
        read_jsonl(file, BadRows("fail"), key="data.train_path")
    _, first, second = str(error.value).splitlines()
    assert "line 1: " in first and "question" in first
    assert "line 41: `answer` is missing" in second
