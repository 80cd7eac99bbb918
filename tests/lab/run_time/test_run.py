"""Simulated runs against times worked out by hand, and rules that hold for all of them."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.engines.on_update import InterruptResponses, WaitForResponses
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from tests.lab.run_time.simulation import cluster as cluster_module
from tests.lab.run_time.simulation.cluster import Machines, Slowdown
from tests.lab.run_time.simulation.engine import EngineSpeed
from tests.lab.run_time.simulation.lengths import LogNormalLengths, TraceLengths, Workload
from tests.lab.run_time.simulation.run import SimulatedRun, TrainerSpeed, simulate

# A pass takes a second: n tokens take n seconds, because reading gives the first one.
ENGINE = Machines(speed=EngineSpeed(step=1.0))
TRAINER = TrainerSpeed(step=4.0, sync=1.0)
TEN_TOKENS = TraceLengths([[[10], [10]]], prompt_tokens=3)


def make_settings(
    max_staleness: int, on_update: Literal["wait", "resume"] = "wait"
) -> RolloutSettings:
    return RolloutSettings(max_new_tokens=12, max_staleness=max_staleness, on_update=on_update)


def step_seconds(run: SimulatedRun) -> list[float]:
    return [round(step.seconds, 6) for step in run.steps]


def test_nothing_ahead_is_the_sum_of_the_parts() -> None:
    run = simulate(make_settings(0), TEN_TOKENS, ENGINE, TRAINER, 3)
    assert step_seconds(run) == [15, 15, 15]
    assert run.busy_seconds == pytest.approx(30)


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_wait_takes_the_slower_of_both(max_staleness: int) -> None:
    run = simulate(make_settings(max_staleness), TEN_TOKENS, ENGINE, TRAINER, 4)
    # Nothing is sampled while the last step trains
    assert step_seconds(run) == [10 + 10 + 1, 11, 11, 5]
    assert [dict(step.ages) for step in run.steps] == [{0: 20}, {1: 20}, {1: 20}, {1: 20}]
    slow = simulate(make_settings(1), TEN_TOKENS, ENGINE, replace(TRAINER, step=40.0), 4)
    assert step_seconds(slow) == [51, 41, 41, 41]


def test_a_sync_waits_for_requests_that_no_engine_has_yet() -> None:
    slow = replace(ENGINE, speed=EngineSpeed(step=1.0, dispatch=5.0))
    quick = replace(TRAINER, step=1.0)
    run = simulate(make_settings(1), TEN_TOKENS, slow, quick, 4)
    # A step is trained when the next one has not reached the engine.
    assert step_seconds(run) == [2 * (5 + 10) + 1, 5 + 10 + 1, 5 + 10 + 1, 1 + 1]


def test_resume_continues_responses_after_the_sync() -> None:
    run = simulate(make_settings(1, "resume"), TEN_TOKENS, ENGINE, TRAINER, 6)
    # Steps 1 and 2 are sampled together. Step 3 gets four tokens while step 2 trains, and six
    # together with step 4, whose last four tokens are sampled while step 3 trains.
    assert step_seconds(run) == [15, 5, 11, 5, 11, 5]
    assert [dict(step.ages) for step in run.steps] == [
        {0: 20},
        {1: 20},
        {1: 8, 0: 12},
        {1: 20},
        {1: 8, 0: 12},
        {1: 20},
    ]


def test_an_interruption_takes_its_time() -> None:
    slow = replace(TRAINER, step=4.5, interrupt=2.0)
    run = simulate(make_settings(1, "resume"), TEN_TOKENS, ENGINE, slow, 6)
    # Nothing is open when steps 1 and 6 have trained. The others end in the middle of a pass.
    assert step_seconds(run) == [15.5, 8, 13, 8, 13, 5.5]


@pytest.mark.slow
def test_a_simulation_needs_no_torch() -> None:
    code = "import tests.lab.run_time.simulation.run, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_both_are_slower_while_they_share_a_machine() -> None:
    shared_machines = replace(ENGINE, slowdowns=[Slowdown(1.0, 1.0)])
    run = simulate(make_settings(1), TEN_TOKENS, shared_machines, TRAINER, 4)
    # Training takes 8 s. The engine has done 4 s of its work then, and needs 6 s more.
    assert step_seconds(run) == [10 + 14 + 1, 15, 15, 5]
    alone = simulate(make_settings(0), TEN_TOKENS, shared_machines, TRAINER, 3)
    assert step_seconds(alone) == [15, 15, 15]


def test_each_step_has_its_own_slowdown() -> None:
    machines = replace(ENGINE, slowdowns=[Slowdown(), Slowdown(1.0, 0.0), Slowdown(0.0, 2.0)])
    run = simulate(make_settings(1), TEN_TOKENS, machines, TRAINER, 6)
    # A slow engine has done 2 s of its work after 4 s. A slow trainer needs 10 s for 3.33 s.
    assert step_seconds(run) == pytest.approx([21, 4 + 8 + 1, 10 + 2 / 3 + 1, 11, 13, 5])


def test_a_trainer_is_as_fast_as_ever_once_the_engine_is_done() -> None:
    shared_machines = replace(ENGINE, slowdowns=[Slowdown(1.0, 1.0)])
    run = simulate(make_settings(1), TEN_TOKENS, shared_machines, replace(TRAINER, step=40.0), 4)
    # The engine needs 20 s, in which 10 s of training are done.
    assert step_seconds(run)[1] == 20 + 30 + 1


def test_training_takes_time_for_each_token() -> None:
    trace = TraceLengths([[[10]], [[6]]], prompt_tokens=3)
    run = simulate(make_settings(0), trace, ENGINE, TrainerSpeed(token=0.5), 3)
    assert step_seconds(run) == [15, 9, 15]


@pytest.mark.parametrize(
    ("choice", "num_steps", "text"),
    [
        (make_settings(0, "resume"), 4, "max_staleness of at least 1"),
        (make_settings(4), 4, "too short"),
    ],
)
def test_settings_that_a_run_refuses(choice: RolloutSettings, num_steps: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        simulate(choice, TEN_TOKENS, ENGINE, TRAINER, num_steps)


@pytest.mark.parametrize(
    ("rule", "choice"),
    [
        (WaitForResponses, make_settings(1)),
        (InterruptResponses, make_settings(1, "resume")),
    ],
)
def test_a_sync_that_holds_nothing_is_found(
    rule: type, choice: RolloutSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "before_sync", lambda self, source: 0)
    with pytest.raises(RuntimeError, match="gets other weights"):
        simulate(choice, TEN_TOKENS, ENGINE, TRAINER, 6)


def test_a_step_that_begins_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_two_more(self: StepsAhead, step: int, last: int, source: Any) -> None:
        for ahead_step in range(step, min(step + 3, last) + 1):
            if not self.has_begun(ahead_step, source):
                source.begin_step(ahead_step)

    monkeypatch.setattr(StepsAhead, "begin_open", begin_two_more)
    with pytest.raises(RuntimeError, match="of age 2"):
        simulate(make_settings(1, "resume"), TEN_TOKENS, ENGINE, TRAINER, 6)


def test_other_slots_give_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = TraceLengths([[[9, 1, 9, 1, 9, 1, 9, 1]]], prompt_tokens=1)
    machines = Machines(speed=EngineSpeed(step=1.0), engines=2, max_running=1)
    before = simulate(make_settings(0), lengths, machines, TRAINER, 2)
    monkeypatch.setattr(cluster_module, "slots_of_engine", lambda max_running: 4 * max_running)
    after = simulate(make_settings(0), lengths, machines, TRAINER, 2)
    assert step_seconds(before) != step_seconds(after)


WAYS = [
    make_settings(0),
    make_settings(1),
    make_settings(3),
    make_settings(1, "resume"),
    make_settings(3, "resume"),
]
NUM_STEPS = 6
seconds = st.sampled_from([0.0, 0.003, 0.1, 2.0])
lengths = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=1, max_size=4)
traces = st.builds(
    TraceLengths, st.lists(lengths, min_size=1, max_size=3), prompt_tokens=st.integers(1, 5)
)
speeds = st.builds(
    EngineSpeed,
    step=st.sampled_from([0.01, 1.0]),
    request=seconds,
    kv_token=seconds,
    prompt_token=seconds,
    dispatch=seconds,
)
slowdown_kinds = st.builds(Slowdown, st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.3]))
machine_kinds = st.builds(
    Machines,
    speed=speeds,
    engines=st.integers(1, 3),
    node_engines=st.integers(1, 2),
    max_running=st.integers(1, 4),
    kv_tokens=st.sampled_from([math.inf, 20, 30]),
    slowdowns=st.lists(slowdown_kinds, min_size=1, max_size=3),
)
trainers = st.builds(TrainerSpeed, step=seconds, token=seconds, sync=seconds, interrupt=seconds)


def least_seconds(workload: Workload, machines: Machines, trainer: TrainerSpeed) -> float:
    """Seconds that no way to sample ahead can beat.

    Either the trainer works all the time, or every engine gives a token to as many responses as it
    can run. Nothing is sampled during a sync. A token costs at least a share of a pass, and the
    less of decoding it and of reading everything before it.
    """
    speed = machines.speed
    sampling = training = 0.0
    for step in range(1, NUM_STEPS + 1):
        all_lengths = [length for group in workload.lengths(step) for length in group]
        training += trainer.step + trainer.token * sum(all_lengths)
        sampling += sum(all_lengths) * speed.step / machines.max_running
        for length in all_lengths:
            contexts = workload.prompt_tokens + np.arange(length)
            reading = speed.prompt_token * contexts
            decoding = speed.request + speed.kv_token * contexts
            sampling += float(reading[0] + np.minimum(reading, decoding)[1:].sum())
    return max(sampling / machines.engines, training) + NUM_STEPS * trainer.sync


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(choice=st.sampled_from(WAYS), workload=traces, machines=machine_kinds, trainer=trainers)
def test_every_token_is_sampled_once_in_time(
    choice: RolloutSettings, workload: TraceLengths, machines: Machines, trainer: TrainerSpeed
) -> None:
    run = simulate(choice, workload, machines, trainer, NUM_STEPS)
    check_tokens(run, workload)
    assert max(max(step.ages) for step in run.steps) <= choice.max_staleness
    least = least_seconds(workload, machines, trainer)
    assert run.steps[-1].end >= least * (1 - 1e-9)
    prompts = workload.prompt_tokens * len(run.responses)
    assert run.num_read >= prompts
    if choice.on_update == "wait" and not run.num_retractions:
        assert run.num_read == prompts
    assert simulate(choice, workload, machines, trainer, NUM_STEPS).steps == run.steps


def check_tokens(run: SimulatedRun, workload: Workload) -> None:
    """Every response of every step has all its tokens, and engines sampled no others."""
    keys = [response.key for response in run.responses]
    assert len(set(keys)) == len(keys)
    num_tokens = 0
    for step in range(1, NUM_STEPS + 1):
        num_tokens += sum(map(sum, workload.lengths(step)))
    assert run.num_sampled == num_tokens == sum(step.tokens for step in run.steps)
    for response in run.responses:
        assert response.num_tokens == response.length == response.by_version.total()
    assert all(sum(step.ages.values()) == step.tokens for step in run.steps)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(workload=traces, machines=machine_kinds, trainer=trainers)
def test_wait_is_the_bound_and_none_ahead_is_the_sum(
    workload: TraceLengths, machines: Machines, trainer: TrainerSpeed
) -> None:
    # Late binding delays some requests of a step that nothing is sampled ahead of
    machines = replace(machines, slowdowns=[Slowdown()], binds_late=False)
    alone = simulate(make_settings(0), workload, machines, trainer, NUM_STEPS)
    sampling = [step.taken_at - step.start for step in alone.steps]
    training = [trainer.step + trainer.token * step.tokens for step in alone.steps]
    for index, step in enumerate(alone.steps):
        assert step.seconds == pytest.approx(sampling[index] + training[index] + trainer.sync)
    ahead = simulate(make_settings(1), workload, machines, trainer, NUM_STEPS)
    for index, step in enumerate(ahead.steps[1:-1], start=1):
        slower = max(sampling[index + 1], training[index])
        assert step.seconds == pytest.approx(slower + trainer.sync)


def test_lengths_have_the_distribution() -> None:
    lengths = LogNormalLengths(
        prompts=4000,
        samples=2,
        median=1000,
        spread=0.8,
        between_prompts=0.6,
        cap=10**6,
        prompt_tokens=1,
        seed=3,
    )
    logs = np.log(np.array(lengths.lengths(2)))
    assert np.median(np.exp(logs)) == pytest.approx(1000, rel=0.05)
    assert logs.std() == pytest.approx(0.8, rel=0.05)
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(0.6, abs=0.05)
    assert lengths.lengths(2) == lengths.lengths(2) != lengths.lengths(3)
    short = replace(lengths, cap=900)
    assert max(max(group) for group in short.lengths(1)) == 900


@pytest.mark.parametrize("change", [{"prompts": 0}, {"between_prompts": 1.5}, {"spread": -1.0}])
def test_lengths_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    values = {"prompts": 1, "samples": 1, "median": 9, "spread": 1.0, "between_prompts": 0.5}
    with pytest.raises(ValueError, match="must be"):
        LogNormalLengths(**{**values, "cap": 9, "prompt_tokens": 1, "seed": 0, **change})


@pytest.mark.parametrize("steps", [[], [[[]]], [[[0]]]])
def test_a_trace_without_tokens_is_refused(steps: list[list[list[int]]]) -> None:
    with pytest.raises(ValueError, match="a trace needs"):
        TraceLengths(steps, prompt_tokens=1)


@pytest.mark.parametrize(
    "change",
    [
        {"engines": 0},
        {"max_running": 0},
        {"kv_tokens": 0},
        {"slowdowns": []},
        {"slowdowns": [Slowdown(), Slowdown(trainer=-1.0)]},
    ],
)
def test_machines_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|need at least"):
        replace(ENGINE, **change)
