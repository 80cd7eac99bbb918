"""What a user's class does wrong is found before an engine or a directory is made, and has a code
of its own.
"""

from pathlib import Path

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.rollouts.collector import _failure
from megatron_rl.rollouts.rejections import UserClassFailed, lost_by_user_class
from tests.support.scripts import start_script

OWN = """
class Scorer:
    def __init__(self): raise KeyError("model")
    def check_answer(self, answer): pass
    async def score(self, prompt, text, finish_reason): pass
class Source:
    def questions(self, seed): return None
"""


@pytest.mark.parametrize(
    ("overrides", "code", "told"),
    [
        (
            ("reward=custom", "reward.name=mine:Scorer"),
            2,
            "reward.name=mine:Scorer: mine:Scorer() fails: KeyError",
        ),
        (
            ("data=custom", "data.source=mine:Source"),
            3,
            "data.source=mine:Source: questions(0) returns NoneType",
        ),
    ],
)
def test_a_class_that_fails_starts_nothing(
    tmp_path: Path,
    overrides: tuple[str, ...],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    done = start_script(
        "train_rl", "experiment=smoke", f"run.root={tmp_path}/runs", *overrides, cwd=tmp_path
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.strip().startswith(told) and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_class_that_does_not_open_in_the_collector_is_not_the_engines_fault() -> None:
    failed = _failure(PluginError("reward.name=mine:Scorer: no"))
    assert (failed.reason, failed.refused) == ("reward.name=mine:Scorer: no", True)
    assert not _failure(ValueError("x")).refused


def test_rollouts_lost_by_a_scorer_are_not_the_engines_fault() -> None:
    assert lost_by_user_class({"no_verdict": 3, "engine": 2}) and lost_by_user_class(
        {"environment": 1}
    )
    assert not lost_by_user_class({"no_verdict": 1, "engine": 1})
    assert UserClassFailed.exit_code is ExitCode.REFUSED
