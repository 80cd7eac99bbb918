"""Narrow routes cost their client less than routes of four bytes an expert."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUNS = 3


def cost(dtype: str, tokens: int, replies: int) -> dict[str, float]:
    """Measure in a process of its own. The smallest of several runs: other programs disturb."""
    command = [sys.executable, "-m", "tests.sglang_bridge.reply_cost", dtype]
    command += [str(tokens), str(replies)]
    runs: list[dict[str, float]] = []
    for _ in range(RUNS):
        result = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120)
        runs.append(json.loads(result.stdout))
    return {name: min(run[name] for run in runs) for name in runs[0]}


def test_a_long_reply_takes_a_quarter_of_the_bytes_and_less_time() -> None:
    wide = cost("int32", 8192, 1)
    narrow = cost("uint8", 8192, 1)
    assert narrow["bytes"] <= 0.26 * wide["bytes"]
    assert narrow["cpu"] <= 0.6 * wide["cpu"], (narrow, wide)
    assert narrow["loop"] <= 0.8 * wide["loop"], (narrow, wide)


def test_long_replies_at_the_same_time_take_half_of_the_memory() -> None:
    wide = cost("int32", 32768, 4)
    narrow = cost("uint8", 32768, 4)
    assert narrow["memory"] <= 0.5 * wide["memory"], (narrow, wide)
