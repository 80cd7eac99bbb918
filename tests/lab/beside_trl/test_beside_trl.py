"""The table, the command line, the jobs and the clocks of the comparison, without TRL."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.lab.beside_trl.__main__ import parse_arguments, table
from tests.lab.beside_trl.environment import open_environment
from tests.lab.beside_trl.jobs import configure, our_job, trl_job
from tests.lab.beside_trl.step_cost import StepCost, measure, running_job

# Writes a record after each of six steps. From the second one on, a child works for 0.3 s in each.
_PROGRAM = """
import json, subprocess, sys, time
file = sys.argv[1]
work = "import time\\nwhile time.process_time() < 0.3: pass"
for step in range(6):
    if step:
        subprocess.run([sys.executable, "-c", work], check=True)
    with open(file, "a") as lines:
        lines.write(json.dumps({"step": step, "time/rollout": float(step)}) + chr(10))
time.sleep(60)
"""


def cost(wall: float, *, cpu: float = 1.0) -> StepCost:
    return StepCost(wall=wall, cpu=cpu, sampling=1.0, other_cores=0.0)


def test_ratios_are_of_the_same_round() -> None:
    """Ratios 2 and 4: mean 3, deviation sqrt(2), t of one degree of freedom 12.71."""
    lines = list(table([(cost(4.0), cost(8.0)), (cost(1.0), cost(4.0))]))
    assert lines[2].startswith("| TRL | 2.50 ± ")
    assert lines[3].startswith("| this trainer | 6.00 ± ")
    assert lines[4] == ("| this trainer / TRL | 3.00 ± 12.71 | 1.00 ± 0.00 | 1.00 ± 0.00 | |")


@pytest.mark.parametrize("option", ["--rounds=1", "--steps=0", "--ranks=0", "--trl-threads=0"])
def test_a_small_number_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([option])
    assert option in capsys.readouterr().err


def test_settings_stand_beside_options() -> None:
    options = parse_arguments(["--rounds=2", "train.replay=off", "--model=larger", "seed=3"])
    assert options.settings == ["train.replay=off", "seed=3"]
    assert (options.rounds, options.model) == (2, "larger")


def test_both_jobs_do_the_same_work(tmp_path: Path) -> None:
    settings = ["parallel.ep=2", "rollout.prompts_per_step=16", "train.optimizer_steps_per_batch=2"]
    configuration = configure(settings, ranks=2)
    job = trl_job(tmp_path, Path("/trl/bin/python"), configuration, steps=5)
    assert job.command[0] == "/trl/bin/python"
    numbers = json.loads(Path(job.command[-1]).read_text())
    assert (numbers["prompts"], numbers["samples"], numbers["steps"]) == (16, 8, 5)
    assert (numbers["optimizer_steps"], numbers["max_new_tokens"]) == (2, 32)
    assert len(numbers["rows"]) == 16 * 5
    ours = our_job(tmp_path, settings, ranks=2, steps=5)
    assert {*settings, "train.total_steps=5"} <= {*ours.command}


def test_another_algorithm_is_refused(tmp_path: Path) -> None:
    configuration = configure(["algo=espo"], ranks=1)
    with pytest.raises(SystemExit, match="algo"):
        trl_job(tmp_path, Path("python"), configuration, steps=1)


def test_an_environment_with_the_same_versions_stays(tmp_path: Path) -> None:
    """Nothing is installed: only the record is read."""
    pins = Path(__file__).parents[3] / "requirements/constraints.txt"
    lines = [line for line in pins.read_text().splitlines(True) if not line.startswith("triton==")]
    (tmp_path / "constraints.txt").write_text("".join(lines))
    assert open_environment(tmp_path) == tmp_path / "bin/python"


@pytest.mark.slow
def test_a_job_costs_the_time_of_its_children(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "metrics.jsonl")]
    with running_job(command, os.environ, log) as job:
        result = measure(job, tmp_path, warm_up=1, steps=3, log=log)
    assert job.poll() is not None
    assert result.sampling == 3.0
    assert 0.25 < result.cpu < 1.0
    assert result.wall > 0.2


@pytest.mark.slow
def test_a_job_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    with (
        pytest.raises(SystemExit, match=r"step 1 did not come: the job ended with 3"),
        running_job([sys.executable, "-c", "raise SystemExit(3)"], os.environ, log) as job,
    ):
        measure(job, tmp_path, warm_up=1, steps=1, log=log)
