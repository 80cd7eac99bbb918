"""A server that ends because of a user's setting: the error's first line names the reason."""

import contextlib
import time
from pathlib import Path

import pytest

from sglang_bridge.errors import EngineDied, EngineError
from sglang_bridge.keys import create_keys
from sglang_bridge.server import managed_engine as server
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.settings import ServerPlace, ServerSettings

USAGE = """for i in range(99): print('  [--option]')
print('sglang serve: error: unrecognized arguments: --nope'); exit(2)"""
TRACE = "raise OSError('no model there')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "extra", "first_line"),
    [
        (
            USAGE,
            ["--nope"],
            "engine.extra_args=['--nope']: SGLang refuses them: unrecognized arguments: --nope. ",
        ),
        (TRACE, [], "engine http://127.0.0.1:"),
    ],
)
def test_reason_of_an_engine_exit_is_the_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, extra: list[str], first_line: str
) -> None:
    monkeypatch.setattr(server, "build_argv", lambda *arguments, **options: ["python", "-c", code])
    with contextlib.closing(Lifeline()) as lifeline:
        engine = ManagedEngine.start(
            ServerSettings(extra_args=extra),
            ServerPlace(model_path="/model", device="cpu"),
            keys=create_keys(),
            log_path=tmp_path / "engine.log",
            lifeline=lifeline,
        )
        with pytest.raises(EngineDied) as error_info:
            for _ in range(200):
                engine.check_alive()
                time.sleep(0.1)
        engine.stop()
    lines = str(error_info.value).splitlines()
    assert lines[0].startswith(first_line)
    assert len(lines) == 1 and f"; see {tmp_path}/engine.log" in lines[0]
    assert extra or "ended by itself: OSError: no model there" in lines[0]
    assert extra or "no model there" in error_info.value.log_tail


def test_start_timeout_error_gives_the_elapsed_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "build_argv", lambda *arguments, **options: ["sleep", "60"])
    place = ServerPlace(model_path="/model", device="cpu")
    with contextlib.closing(Lifeline()) as lifeline:
        engine = ManagedEngine.start(
            ServerSettings(),
            place,
            keys=create_keys(),
            log_path=tmp_path / "log",
            lifeline=lifeline,
        )
        time.sleep(1.2)
        with pytest.raises(
            EngineError,
            match=r"not healthy [1-9]\d* s after its start; raise engine\.start_timeout_s",
        ):
            engine.wait_healthy(0.0)  # as in a wait for several engines, whose time is used up
        engine.stop()
