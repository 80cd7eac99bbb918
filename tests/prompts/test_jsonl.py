import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_rl.prompts.jsonl import read_jsonl
from megatron_rl.prompts.question import BadRows, PromptDataError

GOOD = b'{"prompt": "2+2=", "answer": "4"}'


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_rows_with_and_without_optional_keys(tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.jsonl",
        b"\xef\xbb\xbf" + GOOD,
        b"",
        b'{"prompt": "3+3=", "answer": 6, "id": 17, "task": "sums", "difficulty": 2, "source": "ignored"}',
    )
    first, second = read_jsonl(file, BadRows("fail"), key="data.train_path")
    assert (first.id, first.text, first.answer, first.task, first.difficulty) == (
        "data.train_path:1",
        "2+2=",
        "4",
        "jsonl",
        "",
    )
    assert (second.id, second.answer, second.task, second.difficulty) == ("17", "6", "sums", "2")
    assert second.origin == f"{file} line 3"


def shout(messages: Sequence[Mapping[str, str]]) -> str:
    return (
        "".join(f"{message['role']}: {message['content']}! " for message in messages) + "assistant:"
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('"prompt": "2+2=", "response": "4"', ("2+2=", "4", "4")),
        ('"prompt": "2+2=", "answer": 4, "response": "so: 4"', ("2+2=", "so: 4", "4")),
        (
            '"messages": [{"role": "user", "content": "2+2"}], "answer": 4',
            ("user: 2+2! assistant:", "", "4"),
        ),
        (
            '"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "it is 4"}]',
            ("user: 2+2! assistant:", "it is 4", "it is 4"),
        ),
        (
            '"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}, '
            '{"role": "user", "content": "u", "name": "x"}], "response": "r"',
            ("system: s! assistant: a! user: u! assistant:", "r", "r"),
        ),
    ],
)
def test_rows_with_responses_and_messages(
    tmp_path: Path, row: str, expected: tuple[str, str, str]
) -> None:
    file = write(tmp_path / "t.jsonl", f"{{{row}}}".encode())
    (question,) = read_jsonl(file, BadRows("fail"), key="k", render=shout)
    assert (question.text, question.demonstration, question.answer) == expected


