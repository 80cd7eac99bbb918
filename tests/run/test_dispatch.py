"""Every rank executes the same commands through the same table."""

from pathlib import Path

import pytest

from support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("commands_of_two_ranks.py")
DONE = ["wait", "sync 41", "somewhere"]


@pytest.mark.distributed
@pytest.mark.parametrize(("end", "last"), [("finish", []), ("abort", ["aborted: the engine died"])])
def test_two_ranks_execute_what_rank_0_says(end: str, last: list[str]) -> None:
    output = torchrun(SCRIPT, end, ranks=2)
    assert f"RESULT {[DONE, DONE + last]}" in output
