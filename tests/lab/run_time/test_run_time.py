"""`python -m tests.lab.run_time`: constants that were planted, and its tables."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.records.past_run import RunUnreadable
from megatron_rl.records.run_directory import to_yaml
from megatron_rl.records.timeline.spans import TIMELINE_FILE, Lane, Timeline
from tests.lab.run_time import __main__ as command
from tests.lab.run_time import clusters, measurement, orders
from tests.lab.run_time.clusters import SMALL, cluster_table, measure_gain, sampling_seconds
from tests.lab.run_time.fit import (
    PROMPT_TOKENS,
    Constants,
    alone_seconds,
    fit,
    fit_engine,
    simulator,
    slowdown_of,
    split,
)
from tests.lab.run_time.measured_run import FIRST_STEP, CannotFit, read_run
from tests.lab.run_time.measurement import PLAN, PlannedRun
from tests.lab.run_time.simulation.cluster import Machines, Slowdown
from tests.lab.run_time.simulation.engine import EngineSpeed, Response
from tests.lab.run_time.simulation.lengths import TraceLengths
from tests.lab.run_time.simulation.run import SimulatedRun, TrainerSpeed, simulate
from tests.lab.run_time.validation import Comparison, compare, comparison_table
from tests.support.configurations import configuration_of

SPEED = EngineSpeed(
    step=0.01, request=3e-5, kv_token=2e-7, prompt_token=8e-5, dispatch=0.1, arrival=1e-3
)
TRAINER = TrainerSpeed(step=0.2, token=1.5e-4, sync=0.1, interrupt=0.6)
MACHINES = Machines(speed=SPEED, slowdowns=[Slowdown(0.3, 0.2)])
NUM_STEPS = 8

pytestmark = pytest.mark.slow


def make_lengths(prompts: int, seed: int) -> TraceLengths:
    """Lengths of 16 to 32 tokens, the same for all samples of a prompt."""
    random = np.random.default_rng(seed)
    steps = random.integers(16, 33, (NUM_STEPS, prompts)).tolist()
    return TraceLengths([[[n] * 4 for n in step] for step in steps], PROMPT_TOKENS)


@cache
def composed(*overrides: str) -> Configuration:
    settings = [
        "experiment=quickstart",
        "parallel=single",
        "eval.every=0",
        "rollout.samples_per_prompt=4",
        f"train.total_steps={NUM_STEPS}",
    ]
    return configuration_of([*settings, *overrides])


def configure(*, seed: int = 0, max_running: int, **rollout: Any) -> Configuration:
    """The configuration of a run with other values in its section `rollout`."""
    base = composed()
    return replace(
        base,
        seed=seed,
        engine=replace(base.engine, max_running_requests=max_running),
        rollout=replace(base.rollout, **rollout),
    )


def write_run(directory: Path, configuration: Configuration) -> Path:
    """Write the directory of a run as long as its simulation with the planted constants."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(to_yaml(configuration))
    (directory / "versions.json").write_text("{}")
    lengths = make_lengths(configuration.rollout.prompts_per_step, configuration.seed)
    machines = replace(MACHINES, max_running=configuration.engine.max_running_requests)
    run = simulate(configuration.rollout, lengths, machines, TRAINER, NUM_STEPS)
    write_records(directory, run, configuration.rollout.max_staleness)
    return directory


def write_records(directory: Path, run: SimulatedRun, ahead: int) -> None:
    """Write the records of a run. ahead: steps by which the requests of a step precede it."""
    clock = [0.0]
    records: list[dict[str, float]] = [{"step": 0}]
    with Timeline(directory / TIMELINE_FILE, print, lambda: clock[0]) as timeline:
        timeline.add(Lane.RANKS, "sync", 0.0)
        for step in run.steps:
            begin = run.steps[max(0, step.step - 1 - ahead)].start
            add_groups(timeline, clock, groups_of(run, step.step), step.step, begin)
            clock[0] = step.trained_at
            timeline.add(Lane.RANKS, "train", clock[0] - step.taken_at, step=step.step)
            clock[0] = step.end
            timeline.add(Lane.RANKS, "sync", step.end - step.rest_at)
            next_rollouts = step.rest_at - step.trained_at
            records.append({"step": step.step, "time/next_rollouts": next_rollouts})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(text)


