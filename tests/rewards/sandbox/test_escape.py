"""Programs that try to leave the sandbox, as root and as another user: none succeeds."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rewards.sandbox.attack import SECRET
from tests.rewards.sandbox.escape_programs import ENDLESS, HARMLESS, HOSTILE
from tests.rewards.sandbox.users import make_folder, run_as

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MODULE = "tests.rewards.sandbox.attack"
PROGRAMS = HARMLESS | HOSTILE | ENDLESS
ENDINGS = {
    "spin": ("CPU",),
    "deaf_spin": ("CPU",),
    "daemon": ("CPU",),
    "sleep": ("CLOCK",),
    "endless_input": ("CLOCK",),
    "output": ("OUTPUT",),
    "memory_bomb": ("MEMORY",),
    # It depends on the thread that meets the limit first
    "memory_by_threads": ("MEMORY", "EXIT"),
}


@pytest.fixture(scope="module", params=["own", "other"])
def report(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    with make_folder(request.param) as folder:
        report = json.loads(run_as(request.param, "-m", MODULE, folder, "strict"))
        if "refusal" in report:
            pytest.skip(report["refusal"])
        print(report["isolation"])
        yield report


def test_there_are_enough_programs() -> None:
    assert len(HARMLESS | HOSTILE) >= 30


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_escapes(report: dict[str, Any], name: str) -> None:
    result = report["results"][name]
    assert result["output"].startswith("started") or result["ending"] == "CLOCK", result
    assert "ESCAPED" not in result["output"], result
    assert SECRET not in result["output"]
    assert result["processes"] == []
    assert result["ending"] in ENDINGS.get(name, ("EXIT",)), result


def test_nothing_outside_has_changed(report: dict[str, Any]) -> None:
    assert report["contacts"] == 0
    assert report["is_alive"]
    assert report["new_files"] == []


def test_the_harmless_programs_succeed_without_a_sandbox() -> None:
    """Else they would prove nothing."""
    with make_folder("own") as folder:
        report = json.loads(run_as("own", "-m", MODULE, folder, "outside"))
    missing = {
        name for name, result in report["results"].items() if "ESCAPED" not in result["output"]
    }
    assert missing == set()
    assert report["contacts"] == 5
    assert report["new_files"] == ["file"]
