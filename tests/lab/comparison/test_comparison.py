"""`python -m tests.lab.comparison` reports runs of the requested configurations only."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.records.run_lock import mark_run_alive
from tests.lab.comparison import runner
from tests.lab.comparison.__main__ import SCRIPT
from tests.lab.comparison.variants import RunPlanner
from tests.support.comparisons import Launcher, write_existing_run
from tests.support.configurations import configuration_of
from tests.support.scripts import ROOT, start_module

pytestmark = pytest.mark.slow

Compare = Callable[..., int]
ONE_VARIANT = ("--seeds", "0", "--variant", "a:")


def test_runs_are_trained_once_and_reported_together(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = ("--variant", "a:", "algo=espo", "--variant", "b@5:", "algo=grpo", "optimizer.lr=0")
    assert compare("--seeds", "0,1", *variants) == ExitCode.OK
    assert launcher.names == ["a-seed0", "b-seed5", "a-seed1"], "variants take turns"
    overrides = {"algo=grpo", "optimizer.lr=0", "seed=5", "experiment=quickstart"}
    assert overrides < set(launcher.commands[1])
    table = (tmp_path / "out" / "table.md").read_text()
    assert [line.split(" | ")[:2] for line in table.splitlines()[2:]] == [
        ["| a", "0"],
        ["| a", "1"],
        ["| **a**", "mean"],
        ["| b", "5"],
        ["| **b**", "mean"],
    ]
    assert list(json.loads((tmp_path / "out" / "curves.json").read_text())) == ["a", "b"]
    launcher.commands.clear()
    assert compare("--seeds", "0,1", *variants) == ExitCode.OK
    assert launcher.commands == []
    assert table in capsys.readouterr().out


def test_runs_are_started_with_the_script_of_the_main_job(
    compare: Compare, launcher: Launcher
) -> None:
    assert compare(*ONE_VARIANT) == ExitCode.OK
    assert ROOT / "launch/train_rl.py" == SCRIPT and SCRIPT.is_file()
    assert str(SCRIPT) in launcher.commands[0]


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        (["--variant", "a:", "algo=espo", "optimizer.lr=0"], ("optimizer.lr: 0.0003", "0.0 req")),
        (["--variant", "a:", "algo=grpo"], ("algo.name: espo", "grpo requested")),
        (
            ["--common", "train.total_steps=21", "--variant", "a:", "algo=espo"],
            ("train.total_steps: 20", "21 requested"),
        ),
        (
            ["--experiment", "smoke", "--variant", "a:", "algo=espo"],
            ("data.source: column_addition", "two_digit_addition requested"),
        ),
    ],
)
def test_a_complete_run_of_another_configuration_is_refused(
    compare: Compare,
    launcher: Launcher,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    difference: tuple[str, str],
) -> None:
    write_existing_run(tmp_path, "a-seed1", "algo=espo", "seed=1")
    assert compare("--seeds", "0,1", *arguments) == ExitCode.REFUSED
    message = capsys.readouterr().err
    assert "a-seed1 holds a complete run of another configuration" in message
    assert all(part in message for part in (*difference, "--out"))
    assert launcher.commands == [], "the run before it is not started either"


def test_keys_that_only_one_configuration_has_are_a_difference(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_existing_run(tmp_path, "a-seed0", "seed=0")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("  warmup_steps: 5\n", "") + "extra: null\n")
    assert compare(*ONE_VARIANT) == ExitCode.REFUSED
    message = capsys.readouterr().err
    assert "optimizer.warmup_steps: nothing in that run, 5 requested" in message
    assert "extra: null in that run, nothing requested" in message


def test_a_run_on_another_number_of_ranks_is_another_run(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_existing_run(tmp_path, "a-seed0", "seed=0", ranks=2)
    assert compare(*ONE_VARIANT) == ExitCode.REFUSED
    assert "number of ranks: 2 in that run, 1 requested" in capsys.readouterr().err
    (run / "versions.json").write_text("{")
    assert compare(*ONE_VARIANT) == ExitCode.REFUSED
    assert "a-seed0/versions.json is damaged" in capsys.readouterr().err


def test_settings_of_the_run_section_make_no_difference(
    compare: Compare, launcher: Launcher, tmp_path: Path
) -> None:
    write_existing_run(tmp_path, "a-seed0", "seed=0", "run.save_weights=false")
    assert compare(*ONE_VARIANT) == ExitCode.OK
    assert launcher.commands == []


@pytest.mark.parametrize("code", [4, pytest.param(130, marks=pytest.mark.nightly), None])
def test_an_interrupted_comparison_continues(
    compare: Compare, launcher: Launcher, tmp_path: Path, code: int | None
) -> None:
    write_existing_run(tmp_path, "a-seed0", "seed=0", accuracies=(0.25, 1.0))
    write_existing_run(tmp_path, "a-seed1", "seed=1", "optimizer.lr=1", code=code)
    assert compare("--seeds", "0,1", "--variant", "a:") == ExitCode.OK
    (command,) = launcher.commands
    assert {"seed=1", "run.on_existing=overwrite_failed"} < set(command)
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| a | 0 | 0.250 | 1.000" in table
    assert "| a | 1 | 0.250 | 0.500" in table


def test_a_running_run_is_left_alone(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_existing_run(tmp_path, "a-seed1", "seed=1", code=None)
    with mark_run_alive(run):
        assert compare("--seeds", "0,1", "--variant", "a:") == ExitCode.REFUSED
    assert "a-seed1 is a run that is still running" in capsys.readouterr().err
    assert launcher.commands == []


def test_a_failed_run_ends_the_comparison_with_its_code_and_reason(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_existing_run(tmp_path, "a-seed0", "seed=0")
    launcher.code = 4
    assert compare("--seeds", "0,1,2", "--variant", "a:") == 4
    message = capsys.readouterr().err
    assert "a-seed1 failed (exit code 4): an engine died\nRun the same command again" in message
    assert len(launcher.commands) == 1
    launcher.code = None
    assert compare("--seeds", "0,1,2", "--variant", "a:") == 1
    assert "a-seed1 failed (exit code 1): it left no exit.json" in capsys.readouterr().err


def test_a_run_that_trained_another_configuration_is_not_reported(
    compare: Compare, launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.extra_overrides = ["optimizer.lr=0.5"]
    assert compare(*ONE_VARIANT) == ExitCode.REFUSED
    assert "optimizer.lr: 0.5 in that run, 0.0003 requested" in capsys.readouterr().err


def test_ctrl_c_waits_for_the_run_and_names_the_way_to_continue(
    compare: Compare, launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = []

    def interrupt_first_wait() -> None:
        waits.append(1)
        if len(waits) == 1:
            raise KeyboardInterrupt

    launcher.during = interrupt_first_wait
    assert compare(*ONE_VARIANT) == ExitCode.INTERRUPTED
    assert len(waits) == 2, "the end of the run is waited for"
    assert "interrupted. Run the same command again" in capsys.readouterr().err


def test_the_number_of_ranks_reaches_the_rules_and_the_run(
    compare: Compare,
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_ranks = (*ONE_VARIANT, "parallel=ep2")
    assert compare(*two_ranks) == ExitCode.REFUSED
    message = capsys.readouterr().err
    assert "--variant a, seed 0: parallel.ep=2: " in message
    monkeypatch.setattr(
        "tests.support.past_runs.configuration_of",
        lambda overrides: configuration_of(overrides, facts=LaunchFacts(2, 2)),
    )
    assert compare("--nproc", "2", *two_ranks) == ExitCode.OK
    assert "--nproc-per-node=2" in launcher.commands[0]
    monkeypatch.setenv("NPROC", "2")
    assert compare(*two_ranks) == ExitCode.OK


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--variant", "a", "algo=espo"], "a variant begins with its name, a colon"),
        (["--variant", "a:algo=espo"], "--variant a: key=value"),
        (["--variant", "a/b:"], "the name becomes the name of a directory"),
        (["--variant", ":"], "the name becomes the name of a directory"),
        (["--variant", f"{'a' * 130}:"], "128 characters"),
        (["--variant", "a:", "--variant", "a@1:"], "another variant has this name"),
        (["--variant", "a@one:"], "'one' is not a seed"),
        (["--variant", "a@:"], "'' is not a seed"),
        (["--variant", "a:", "seed=1"], "seed is set by --seeds"),
        (
            ["--common", "run.name=x", "--variant", "a:"],
            "--common: run.name=x: run.name is set by the variant's name",
        ),
        (["--variant", "a:", "++run.root=x"], "run.root is set by --out"),
        (["--variant", "a:", "algo=nothing"], "algo=nothing: "),
        (["--variant", "a:", "optimizer.lr=fast"], "optimizer.lr=fast: "),
        (["--experiment", "nothing", "--variant", "a:"], "experiment=nothing: "),
    ],
)
def test_invalid_variants_are_refused_before_anything_starts(
    compare: Compare,
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    assert compare(*arguments) == ExitCode.REFUSED
    assert reason in capsys.readouterr().err
    assert launcher.commands == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "the following arguments are required: --variant"),
        (["--seeds", "0,,1", "--variant", "a:"], "'' is not a seed"),
        (["--seeds", "-1", "--variant", "a:"], "--seeds"),
        (["--seeds", "4294967296", "--variant", "a:"], "'4294967296' is not a seed"),
        (["--seeds", "1,1", "--variant", "a:"], "names a seed twice"),
        (["--nproc", "0", "--variant", "a:"], "'0' is not a number of ranks"),
        (["--parallel", "two", "--variant", "a:"], "'two' is not a number of runs"),
        (["--equal-accuracy", "60", "--variant", "a:"], "'60' is not an accuracy"),
        (["--seeds", "x", "--variant", "a:"], "'x' is not a seed"),
        (["--variants", "a:"], "--variant"),
    ],
)
def test_invalid_options_are_refused(
    compare: Compare, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as exit_request:
        compare(*arguments)
    assert exit_request.value.code == ExitCode.REFUSED
    assert reason in capsys.readouterr().err


def test_a_damaged_run_is_named(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_existing_run(tmp_path, "a-seed0", "seed=0")
    (run / "metrics.jsonl").write_text("{\n")
    assert compare(*ONE_VARIANT) == ExitCode.REFUSED
    assert "a-seed0/metrics.jsonl line 1 is damaged" in capsys.readouterr().err
    (run / "config.yaml").unlink()
    assert compare(*ONE_VARIANT) == ExitCode.REFUSED
    assert "a-seed0 holds no config.yaml" in capsys.readouterr().err


def test_a_result_file_that_cannot_be_written_is_named(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_existing_run(tmp_path, "a-seed0", "seed=0")
    (tmp_path / "out" / "table.md").mkdir()
    assert compare(*ONE_VARIANT) == ExitCode.CANNOT_WRITE
    assert "table.md cannot be written" in capsys.readouterr().err


def test_sigterm_stops_all_runs(tmp_path: Path) -> None:
    """The processes are real, and nothing but the runner signals them."""
    script = tmp_path / "run.py"
    script.write_text(
        "import os, pathlib, time\n"
        f"file = pathlib.Path({str(tmp_path)!r}) / f'{{os.getpid()}}.pid'\n"
        "file.touch()\n"
        "time.sleep(60)\n"
        "file.with_suffix('.end').touch()\n"
    )
    planner = RunPlanner(tmp_path, "quickstart", ranks=1)
    runs = [planner.run("a", (), seed) for seed in range(2)]

    def end_when_both_run() -> None:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("*.pid"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    with (
        ThreadPoolExecutor() as pool,
        pytest.raises(SystemExit) as exit_request,
        runner.exit_on_sigterm(),
    ):
        pool.submit(end_when_both_run)
        runner.train_all(runs, script, [("engine.count=1",), ("engine.count=2",)], 1, print)
    assert exit_request.value.code == ExitCode.TERMINATED
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))
    assert list(tmp_path.glob("*.end")) == []


def test_parallel_runs_have_separate_logs(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = []
    launcher.during = lambda: starts.append(len(launcher.commands))
    assert compare("--parallel", "2", "--seeds", "0,1,2", "--variant", "a:") == ExitCode.OK
    assert starts == [2, 3, 3], "two at first, and the third as soon as one has ended"
    logs = [Path(streams["stdout"].name).name for streams in launcher.streams]
    assert logs == ["a-seed0.log", "a-seed1.log", "a-seed2.log"]
    assert "train_rl.py" in (tmp_path / "out" / "logs" / "a-seed1.log").read_text()
    assert "a-seed2: complete" in capsys.readouterr().out


def test_after_a_failure_running_runs_end_and_no_other_starts(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.outcome = lambda overrides: {"code": 4 if "seed=0" in overrides else 0}

    def end_well(timeout: float | None = None) -> int:
        launcher.returncode = 0
        return 0

    launcher.wait = end_well  # type: ignore[method-assign]
    assert compare("--parallel", "2", "--seeds", "0,1,2,3", "--variant", "a:") == 4
    assert launcher.names == ["a-seed0", "a-seed1"]
    assert "| a | 1 |" in (tmp_path / "out" / "table.md").read_text()
    message = capsys.readouterr().err
    assert "a-seed0 failed (exit code 4)" in message and "logs/a-seed0.log" in message
    launcher.commands.clear()
    launcher.outcome = lambda overrides: {"code": 0}
    assert compare("--parallel", "2", "--seeds", "0,1,2,3", "--variant", "a:") == ExitCode.OK
    assert launcher.names == ["a-seed0", "a-seed2", "a-seed3"]


def test_help_shows_examples_and_outputs() -> None:
    result = start_module("tests.lab.comparison", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "python -m tests.lab.comparison --out" in result.stdout
    for file in ("table.md", "tokens.md", "metrics.md"):
        assert f"OUT/{file}" in result.stdout
