"""Vocabulary shards and context-parallel sequences over two gloo processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.processes import importable


@pytest.mark.distributed
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("gloo_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=importable(),
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
