"""`launch/train_rl.py` as a user starts it: real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.contracts.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "train_rl.py"
# Runs the script in this interpreter and says at its end whether torch came in.
PROBE = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("heavy modules:", sorted({"torch", "megatron.core", "sglang", "transformers", "numpy"} & set(sys.modules)))
"""


def start(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, str(SCRIPT), *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+optimizer.learning_rate=1", "optimizer.learning_rate=1: There is no such key"),
        ("train.total_steps=many", "train.total_steps=many: Must be a whole number"),
        ("parallel=ep2", "parallel.ep=2: parallel.etp x ep = 2 does not divide the 1 rank(s)"),
        ("model.path=/nowhere", "model.path=/nowhere: There is no such directory"),
        ("--multirun", "--multirun=''"),
    ],
)
def test_refusal_exits_2_before_torch(tmp_path: Path, override: str, message: str) -> None:
    done = start(override, cwd=tmp_path)
    assert done.returncode == ExitCode.REFUSED, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "heavy modules: []" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_refusal_takes_less_than_two_seconds_of_processor_time(tmp_path: Path) -> None:
    """Processor time, because other processes share the machine: the wall clock would measure them."""
    before = os.times()
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "+foo=1"], cwd=tmp_path, capture_output=True, check=False
    )
    after = os.times()
    assert done.returncode == ExitCode.REFUSED
    assert (
        after.children_user + after.children_system - before.children_user - before.children_system
        < 2.0
    )
    assert time.monotonic() - started < 20.0


def test_only_the_first_rank_reports(tmp_path: Path) -> None:
    done = start("+foo=1", cwd=tmp_path, RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stderr) == (ExitCode.REFUSED, "")


@pytest.mark.parametrize("question", [("--cfg", "job"), ("--help",), ("--info", "defaults-tree")])
def test_hydra_answers_without_a_run(tmp_path: Path, question: tuple[str, ...]) -> None:
    done = start(*question, "experiment=smoke", "algo=espo", cwd=tmp_path)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "heavy modules: []" in done.stdout
    assert "espo" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_question_about_a_mistake_is_refused_too(tmp_path: Path) -> None:
    done = start("--cfg", "job", "foo=1", cwd=tmp_path)
    assert (done.returncode, "foo=1: There is no such key" in done.stderr) == (
        ExitCode.REFUSED,
        True,
    )


def test_run_gets_typed_settings_and_a_clean_environment(tmp_path: Path, checkpoint: Path) -> None:
    """HYDRA_FULL_ERROR must not leak into engines and collectors; a good configuration is checked
    without torch too.
    """
    code = f"""
import os, sys
from pathlib import Path
from megatron_rl.config.cli import main
sys.argv = ["train_rl.py", "experiment=smoke", "model.path={checkpoint}"]
def run(config):
    print(type(config).__name__, os.environ.get("HYDRA_FULL_ERROR"), os.getcwd() == {str(tmp_path)!r})
    print("torch" in sys.modules)
    return 4
sys.exit(main(run, Path({str(ROOT / "hydra_conf")!r})))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4, done.stderr
    assert done.stdout.split() == ["Configuration", "None", "True", "False"]
    assert list(tmp_path.iterdir()) == [checkpoint]


def test_ctrl_c_while_it_imports_leaves_no_traceback(tmp_path: Path) -> None:
    """From its first line on, before which Python itself answers."""
    heard = (
        "import runpy, sys\nfrom megatron_rl.contracts import interrupts\nend_quietly = interrupts.exit_on_interrupt\n"
        "def told():\n    exit_on_interrupt()\n    print('on', flush=True)\ninterrupts.exit_on_interrupt = told"
    )
    code = PROBE.replace("import runpy, sys", heard)
    command = [sys.executable, "-c", code, str(SCRIPT), "experiment=smoke", f"run.root={tmp_path}"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "on\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == ExitCode.INTERRUPTED
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("question", [["--help"], ["--cfg", "job"], ["--info", "all"]])
def test_an_answer_that_nobody_reads_leaves_no_traceback(
    tmp_path: Path, question: list[str]
) -> None:
    read, write = os.pipe()
    os.close(read)  # as `| head` that is done
    command = [sys.executable, str(SCRIPT), *question]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("question", "told"),
    [
        (["--cfg", "job", "job"], "A setting is key=value"),
        (["--cfg", "nothing"], "Write --cfg job"),
        (
            ["--cfg", "job", "train.total_steps=many"],
            "train.total_steps=many: Must be a whole number",
        ),
        (["--cfg", "job", "--package", "nothing"], "--package='': "),
        (["--info", "nope"], "A setting is key=value"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(
    tmp_path: Path, question: list[str], told: str
) -> None:
    done = start(*question, cwd=tmp_path)
    assert done.returncode == ExitCode.REFUSED, done.stderr
    assert "1 setting is refused" in done.stderr and told in done.stderr


def test_the_configuration_is_shown_resolved_and_with_the_text_that_was_typed(
    tmp_path: Path,
) -> None:
    done = start("--cfg", "job", "run.name=2026_11_21", "seed=7", cwd=tmp_path)
    assert done.returncode == ExitCode.OK, done.stderr
    assert (
        "name: '2026_11_21'" in done.stdout
        and done.stdout.count("seed: 7") == 2
        and "${" not in done.stdout
    )
