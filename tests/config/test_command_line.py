"""`launch/train_rl.py` as a user starts it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from megatron_rl.config import cli
from megatron_rl.contracts.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "train_rl.py"
# Runs the script in this interpreter and reports at its end which heavy modules it imported.
PROBE = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    heavy = {"torch", "megatron.core", "sglang", "transformers", "numpy"}
    print("heavy modules:", sorted(heavy & set(sys.modules)))
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


@dataclass(frozen=True)
class End:
    """The end of a command in this process: its exit code and what it printed."""

    code: int
    output: str
    errors: str


class Answer(Protocol):
    def __call__(self, *arguments: str) -> End: ...


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Answer]:
    """A function that runs the command in this process."""
    handler = signal.getsignal(signal.SIGPIPE)
    monkeypatch.setattr(cli, "_REPORT_SECONDS", 0.0)

    def run(*arguments: str) -> End:
        monkeypatch.setattr("sys.argv", [str(SCRIPT), *arguments])
        code = cli.main(lambda c: pytest.fail("a run has started"), cli.HYDRA_CONF)
        return End(code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGPIPE, handler)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+optimizer.learning_rate=1", "optimizer.learning_rate=1: "),
        pytest.param(
            "train.total_steps=many", "train.total_steps=many: ", marks=pytest.mark.nightly
        ),
        pytest.param("parallel=ep2", "parallel.ep=2: ", marks=pytest.mark.nightly),
        ("model.path=/nowhere", "model.path=/nowhere: "),
        ("--multirun", "--multirun='': "),
    ],
)
def test_a_refusal_exits_with_code_2_before_torch_is_imported(
    tmp_path: Path, override: str, message: str
) -> None:
    process = start(override, cwd=tmp_path)
    assert process.returncode == ExitCode.REFUSED, process.stderr
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert "heavy modules: []" in process.stdout
    assert list(tmp_path.iterdir()) == []


def processor_seconds_of(*arguments: str, cwd: Path, code: int) -> float:
    """Run Python, and return the processor time that it takes.

    Other processes share the machine, and the wall clock would measure them too.
    """
    before = os.times()
    process = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, check=False, timeout=120
    )
    after = os.times()
    assert process.returncode == code
    user_seconds = after.children_user - before.children_user
    return user_seconds + after.children_system - before.children_system


@pytest.mark.slow
def test_a_refusal_takes_little_more_time_than_the_imports_that_it_needs(tmp_path: Path) -> None:
    """On a machine where these take 0.3 s, a refusal takes less than 1.4 s."""
    import_seconds = []
    refusal_seconds = []
    for _ in range(2):
        program = "import hydra, omegaconf, msgspec"
        import_seconds.append(processor_seconds_of("-c", program, cwd=tmp_path, code=0))
        refusal_seconds.append(
            processor_seconds_of(str(SCRIPT), "+foo=1", cwd=tmp_path, code=ExitCode.REFUSED)
        )
    # Processes that share a core add to single measurements.
    assert min(refusal_seconds) < 3 * min(import_seconds) + 0.5


@pytest.mark.slow
def test_a_key_with_two_values_is_named(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the values and starts all the same: scripts append the settings of their users."""
    overrides = ["seed=1", "train.total_steps=3", "foo=1", "++seed=2", "train.total_steps=3"]
    first, *refusal = answer(*overrides).errors.splitlines()
    assert first == "seed is given as 1 and as 2: the last value counts"
    assert [line.partition(":")[0] for line in refusal] == [
        "foo=1",
        "1 setting is refused; nothing was started.",
    ]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert answer(*overrides) == End(ExitCode.REFUSED, "", "")


@pytest.mark.slow
def test_only_rank_0_reports_refusals(tmp_path: Path) -> None:
    process = start("+foo=1", cwd=tmp_path, RANK="1", WORLD_SIZE="2")
    assert (process.returncode, process.stderr) == (ExitCode.REFUSED, "")


@pytest.mark.slow
@pytest.mark.parametrize("question", [("--cfg", "job"), ("--help",), ("--info", "defaults-tree")])
def test_questions_to_hydra_start_no_run(tmp_path: Path, question: tuple[str, ...]) -> None:
    process = start(*question, "experiment=smoke", "algo=espo", cwd=tmp_path)
    assert process.returncode == ExitCode.OK, process.stderr
    assert "heavy modules: []" in process.stdout
    assert "espo" in process.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_cfg_job_reports_mistakes(answer: Answer) -> None:
    end = answer("--cfg", "job", "foo=1")
    assert end.code == ExitCode.REFUSED
    assert "foo=1: " in end.errors


@pytest.mark.slow
def test_a_run_gets_typed_settings_and_a_clean_environment(
    tmp_path: Path, checkpoint: Path
) -> None:
    """HYDRA_FULL_ERROR must not leak into engines and collectors, and checks need no torch."""
    code = f"""
import os, sys
from pathlib import Path
from megatron_rl.config.cli import main
sys.argv = ["train_rl.py", "experiment=smoke", "model.path={checkpoint}"]
def run(config):
    is_same_directory = os.getcwd() == {str(tmp_path)!r}
    print(type(config).__name__, os.environ.get("HYDRA_FULL_ERROR"), is_same_directory)
    print("torch" in sys.modules)
    return 4
sys.exit(main(run, Path({str(ROOT / "hydra_conf")!r})))
"""
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 4, process.stderr
    assert process.stdout.split() == ["Configuration", "None", "True", "False"]
    assert list(tmp_path.iterdir()) == [checkpoint]


@pytest.mark.slow
def test_ctrl_c_during_imports_leaves_no_traceback(tmp_path: Path) -> None:
    """Before the first line of the script, Python itself handles the signal."""
    reporting_imports = """import runpy, sys
from megatron_rl.contracts import interrupts
exit_on_interrupt = interrupts.exit_on_interrupt
def report():
    exit_on_interrupt()
    print("on", flush=True)
interrupts.exit_on_interrupt = report"""
    code = PROBE.replace("import runpy, sys", reporting_imports)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "question",
    [
        ["--help"],
        ["--cfg", "job"],
        pytest.param(["--info", "all"], marks=pytest.mark.nightly),
    ],
)
def test_a_closed_pipe_leaves_no_traceback(tmp_path: Path, question: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)  # like `| head` after its last line
    command = [sys.executable, str(SCRIPT), *question]
    process = subprocess.run(
        command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert "Traceback" not in process.stderr and "BrokenPipe" not in process.stderr


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (["--cfg", "job", "job"], "key=value"),
        (["--cfg", "nothing"], "Write --cfg job"),
        (["--cfg", "job", "train.total_steps=many"], "train.total_steps=many: "),
        (["--cfg", "job", "--package", "nothing"], "--package='': "),
        (["--info", "nope"], "key=value"),
    ],
)
def test_wrong_questions_to_hydra_are_refused(
    answer: Answer, question: list[str], message: str
) -> None:
    end = answer(*question)
    assert end.code == ExitCode.REFUSED, end.errors
    assert "1 setting is refused" in end.errors and message in end.errors


@pytest.mark.slow
def test_cfg_job_shows_resolved_values_and_text_as_typed(answer: Answer) -> None:
    end = answer("--cfg", "job", "run.name=2026_11_21", "seed=7")
    assert end.code == ExitCode.OK, end.errors
    assert (
        "name: '2026_11_21'" in end.output
        and end.output.count("seed: 7") == 2
        and "${" not in end.output
    )
