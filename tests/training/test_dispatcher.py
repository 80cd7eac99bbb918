"""Every rank executes the same commands through the same table."""

from pathlib import Path

import pytest

from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("commands_of_two_ranks.py")
DONE = ["wait", "sync 41", "somewhere"]


@pytest.mark.distributed
def test_two_ranks_execute_what_rank_0_says() -> None:
    assert f"RESULT {[DONE, DONE]}" in torchrun(SCRIPT, ranks=2)
