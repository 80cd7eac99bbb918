"""Ranks that are forks of one process: see `tests.support.torchrun`."""

import time
from pathlib import Path

import pytest

from tests.support.torchrun import torchrun

pytestmark = pytest.mark.distributed
FAILS = """
import os, sys, time
print(os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("no such layout")
time.sleep(100)
"""


def test_a_rank_that_fails_ends_the_others_and_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"ended with 1:(.|\n)*no such layout") as error:
        torchrun(script, "argument", ranks=2)
    assert "0 2 ['argument']" in str(error.value)
    assert time.monotonic() - start < 60, "rank 0 would sleep on"


def test_ranks_that_take_too_long_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(100)\n")
    with pytest.raises(AssertionError, match="took too long"):
        torchrun(script, ranks=2, timeout=1)


def test_ranks_are_forks_of_a_process_that_has_imported_megatron(tmp_path: Path) -> None:
    script = tmp_path / "modules.py"
    script.write_text("import sys\nprint('megatron.core' in sys.modules)\n")
    assert torchrun(script, ranks=2).split() == ["True", "True"]