@pytest.mark.parametrize("number", ["123456789012345678901234567890", "0.1", "-3", "3.0"])
def test_a_number_keeps_its_digits(tmp_path: Path, number: str) -> None:
    file = write(tmp_path / "t.jsonl", b'{"prompt": "p", "answer": %s}' % number.encode())
    (question,) = read_jsonl(file, BadRows("fail"), key="k")
    assert question.answer == number


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
def test_an_exponent_is_written_out(tmp_path: Path, number: str, answer: str) -> None:
    file = write(tmp_path / "t.jsonl", b'{"prompt": "p", "answer": %s}' % number.encode())
    (question,) = read_jsonl(file, BadRows("fail"), key="k")
    assert question.answer == answer


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "2+2=", "answer": ', "truncated"),
        (b"[1, 2]", "Expected `object`"),
        (b'{"answer": "4"}', "`prompt` or `messages` is needed"),
        (b'{"prompt": "2+2="}', "`answer` is missing"),
        (
            b'{"prompt": "p", "messages": [], "answer": 4}',
            "`prompt` or `messages` is needed, one of them",
        ),
        (b'{"messages": [], "answer": 4}', "nothing that the assistant could answer"),
        (b'{"messages": [{"role": "user"}], "answer": 4}', "missing required field `content`"),
        (
            b'{"messages": [{"role": "assistant", "content": "4"}]}',
            "nothing that the assistant could answer",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": " "}]}',
            "the assistant's last message is empty",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "4"}], "response": "4"}',
            "`messages` end with one of",
        ),
        (
            b'{"messages": [{"role": "user", "content": "4"}], "answer": 4}',
            "there is no chat template here",
        ),
        (b'{"prompt": "p", "response": " "}', "`response` is empty"),
        (b'{"prompt": 5, "answer": "4"}', "Expected `str`"),
        (b'{"prompt": "  ", "answer": "4"}', "`prompt` is empty"),
        (b'{"prompt": "p", "answer": ""}', "`answer` is empty"),
        (b'{"prompt": "p", "answer": null}', "`answer` must be a string or a number, got null"),
        (b'{"prompt": "p", "answer": true}', "`answer` must be a string or a number, got true"),
        (b'{"prompt": "p", "answer": ["4"]}', "`answer` must be a string or a number"),
        (b'{"prompt": "p", "answer": NaN}', "invalid"),
        (b'{"prompt": "p", "answer": 1e1000}', "`answer`: the exponent of 1e1000 exceeds 999"),
        (
            b'{"prompt": "p", "answer": 1e-99999999999999999999}',
            "`answer`: the exponent .* exceeds 999",
        ),
        (
            b'{"prompt": "p", "answer": "4", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "nested too deeply",
        ),
        (b'{"prompt": "\xff\xfe", "answer": "4"}', "[Uu][Tt][Ff]-8"),
        (b'{"prompt": "p", "answer": "4", "difficulty": [1]}', "difficulty"),
        (b"\x00\x01", "[Ii]nvalid"),
    ],
)
def test_a_malformed_row_names_file_line_and_reason(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    file = write(tmp_path / "t.jsonl", GOOD, line, b'{"prompt": "q", "answer": "1"}')
    with pytest.raises(
        PromptDataError, match=rf"t\.jsonl line 2: .*{reason}.*data\.on_bad_row=skip"
    ):
        read_jsonl(file, BadRows("fail"), key="data.train_path")
    bad = BadRows("skip")
    assert [q.text for q in read_jsonl(file, bad, key="data.train_path")] == ["2+2=", "q"]
    assert bad.count == 1
    assert "line 2" in bad.examples[0]


def test_a_line_of_megabytes_is_a_bad_row_and_the_next_is_read(tmp_path: Path) -> None:
    huge = b'{"prompt": "%s", "answer": "4"}' % (b"1 " * 25_000_000)
    limit = b'{"prompt": "%s", "answer": "5"}' % (b"2" * (16 * 2**20 - 30))
    file = write(tmp_path / "t.jsonl", huge, GOOD, b" " * 2**25 + GOOD, limit)
    bad, start = BadRows("skip"), time.process_time()
    questions = read_jsonl(file, bad, key="data.train_path")
    assert time.process_time() - start < 5
    assert [q.origin[-6:] for q in questions] == ["line 2", "line 4"] and questions[1].answer == "5"
    assert bad.examples == [f"{file} line {n}: is longer than 16777216 bytes" for n in (1, 3)]


def test_an_id_used_twice_is_a_bad_row(tmp_path: Path) -> None:
    row = b'{"prompt": "%s", "answer": "4", "id": "x"}'
    file = write(tmp_path / "t.jsonl", row % b"a", row % b"b")
    with pytest.raises(PromptDataError, match="line 2: id 'x' is already used in line 1"):
        read_jsonl(file, BadRows("fail"), key="data.train_path")


def test_missing_files_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(PromptDataError, match=r"data\.train_path=.*absent.*No such file"):
        read_jsonl(tmp_path / "absent.jsonl", BadRows("skip"), key="data.train_path")
    with pytest.raises(PromptDataError, match=r"data\.eval_path=.*Is a directory"):
        read_jsonl(tmp_path, BadRows("skip"), key="data.eval_path")
    with pytest.raises(PromptDataError, match="no usable row"):
        read_jsonl(write(tmp_path / "e.jsonl", b""), BadRows("skip"), key="data.train_path")
    with pytest.raises(PromptDataError, match=r"no usable row among 1 bad ones.*\n.*line 1"):
        read_jsonl(write(tmp_path / "b.jsonl", b"{"), BadRows("skip"), key="data.train_path")
