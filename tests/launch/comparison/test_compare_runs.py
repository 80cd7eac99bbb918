"""`launch/comparison/__main__.py` reports runs of the configurations asked for, and nothing else,
under their names.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.comparison import runner as training
from megatron_rl.config.cli import compose
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.records.run_lock import hold_run
from tests.support.comparisons import Launcher, complete
from tests.support.scripts import start_script

Compare = Callable[..., int]


def test_runs_are_made_once_and_reported_together(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (
        "--seeds",
        "0,1",
        "--variant",
        "a:",
        "algo=espo",
        "--variant",
        "b@5:",
        "algo=grpo",
        "optimizer.lr=0",
    )
    assert compare(*asked) == ExitCode.OK
    assert launcher.names == ["a-seed0", "b-seed5", "a-seed1"], "variants take turns"
    assert {"algo=grpo", "optimizer.lr=0", "seed=5", "experiment=quickstart"} < set(
        launcher.commands[1]
    )
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
    assert compare(*asked) == ExitCode.OK
    assert launcher.commands == []
    assert table in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            ["--variant", "a:", "algo=espo", "optimizer.lr=0"],
            "optimizer.lr: 0.0003 there, 0.0 asked for",
        ),
        (["--variant", "a:", "algo=grpo"], "algo.name: espo there, grpo asked for"),
        (
            ["--common", "train.total_steps=21", "--variant", "a:", "algo=espo"],
            "train.total_steps: 20 there, 21 asked",
        ),
        (
            ["--experiment", "smoke", "--variant", "a:", "algo=espo"],
            "data.source: column_addition there, two_digit_ad",
        ),
    ],
)
def test_a_complete_run_of_another_configuration_is_not_relabelled(
    compare: Compare,
    launcher: Launcher,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    asked: list[str],
    told: str,
) -> None:
    complete(tmp_path, "a-seed1", "algo=espo", "seed=1")
    assert compare("--seeds", "0,1", *asked) == ExitCode.REFUSED
    message = capsys.readouterr().err
    assert (
        "a-seed1 holds a complete run of another configuration" in message
        and "Give another --out" in message
    )
    assert told in message
    assert launcher.commands == []  # not even the run before it


def test_keys_that_only_one_configuration_has_are_a_difference(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = complete(tmp_path, "a-seed0", "seed=0")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("  warmup_steps: 5\n", "") + "extra: null\n")
    assert compare("--seeds", "0", "--variant", "a:") == ExitCode.REFUSED
    message = capsys.readouterr().err
    assert "optimizer.warmup_steps: nothing there, 5 asked for" in message
    assert "extra: null there, nothing asked for" in message


def test_a_run_on_another_number_of_ranks_is_another_run(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = complete(tmp_path, "a-seed0", "seed=0", ranks=2)
    assert compare("--seeds", "0", "--variant", "a:") == ExitCode.REFUSED
    assert "number of ranks: 2 there, 1 asked for" in capsys.readouterr().err
    (run / "versions.json").write_text("{")
    assert compare("--seeds", "0", "--variant", "a:") == ExitCode.REFUSED
    assert "a-seed0/versions.json is damaged" in capsys.readouterr().err


def test_where_a_run_is_makes_no_difference(
    compare: Compare, launcher: Launcher, tmp_path: Path
) -> None:
    complete(tmp_path, "a-seed0", "seed=0", "run.save_weights=false")
    assert compare("--seeds", "0", "--variant", "a:") == ExitCode.OK
    assert launcher.commands == []


@pytest.mark.parametrize("code", [4, 130, None])
def test_an_interrupted_comparison_goes_on(
    compare: Compare, launcher: Launcher, tmp_path: Path, code: int | None
) -> None:
    complete(tmp_path, "a-seed0", "seed=0", accuracies=(0.25, 1.0))
    complete(tmp_path, "a-seed1", "seed=1", "optimizer.lr=1", code=code)
    assert compare("--seeds", "0,1", "--variant", "a:") == ExitCode.OK
    (command,) = launcher.commands
    assert {"seed=1", "run.on_existing=overwrite_failed"} < set(command)
    assert "| a | 0 | 0.250 | 1.000" in (tmp_path / "out" / "table.md").read_text()
    assert "| a | 1 | 0.250 | 0.500" in (tmp_path / "out" / "table.md").read_text()


def test_a_run_under_way_is_left_alone(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = complete(tmp_path, "a-seed1", "seed=1", code=None)
    with hold_run(run):
        assert compare("--seeds", "0,1", "--variant", "a:") == ExitCode.REFUSED
    assert "a-seed1 is a run under way" in capsys.readouterr().err
    assert launcher.commands == []


def test_a_run_that_fails_ends_the_comparison_with_its_code_and_reason(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complete(tmp_path, "a-seed0", "seed=0")
    launcher.code = 4
    assert compare("--seeds", "0,1,2", "--variant", "a:") == 4
    assert (
        "a-seed1 failed (exit code 4): an engine died\nThe same command goes on here"
        in capsys.readouterr().err
    )
    assert len(launcher.commands) == 1
    launcher.code = None
    assert compare("--seeds", "0,1,2", "--variant", "a:") == 1
    assert "a-seed1 failed (exit code 1): it left no exit.json" in capsys.readouterr().err


def test_a_run_that_trained_something_else_is_not_reported(
    compare: Compare, launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.other = ["optimizer.lr=0.5"]
    assert compare("--seeds", "0", "--variant", "a:") == ExitCode.REFUSED
    assert "optimizer.lr: 0.5 there, 0.0003 asked for" in capsys.readouterr().err


def test_ctrl_c_ends_the_run_and_says_how_to_go_on(
    compare: Compare, launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def once() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    launcher.during = once
    assert compare("--seeds", "0", "--variant", "a:") == ExitCode.INTERRUPTED
    assert len(calls) == 2, "its end is waited for"
    assert "interrupted. The same command goes on here" in capsys.readouterr().err


def test_the_number_of_ranks_reaches_the_rules_and_the_run(
    compare: Compare,
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert compare("--seeds", "0", "--variant", "a:", "parallel=ep2") == ExitCode.REFUSED
    said = capsys.readouterr().err
    assert "--variant a, seed 0: parallel.ep=2: " in said and "1 setting is refused" in said
    monkeypatch.setattr(
        "tests.support.past_runs.compose",
        lambda overrides: compose(overrides, facts=LaunchFacts(2, 2)),
    )
    assert compare("--nproc", "2", "--seeds", "0", "--variant", "a:", "parallel=ep2") == ExitCode.OK
    assert "--nproc-per-node=2" in launcher.commands[0]
    monkeypatch.setenv("NPROC", "2")
    assert compare("--seeds", "0", "--variant", "a:", "parallel=ep2") == ExitCode.OK


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--variant", "a", "algo=espo"], "a variant begins with its name and a colon"),
        (["--variant", "a:algo=espo"], "--variant a: key=value"),
        (["--variant", "a/b:"], "the name becomes a directory's"),
        (["--variant", ":"], "the name becomes a directory's"),
        (["--variant", f"{'a' * 130}:"], "Must have at most 128 characters"),
        (["--variant", "a:", "--variant", "a@1:"], "another one has this name"),
        (["--variant", "a@one:"], "'one' is not a seed: give whole numbers with commas"),
        (["--variant", "a@:"], "'' is not a seed"),
        (["--variant", "a:", "seed=1"], "seed is set by --seeds. Leave it out"),
        (
            ["--common", "run.name=x", "--variant", "a:"],
            "--common: run.name=x: run.name is set by the variant's name",
        ),
        (["--variant", "a:", "++run.root=x"], "run.root is set by --out"),
        (["--variant", "a:", "algo=nothing"], "algo=nothing: There is no such file"),
        (["--variant", "a:", "optimizer.lr=fast"], "optimizer.lr=fast: Must be a number"),
        (
            ["--experiment", "nothing", "--variant", "a:"],
            "experiment=nothing: There is no such file",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(
    compare: Compare,
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    asked: list[str],
    told: str,
) -> None:
    assert compare(*asked) == ExitCode.REFUSED
    assert told in capsys.readouterr().err
    assert launcher.commands == []


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([], "the following arguments are required: --variant"),
        (["--seeds", "0,,1", "--variant", "a:"], "'' is not a seed"),
        (["--seeds", "-1", "--variant", "a:"], "--seeds"),
        (["--seeds", "4294967296", "--variant", "a:"], "'4294967296' is not a seed"),
        (["--seeds", "1,1", "--variant", "a:"], "names a seed twice"),
        (
            ["--nproc", "0", "--variant", "a:"],
            "'0' is not a number of ranks: give a whole number from 1",
        ),
        (
            ["--parallel", "two", "--variant", "a:"],
            "'two' is not a number of runs: give a whole number from 1",
        ),
        (
            ["--equal-accuracy", "60", "--variant", "a:"],
            "'60' is not an accuracy: give a number between 0 and 1",
        ),
        (["--search-seeds", "x", "--variant", "a:"], "'x' is not a seed"),
        (["--variants", "a:"], "--variant"),
    ],
)
def test_arguments_that_are_none_are_refused(
    compare: Compare, capsys: pytest.CaptureFixture[str], asked: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        compare(*asked)
    assert refused.value.code == ExitCode.REFUSED
    assert told in capsys.readouterr().err


def test_a_damaged_run_is_named(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = complete(tmp_path, "a-seed0", "seed=0")
    (run / "metrics.jsonl").write_text("{\n")
    assert compare("--seeds", "0", "--variant", "a:") == ExitCode.REFUSED
    assert "a-seed0/metrics.jsonl line 1 is damaged" in capsys.readouterr().err
    (run / "config.yaml").unlink()
    assert compare("--seeds", "0", "--variant", "a:") == ExitCode.REFUSED
    assert "a-seed0 holds no config.yaml" in capsys.readouterr().err


def test_a_place_where_nothing_can_be_written_is_told(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complete(tmp_path, "a-seed0", "seed=0")
    (tmp_path / "out" / "table.md").mkdir()
    assert compare("--seeds", "0", "--variant", "a:") == ExitCode.CANNOT_WRITE
    assert "table.md cannot be written" in capsys.readouterr().err


def test_sigterm_ends_all_runs_too() -> None:
    """With real processes, which hear only what this one tells them."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)
    ]
    jobs = [SimpleNamespace(process=process) for process in processes]
    with (
        pytest.raises(SystemExit) as ended,
        training.ended_by_sigterm(),
        training._ending_with_us(jobs),
    ):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == ExitCode.TERMINATED
    assert [process.returncode for process in processes] == [-signal.SIGTERM] * 2


