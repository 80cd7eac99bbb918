"""The values of environment variables in options are in no file of a run, and not on the screen."""

import json
from pathlib import Path

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from tests.support.jobs import start_job

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(300)]
SECRET = "sk-not-to-be-written"
# Scores the rollouts of one step, and then raises exceptions that hold the key
JUDGE = """
from megatron_rl.contracts.group import Verdict


class Judge:
    def __init__(self, api_key):
        self.api_key = api_key
        self.num_calls = 0

    def check_answer(self, question):
        pass

    async def score(self, prompt, text, finish_reason):
        self.num_calls += 1
        if self.num_calls > 128:
            raise KeyError(f"401 for https://judge/?key={self.api_key}")
        correctness = float(self.num_calls % 2)
        return Verdict(reward=correctness, correctness=correctness)
"""


def test_no_file_of_a_failing_run_holds_the_value_of_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_judge.py").write_text(JUDGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    job = start_job(
        tmp_path,
        "reward=custom",
        "reward.name=my_judge:Judge",
        "reward.options={api_key: '${oc.env:JUDGE_KEY}'}",
        "run.checkpoint_every=1",
        "logger.tensorboard=true",
        "logger.save_rollouts_every=1",
        "logger.progress=true",
    )
    output, _ = job.communicate(timeout=280)
    run = tmp_path / "job"
    assert job.returncode == ExitCode.REFUSED, output[-4000:]
    reason = json.loads((run / "exit.json").read_text())["reason"]
    assert "${oc.env:JUDGE_KEY}" in reason and "my_judge.py" in reason
    assert SECRET not in output
    files = [file for file in run.rglob("*") if file.is_file()]
    folders = {file.relative_to(run).parts[0] for file in files}
    assert {"checkpoints", "config.yaml", "logs", "rollouts", "tensorboard"} <= folders
    assert [str(file) for file in files if SECRET.encode() in file.read_bytes()] == []
