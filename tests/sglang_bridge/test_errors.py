"""Errors of engine processes that ended."""

import pytest

from sglang_bridge.errors import EngineDied, describe_exit


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (-9, "SIGKILL: from outside"),
        (137, "SIGKILL: from outside"),
        (139, "SIGSEGV"),
        (-15, "SIGTERM"),
        (1, "exit code 1"),
        (255, "exit code 255"),
    ],
)
def test_exit_by_a_signal_is_named(returncode: int, words: str) -> None:
    assert describe_exit(returncode).startswith(words)
    assert str(EngineDied("gone", returncode=returncode)).startswith(f"gone ({words}")
