"""A broken user-defined class fails before engines start, with its own exit code."""

from pathlib import Path

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.rollouts.wire.rejections import UserClassFailed, is_lost_by_user_class
from tests.support.scripts import start_script

CLASSES = """
class Scorer:
    def __init__(self): raise KeyError("model")
    def check_answer(self, question): pass
    async def score(self, prompt, text, finish_reason): pass
class Source:
    def questions(self, seed): return None
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "code", "message"),
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
def test_broken_user_class_starts_nothing(
    tmp_path: Path,
    overrides: tuple[str, ...],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mine.py").write_text(CLASSES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    process = start_script(
        "train_rl", "experiment=smoke", f"run.root={tmp_path}/runs", *overrides, cwd=tmp_path
    )
    assert process.returncode == code, process.stderr
    assert process.stderr.strip().startswith(message) and "Traceback" not in process.stderr
    assert not (tmp_path / "runs").exists()


def test_rollouts_lost_by_a_scorer_are_not_an_engine_fault() -> None:
    assert is_lost_by_user_class({"no_verdict": 3, "engine": 2}) and is_lost_by_user_class(
        {"environment": 1}
    )
    assert not is_lost_by_user_class({"no_verdict": 1, "engine": 1})
    assert UserClassFailed.exit_code is ExitCode.REFUSED
