"""The dispatcher: every rank executes the commands of rank 0."""

from pathlib import Path

import pytest

from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("commands_of_two_ranks.py")
CALLS = ["poll", "sync 41", "somewhere"]


@pytest.mark.distributed
def test_two_ranks_execute_the_commands_of_rank_0() -> None:
    assert f"RESULT {[CALLS, CALLS]}" in torchrun(SCRIPT, ranks=2)
