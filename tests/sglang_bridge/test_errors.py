"""Errors of engine processes that ended."""

import traceback

import pytest

from sglang_bridge.errors import EngineDied, EngineError, describe_exit


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


def test_a_log_is_apart_from_the_message() -> None:
    """A traceback shows it, because the run's own report does not reach a test or a script."""
    log_tail = "first line\nlast line"
    for error in (
        EngineDied("gone", returncode=1, log_tail=log_tail),
        EngineError("silent", log_tail=log_tail),
    ):
        assert "\n" not in str(error) and error.log_tail == log_tail
        assert "last line" in "".join(traceback.format_exception(error))
    assert not hasattr(EngineError("silent"), "__notes__")
