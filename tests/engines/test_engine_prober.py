"""Probes of engines in the background."""

import time
from collections.abc import Callable

import pytest

from megatron_rl.engines.engine_prober import EngineProber, ProbeResult
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed

ENGINE = Engine(url="http://127.0.0.1:1")


def probe(check: Callable[[Engine], Engine]) -> ProbeResult:
    prober = EngineProber(check)
    prober.probe("a", 0, ENGINE)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        results = prober.results()
        if results:
            return results[0]
        time.sleep(0.01)
    raise TimeoutError("the probe gave no result")


def test_an_engine_that_can_serve_has_no_problem() -> None:
    assert probe(lambda engine: engine) == ProbeResult("a", 0, "", ENGINE)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (RequestFailed("it does not answer"), "it does not answer"),
        (TypeError("unhashable type: 'list'"), "TypeError: unhashable type: 'list'"),
        (ValueError("no number"), "ValueError: no number"),
        (OSError("no route"), "OSError: no route"),
        (RecursionError("too deep"), "RecursionError: too deep"),
    ],
)
def test_every_error_of_a_probe_is_a_problem_of_its_engine(error: Exception, problem: str) -> None:
    def fail(engine: Engine) -> Engine:
        raise error

    assert probe(fail).problem == problem
