"""The file with the URLs of external engines."""

from pathlib import Path

import pytest

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.engines.url_list import UrlList, parse_urls

FIRST = "http://127.0.0.1:30000"
SECOND = "http://10.0.0.7:30001"


def list_of(path: Path) -> tuple[UrlList, list[str]]:
    lines: list[str] = []
    settings = EngineSettings(urls=str(path), tp=4, ep=2, quantization="fp8")
    return UrlList(settings, lines.append), lines


def test_lines_are_urls_and_comments() -> None:
    text = f"# engines of rack 7\n\n  {FIRST}  \n{SECOND}\r\n   # the last one\n"
    assert parse_urls(text) == [FIRST, SECOND]
    assert parse_urls("") == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("127.0.0.1:30000", "a scheme, a host and a port"),
        ("http://127.0.0.1", "a scheme, a host and a port"),
        ("https://127.0.0.1:1", "plain HTTP"),
        ("http://8.8.8.8:30000", "not a loopback or private address"),
        ("http://127.0.0.1:1/v1", "no user, path, query"),
        ("http://127.0.0.1:99999", "It is not a URL"),
        ("http://no-such-host.invalid:1", "cannot be resolved"),
        (FIRST, "An engine is named twice"),
        ("http://localhost:30000", "An engine is named twice"),
        (f"{SECOND} {SECOND}", "engine.urls"),
    ],
)
def test_a_bad_line_is_refused_by_name_and_rule(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "urls"
    path.write_text(f"{FIRST}\n{line}\n")
    url_list, _ = list_of(path)
    with pytest.raises(Failure) as error:
        url_list.read_first()
    message = str(error.value)
    assert f"engine.urls={path}" in message and line in message and words in message
    assert error.value.exit_code is ExitCode.REFUSED


def test_a_file_that_cannot_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    missing, _ = list_of(tmp_path / "missing")
    with pytest.raises(Failure, match="No such file"):
        missing.read_first()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    binary, _ = list_of(tmp_path / "binary")
    with pytest.raises(Failure, match="binary"):
        binary.read_first()
    (tmp_path / "empty").write_text("# none yet\n")
    empty, _ = list_of(tmp_path / "empty")
    with pytest.raises(Failure, match="names no engine"):
        empty.read_first()


def test_only_a_change_of_the_file_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "urls"
    path.write_text(FIRST)
    url_list, lines = list_of(path)
    assert url_list.read_first() == [FIRST]
    assert [url_list.read() for _ in range(2)] == [None, None]
    path.write_text(f"{FIRST}\n{SECOND}\n")
    assert [url_list.read() for _ in range(2)] == [[FIRST, SECOND], None]
    path.write_text("")
    assert [url_list.read() for _ in range(2)] == [[], None]
    assert lines == []


def test_an_unusable_file_changes_nothing_and_is_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "urls"
    path.write_text(FIRST)
    url_list, lines = list_of(path)
    url_list.read_first()
    path.write_text(f"{FIRST}\n{FIRST}")
    assert [url_list.read() for _ in range(3)] == [None] * 3
    assert len(lines) == 1 and "changes no engine" in lines[0] and "named twice" in lines[0]
    path.unlink()
    assert [url_list.read() for _ in range(3)] == [None] * 3
    assert len(lines) == 2 and "No such file" in lines[1]
    path.write_text(FIRST)
    assert url_list.read() is None  # as it was before
    path.write_text(f"{FIRST}\n{FIRST}")
    assert url_list.read() is None
    assert len(lines) == 3
    path.write_text(SECOND)
    assert url_list.read() == [SECOND]


def test_an_engine_of_the_list_has_the_sizes_of_the_settings(tmp_path: Path) -> None:
    engine = list_of(tmp_path)[0].engine(FIRST, 3)
    assert (engine.url, engine.node, engine.tp, engine.ep) == (FIRST, 3, 4, 2)
    assert engine.quantization == "fp8"
