"""Narrow routes cost less than routes of four bytes an expert, and threads take most of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def cost(dtype: str, tokens: int, replies: int, rounds: int) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "tests.sglang_bridge.reply_cost", dtype]
    command += [str(number) for number in (tokens, replies, rounds)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120)
    costs: dict[str, float] = json.loads(result.stdout)
    print(dtype, {name: round(value, 1) for name, value in costs.items()})
    return costs


def test_a_long_reply_takes_a_quarter_of_the_bytes_and_less_time() -> None:
    wide = cost("int32", 8192, 1, 12)
    narrow = cost("uint8", 8192, 1, 12)
    assert narrow["bytes"] <= 0.26 * wide["bytes"]
    assert narrow["cpu"] <= 0.6 * wide["cpu"], (narrow, wide)
    assert narrow["loop"] <= 0.8 * wide["loop"], (narrow, wide)


def test_threads_decode_check_and_encode_a_long_reply() -> None:
    costs = cost("uint8", 8192, 1, 12)
    assert costs["loop"] <= 0.5 * costs["inline_loop"], costs


def test_long_replies_at_the_same_time_take_half_of_the_memory() -> None:
    wide = cost("int32", 32768, 4, 1)
    narrow = cost("uint8", 32768, 4, 1)
    assert narrow["memory"] <= 0.5 * wide["memory"], (narrow, wide)
