"""Lines at the limit of 16 MiB: the rows after them are read."""

from pathlib import Path

import pytest

from megatron_rl.prompts.question import BadRows
from tests.support.question_files import read_jsonl

MAX_LINE_BYTES = 16 * 2**20
GOOD_ROW = b'{"prompt": "2+2=", "answer": "4"}\n'


def long_row(num_bytes: int) -> bytes:
    """Return a row of so many bytes with its line end."""
    row = b'{"prompt": "%s", "answer": "4"}\n'
    return row % (b"1" * (num_bytes - len(row % b"")))


@pytest.mark.parametrize(("excess", "num_bad"), [(0, 0), (1, 1), (2, 1)])
def test_a_line_beyond_the_limit_costs_itself_alone(
    tmp_path: Path, excess: int, num_bad: int
) -> None:
    file = tmp_path / "t.jsonl"
    row = long_row(MAX_LINE_BYTES + excess)
    assert len(row) == MAX_LINE_BYTES + excess
    file.write_bytes(row + GOOD_ROW)
    bad_rows = BadRows("skip")
    questions = read_jsonl(file, bad_rows, key="data.train_path")
    assert bad_rows.count == num_bad
    assert questions[-1].origin == f"{file} line 2"


def test_a_last_line_beyond_the_limit_without_a_line_end_is_a_bad_row(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(GOOD_ROW + long_row(MAX_LINE_BYTES + 9)[:-1])
    bad_rows = BadRows("skip")
    assert len(read_jsonl(file, bad_rows, key="data.train_path")) == 1
    assert bad_rows.count == 1