def test_several_runs_at_a_time_have_an_output_each(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    under_way = []
    launcher.during = lambda: under_way.append(len(launcher.commands))
    assert compare("--parallel", "2", "--seeds", "0,1,2", "--variant", "a:") == ExitCode.OK
    assert under_way == [2, 3, 3], "two from the start, and the third as soon as one has ended"
    logs = [Path(streams["stdout"].name).name for streams in launcher.streams]
    assert logs == ["a-seed0.log", "a-seed1.log", "a-seed2.log"]
    assert "train_rl.py" in (tmp_path / "out" / "logs" / "a-seed1.log").read_text()
    assert "a-seed2: complete" in capsys.readouterr().out


def test_after_a_failure_no_run_is_started_and_those_under_way_are_kept(
    compare: Compare, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.outcome = lambda overrides: {"code": 4 if "seed=0" in overrides else 0}
    launcher.commands = []

    def one_failed(timeout: float | None = None) -> int:
        launcher.returncode = 0
        return 0

    launcher.wait = one_failed  # type: ignore[method-assign]
    assert compare("--parallel", "2", "--seeds", "0,1,2,3", "--variant", "a:") == 4
    assert launcher.names == ["a-seed0", "a-seed1"]
    assert "| a | 1 |" in (tmp_path / "out" / "table.md").read_text()
    said = capsys.readouterr().err
    assert "a-seed0 failed (exit code 4)" in said and "logs/a-seed0.log" in said
    launcher.commands.clear()
    launcher.outcome = lambda overrides: {"code": 0}
    assert compare("--parallel", "2", "--seeds", "0,1,2,3", "--variant", "a:") == ExitCode.OK
    assert launcher.names == ["a-seed0", "a-seed2", "a-seed3"]


def test_help_shows_a_command_that_works(tmp_path: Path) -> None:
    done = start_script("compare_runs", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--variant espo: algo=espo" in done.stdout and "goes on" in done.stdout
