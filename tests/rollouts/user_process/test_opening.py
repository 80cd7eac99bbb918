"""Constructors in processes: those that take long, raise, hang or end their process."""

import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.plugins import PluginError
from tests.rollouts.user_process.classes import score_in_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
SCORER = """
import atexit
import os
import time

from megatron_rl.contracts.group import Verdict


class Good:
    def check_answer(self, question):
        pass

    async def score(self, prompt, text, finish_reason):
        if text == "exits":
            os._exit(1)
        return Verdict(reward=float(os.environ.get("MEGATRON_RL_RUN_KEY") is None), correctness=1.0)


class Raises(Good):
    def __init__(self):
        raise KeyError("no model")


class Exits(Good):
    def __init__(self):
        print("goodbye")
        os._exit(5)


class Hangs(Good):
    def __init__(self):
        while True:
            try:
                time.sleep(3600)
            except BaseException:
                pass


class HasSecret(Good):
    def __init__(self, key):
        self.key = key

    async def score(self, prompt, text, finish_reason):
        raise KeyError(f"401 for ?key={self.key}")


class WritesAtExit(Good):
    def __init__(self):
        atexit.register(open, "FOLDER/finished", "w")


class OpensAlone(Good):
    def __init__(self):
        self.number = len(os.listdir("FOLDER/opens"))
        if self.number == 1:
            open(f"FOLDER/opens/{self.number}", "w").close()
            raise OSError("in use")
        open(f"FOLDER/opens/{self.number}", "w").close()


class OpensOnce(Good):
    def __init__(self):
        if os.path.exists("FOLDER/opened"):
            raise OSError("only one")
        open("FOLDER/opened", "w").close()
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "constructors.py").write_text(SCORER.replace("FOLDER", str(tmp_path)))
    (tmp_path / "opens").mkdir()
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(1.5)\n" + SCORER)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_module_may_take_long_to_import() -> None:
    assert score_in_process("slow_import:Good", timeout_s=0.5).verdicts["after"].reward == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", r"constructors:Raises\(\) fails: KeyError: 'no model' \(.*in __init__"),
        pytest.param("Missing", "has no class Missing", marks=pytest.mark.nightly),
        ("Exits", r"its process ended before the class was constructed \(exit code 5\); the log"),
        ("Hangs", r"its constructor did not return within parallel\.timeout_s=4\. Make it faster"),
    ],
)
def test_a_constructor_that_fails_is_refused_by_name(name: str, message: str) -> None:
    start = time.monotonic()
    earlier = set(psutil.Process().children(recursive=True))
    with pytest.raises(PluginError, match=rf"^reward\.name=constructors:{name}: .*{message}"):
        timeout_s = 4.0 if name == "Hangs" else 60.0
        score_in_process(f"constructors:{name}", open_timeout_s=timeout_s)
    assert time.monotonic() - start < 30
    assert set(psutil.Process().children(recursive=True)) - earlier == set()


@pytest.mark.nightly
def test_a_class_that_cannot_be_open_twice_costs_a_call_its_verdict() -> None:
    """The call that ended its process cannot be made alone. The shared process opens again."""
    results = score_in_process("constructors:OpensAlone", "exits", then=("after",))
    assert "in use" in results.reason("exits")
    assert results.verdicts["after"].reward == 1.0


def test_a_class_that_cannot_be_opened_again_ends_the_run_but_refuses_no_setting() -> None:
    with pytest.raises(Failure, match=r"reward\.name=constructors:OpensOnce: .*only one") as error:
        score_in_process("constructors:OpensOnce", "exits", then=("after",))
    assert error.value.exit_code == ExitCode.ENGINE_FAILED  # torchrun and Slurm start it again


def test_a_secret_option_stays_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-not-to-be-shown")
    name = "constructors:HasSecret"
    results = score_in_process(name, options={"key": "${oc.env:JUDGE_KEY}"})
    assert results.reason("after").endswith("KeyError: '401 for ?key=${oc.env:JUDGE_KEY}'")


@pytest.mark.nightly
def test_a_class_may_write_its_files_at_the_end(tmp_path: Path) -> None:
    score_in_process("constructors:WritesAtExit")
    assert (tmp_path / "finished").exists()
