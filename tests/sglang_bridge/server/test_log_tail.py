"""Log tails for error messages."""

from pathlib import Path

from sglang_bridge.server.log_tail import argument_error, last_exception, last_lines


def test_last_lines_without_secrets(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("\n".join(["old", "server_args={'api_key': 'hush'}", "Traceback", "boom"]))
    assert (
        last_lines(log, count=3, secrets=("hush",))
        == "server_args={'api_key': '***'}\nTraceback\nboom"
    )


def test_long_lines_are_shortened_and_invalid_bytes_replaced(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"x" * 10_000 + b"\n\xff\xfe end")
    first, last = last_lines(log).splitlines()
    assert len(first) < 500
    assert last.endswith(" end")


def test_missing_log_is_empty(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none.log") == ""


def test_parser_errors_and_exceptions_are_found_in_a_log() -> None:
    usage = (
        "usage: launch_server.py [-h]\n  [--tp TP]\n"
        "sglang serve: error: unrecognized arguments: --nope\n"
    )
    trace = (
        "Traceback (most recent call last):\n  File x\nKeyError: 1\n"
        "torch.OutOfMemoryError: no room\n  at\n"
    )
    assert (argument_error(usage), last_exception(usage)) == (
        "unrecognized arguments: --nope",
        None,
    )
    assert (argument_error(trace), last_exception(trace)) == (
        None,
        "torch.OutOfMemoryError: no room",
    )