def add_groups(
    timeline: Timeline,
    clock: list[float],
    groups: dict[int, list[Response]],
    step: int,
    begin: float,
) -> None:
    """Write the groups of a step, which were requested at `begin`."""
    for index, responses in groups.items():
        clock[0] = max(response.end for response in responses)
        tokens = sum(response.length for response in responses)
        name = f"step-{step}-{index}"
        timeline.add(Lane.ROLLOUTS, name, clock[0] - begin, step=step, tokens=tokens)


def groups_of(run: SimulatedRun, step: int) -> dict[int, list[Response]]:
    """The responses of a step by prompt."""
    groups: dict[int, list[Response]] = {}
    for response in run.responses:
        if response.key[0] == step:
            groups.setdefault(response.key[1], []).append(response)
    return groups


@pytest.fixture(scope="module")
def prompts() -> int:
    """The prompts of a step, and the responses that an engine runs at a time.

    With fewer, the processor's rounding decides the time of a prompt's token in a fit.
    """
    return 64


@pytest.fixture(scope="module")
def fit_runs(prompts: int, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("fit")

    def write(name: str, num_prompts: int, max_running: int = prompts, **rollout: Any) -> Path:
        configuration = configure(max_running=max_running, prompts_per_step=num_prompts, **rollout)
        return write_run(root / name, configuration)

    return [
        write("alone", prompts),
        write("alone-half", prompts // 2),
        write("narrow", prompts, prompts // 4),
        write("wait", prompts, max_staleness=1),
        write("wait-half", prompts // 2, max_staleness=1),
        write("resume", prompts, max_staleness=1, on_update="resume"),
    ]


@pytest.fixture(scope="module")
def other_runs(prompts: int, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("others")

    def write(name: str, num_prompts: int, **rollout: Any) -> Path:
        configuration = configure(
            seed=1, max_running=prompts, prompts_per_step=num_prompts, **rollout
        )
        return write_run(root / name, configuration)

    return [
        write("alone", prompts),
        write("wait", prompts, max_staleness=1),
        write("most", prompts * 3 // 4, max_staleness=1),
        write("resume", prompts, max_staleness=2, on_update="resume"),
    ]


@pytest.fixture(scope="module")
def constants(fit_runs: Sequence[Path]) -> Constants:
    """The constants of all runs."""
    return fit([read_run(directory) for directory in fit_runs])


@pytest.fixture(scope="module")
def constants_alone(fit_runs: Sequence[Path]) -> Constants:
    """The constants of one run with max_staleness=0."""
    return fit([read_run(fit_runs[0])])


def test_fit_recovers_planted_constants(constants: Constants) -> None:
    # One may be a little larger if another one is a little smaller
    for name, tolerance in {"step": 0.1, "dispatch": 0.25, "prompt_token": 0.25}.items():
        value = getattr(SPEED, name)
        assert getattr(constants.speed, name) == pytest.approx(value, rel=tolerance), name
    assert constants.trainer.step == pytest.approx(TRAINER.step, rel=0.02)
    assert constants.trainer.token == pytest.approx(TRAINER.token, rel=0.02)
    assert constants.trainer.sync == pytest.approx(TRAINER.sync, rel=0.02)
    # Two runs with five pairs of a step and the next one
    assert len(constants.slowdowns) == 2 * (NUM_STEPS - FIRST_STEP - 1)
    for slowdown in constants.slowdowns:
        assert slowdown.engine == pytest.approx(0.3, rel=0.2)
        assert slowdown.trainer == pytest.approx(0.2, rel=0.05)
    mean = fmean(slowdown.engine for slowdown in constants.slowdowns)
    assert mean == pytest.approx(0.3, rel=0.05)
    # An engine ends its pass first
    assert TRAINER.interrupt <= constants.trainer.interrupt <= TRAINER.interrupt + 0.03
    assert constants.missing == ()


def test_each_step_shows_its_slowdowns(
    prompts: int, fit_runs: Sequence[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [Slowdown(0.1, 0.6), Slowdown(0.5, 0.1)]
    machines = replace(MACHINES, slowdowns=pairs)
    monkeypatch.setattr(sys.modules[__name__], "MACHINES", machines)
    alone = read_run(fit_runs[0])
    configuration = configure(max_running=prompts, prompts_per_step=prompts, max_staleness=1)
    ahead = read_run(write_run(tmp_path / "ahead", configuration))
    constants = fit([alone, ahead])
    for index, slowdown in enumerate(constants.slowdowns, start=FIRST_STEP - 1):
        assert slowdown == pytest.approx(pairs[index % 2], rel=0.2)
    simulate_run = simulator(constants, [alone, ahead])
    seconds = [run.seconds_a_step(FIRST_STEP) for run in simulate_run(ahead)]
    assert len(seconds) == len(constants.slowdowns)
    assert len(set(seconds)) > 1
    assert fmean(seconds) == pytest.approx(ahead.seconds_a_step, rel=0.04)
    assert len(simulate_run(alone)) == 1


def test_a_slowdown_has_limits() -> None:
    assert [slowdown_of(share) for share in (-9.0, 0.0, 0.5, 9.0)] == pytest.approx([-0.5, 0, 1, 9])


def test_other_runs_are_predicted(
    constants: Constants, fit_runs: Sequence[Path], other_runs: Sequence[Path]
) -> None:
    runs = [read_run(directory) for directory in fit_runs]
    others = [read_run(directory) for directory in other_runs]
    comparisons = compare(constants, runs, others)
    assert [item.is_fitted for item in comparisons] == [True] * 6 + [False] * 4
    assert max(abs(item.error) for item in comparisons) < 0.04
    lines = list(comparison_table(comparisons))
    assert lines[-1].startswith("Largest error of runs that were not fitted: ")


def test_an_error_is_that_of_the_simulation(other_runs: Sequence[Path]) -> None:
    run = read_run(other_runs[0])
    seconds = run.seconds_a_step
    assert Comparison([run], [1.1 * seconds], False).error == pytest.approx(0.1)
    slower_steps = [replace(step, end=2 * step.end) for step in run.steps]
    slower_run = replace(run, steps=slower_steps)
    assert slower_run.seconds_a_step == pytest.approx(2 * seconds)
    assert Comparison([run], [seconds], False).measured_error == run.standard_error
    simulations = [seconds, 2 * seconds]
    repeats = Comparison([run, slower_run, slower_run], simulations, False)
    assert repeats.measured_seconds == pytest.approx(5 / 3 * seconds)
    assert repeats.error == pytest.approx(-0.1)
    # The standard deviation of 1, 2, 2 is the root of 1/3
    assert repeats.measured_error == pytest.approx(seconds / 3)
    assert repeats.simulated_error == pytest.approx(seconds / 2)


def test_runs_that_differ_in_their_seeds_share_a_row(
    constants_alone: Constants, fit_runs: Sequence[Path], other_runs: Sequence[Path]
) -> None:
    alone, half, narrow, wait, wait_half, resume = (read_run(run) for run in fit_runs)
    alone_again, wait_again = (read_run(run) for run in other_runs[:2])
    comparisons = compare(constants_alone, [alone, wait, wait_again, alone_again], [alone])
    rows = [(item.runs, item.is_fitted) for item in comparisons]
    assert rows == [([alone, alone_again], True), ([wait, wait_again], True), ([alone], False)]
    longer = replace(alone, num_steps=9)
    assert not any(alone.repeats(run) for run in (half, narrow, wait, wait_half, resume, longer))


def test_constants_that_no_run_shows_are_named(
    constants_alone: Constants, fit_runs: Sequence[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["fit", "--runs", str(fit_runs[0])]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    guesses = [line.split(" | ")[0] for line in lines if "assumed: no run shows it" in line]
    assert guesses == ["| interrupt", "| engine_slowdown", "| trainer_slowdown"]
    assert constants_alone.slowdowns == (Slowdown(),)


def test_the_last_group_of_a_step_matters_most(tmp_path: Path) -> None:
    configuration = configure(max_running=64, prompts_per_step=64)
    run = read_run(write_run(tmp_path / "run", configuration))
    steps = []
    for step in run.steps[:2]:
        last = step.sampled_at
        groups = [replace(g, end=g.end * (1 if g.end == last else 0.8)) for g in step.groups]
        steps.append(replace(step, groups=groups))
    speed = fit_engine([replace(run, steps=steps)])
    for step in steps:
        assert alone_seconds(run, step, speed) == pytest.approx(step.sampled_at, rel=0.06)


def test_a_step_is_read_as_it_was(prompts: int, fit_runs: Sequence[Path]) -> None:
    run = read_run(fit_runs[0])
    assert [step.step for step in run.steps] == list(range(FIRST_STEP, NUM_STEPS))
    for step in run.steps:
        assert step.rest == pytest.approx(TRAINER.sync, abs=1e-5)
        seconds = TRAINER.step + TRAINER.token * step.tokens
        assert step.training == pytest.approx(seconds, abs=1e-5)
        assert step.tokens == sum(map(sum, make_lengths(prompts, 0).lengths(step.step)))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("eval.every=5", "eval.every"),
        ("engine.count=2", "engine.count"),
        ("selection=oversample", "selection.name"),
        ("run.checkpoint_every=3", "run.checkpoint_every"),
    ],
)
def test_a_run_that_does_more_is_refused(
    override: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", composed(override))
    assert command.main(["fit", "--runs", str(run)]) == ExitCode.REFUSED
    assert key in capsys.readouterr().err


def test_runs_that_cannot_be_fitted_are_refused(
    prompts: int, constants_alone: Constants, fit_runs: Sequence[Path], tmp_path: Path
) -> None:
    with pytest.raises(CannotFit, match="max_staleness=0"):
        fit([read_run(fit_runs[-2])])
    whole, half = (read_run(directory) for directory in fit_runs[:2])
    with pytest.raises(CannotFit, match=f"{prompts} prompts x 4 samples"):
        compare(constants_alone, [half], [whole])
    assert len(compare(constants_alone, [whole], [half])) == 2
    with pytest.raises(RunUnreadable, match="no such directory"):
        read_run(tmp_path / "nothing")
    short_run = write_run(tmp_path / "short", composed())
    records = (short_run / "metrics.jsonl").read_text().splitlines()[:4]
    (short_run / "metrics.jsonl").write_text("\n".join(records) + "\n")
    with pytest.raises(CannotFit, match="has 3 step"):
        read_run(short_run)
    (short_run / TIMELINE_FILE).unlink()
    (short_run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step}) + "\n" for step in range(8))
    )
    with pytest.raises(RunUnreadable, match=r"timeline\.jsonl cannot be read"):
        read_run(short_run)


def test_tokens_of_a_group_are_split_evenly() -> None:
    assert split(10, 4) == [3, 3, 2, 2]
    assert split(2, 3) == [1, 1, 1]


def test_planned_runs_are_accepted_and_check_what_was_not_fitted() -> None:
    for plan in PLAN:
        composed(*plan.settings)
    fitted_settings = {plan.settings for plan in PLAN if plan.is_fitted}
    assert fitted_settings.isdisjoint(plan.settings for plan in PLAN if not plan.is_fitted)
    assert PLAN[1].with_seed(3) == ("wait1-seed3", ("seed=3", "rollout.max_staleness=1"), True)
    other_settings = " ".join(" ".join(plan.settings) for plan in PLAN if not plan.is_fitted)
    for value in ("max_staleness=2", "on_update=resume"):
        assert value in other_settings


def test_planned_runs_are_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = []

    def write(directory: Path, plan: PlannedRun, num_steps: int) -> None:
        assert num_steps == NUM_STEPS
        names.append(plan.name)
        seed, *settings = plan.settings
        configuration = replace(composed(*settings), seed=int(seed.removeprefix("seed=")))
        write_run(directory / plan.name, configuration)

    monkeypatch.setattr(measurement, "train", write)
    planted = Constants(SPEED, TRAINER, tuple(MACHINES.slowdowns), missing=())
    monkeypatch.setattr(command, "fit", lambda runs: planted)
    options = ["measure", "--out", str(tmp_path), "--rounds", "2", "--steps", str(NUM_STEPS)]
    assert command.main(options) == ExitCode.OK
    table = capsys.readouterr().out
    first_names = [f"{plan.name}-seed0" for plan in PLAN]
    assert names == first_names + [f"{plan.name}-seed1" for plan in PLAN]
    assert all(f"| {name} |" in table for name in first_names)
    assert "-seed1" not in table
    assert command.main(options) == ExitCode.OK
    assert len(names) == 2 * len(PLAN)
    assert command.main([*options[:-1], "7"]) == ExitCode.REFUSED
    assert "8 steps instead of 7" in capsys.readouterr().err


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["measure", "--out", "runs/run_time", "--steps", "4"])
    assert "at least 5" in capsys.readouterr().err


def test_no_round_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["measure", "--out", "runs/run_time", "--rounds", "0"])
    assert "--rounds=0" in capsys.readouterr().err


def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    plan = PlannedRun("wrong", ("rollout.max_staleness=nonsense",), True)
    with pytest.raises(CannotFit, match="ended with code"):
        measurement.train(tmp_path, plan, 8)
    assert "max_staleness" in (tmp_path / "wrong.log").read_text()


def test_cluster_table_has_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["clusters", "--small"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if " x, " in line]
    assert len(rows) == len(SMALL.spreads) * len(clusters.WAYS)
    assert lines[0] == "| assumption | value | kind |"


def test_true_lengths_and_late_binding_cost_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["orders", "--small"]) == ExitCode.OK
    rows = [line.split("|")[4:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 2 * len(orders.WAVES) * len(SMALL.spreads)
    for cells in rows:
        nothing_late, *_, truth_late = (float(cell.split()[0]) for cell in cells)
        assert nothing_late >= 0.99
        assert truth_late > 1.0


def test_gains_stay_within_what_a_trainer_allows() -> None:
    bases = [sampling_seconds(SMALL, 0.8, seed) for seed in range(SMALL.seeds)]
    for share in clusters.SHARES:
        wait = measure_gain(SMALL, 0.8, bases, "wait", 1, share)
        assert np.allclose(wait.bound_shares, 1)
        assert all(1 < gain <= 2 for gain in wait.speed_ups)
        gain = measure_gain(SMALL, 0.8, bases, "resume", 4, share)
        assert max(gain.speed_ups) < 1 / share


def test_every_assumption_changes_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(SMALL, spreads=(0.8,), seeds=1)
    before = list(cluster_table(tiny))
    assert list(cluster_table(tiny)) == before
    changes = {
        "SPEED": replace(clusters.SPEED, kv_token=1e-5),
        "SYNC_SECONDS": 9.0,
        "INTERRUPT_SECONDS": 3.0,
    }
    for name, value in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(clusters, name, value)
            assert list(cluster_table(tiny)) != before, name
