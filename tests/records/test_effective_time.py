"""The share of a run's time that became steps which it kept."""

import math
from pathlib import Path

from megatron_rl.records.effective_time import EffectiveTime, is_time, open_effective_time
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.past_run import read_metrics
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.records.run_summary import summarize, summarize_run
from megatron_rl.records.starts import Start, write_starts
from tests.support.clocks import FakeClock


def test_steps_and_evaluations_count_and_checkpoints_and_starts_do_not() -> None:
    clock = FakeClock()
    start = clock()
    effective_time = EffectiveTime(start, clock=clock)
    clock.now += 40  # the start of the engines
    clock.now += 10
    assert effective_time.after(1, {"time/step": 10.0}) == 0.2
    clock.now += 50
    record = {"time/step": 20.0, "time/eval": 5.0, "time/eval/hard": 5.0, "time/checkpoint": 20.0}
    assert effective_time.after(2, record) == 0.4


def test_clocks_that_contradict_each_other_give_no_impossible_share() -> None:
    assert EffectiveTime(10.0, clock=lambda: 11.0).after(1, {"time/step": 5.0}) == 1.0
    assert math.isnan(EffectiveTime(10.0, clock=lambda: 9.0).after(1, {"time/step": 5.0}))


def test_a_resumed_run_counts_kept_steps_and_all_time_since_its_first_start(
    tmp_path: Path,
) -> None:
    write_starts(tmp_path, [Start(1000.0, 1), Start(5000.0, 2)])
    directory = RunDirectory(tmp_path)
    with MetricsLog(directory, effective_time=EffectiveTime(0.0)) as metrics:
        for seconds in (999.0, 100.0):  # of a step that was recorded twice, the last record counts
            metrics.write(1, {"time/step": seconds})
    effective_time = open_effective_time(tmp_path, clock=lambda: 1400.0)
    assert effective_time is not None
    with MetricsLog(directory, effective_time=effective_time) as metrics:
        metrics.write(2, {"time/step": 100.0})
    assert read_metrics(tmp_path)[-1]["run/effective_time"] == 0.5
    line = "effective training time 50% of the time since the first start"
    assert line in summarize_run(tmp_path).lines()


def test_a_directory_without_starts_measures_nothing(tmp_path: Path) -> None:
    assert open_effective_time(tmp_path) is None
    assert summarize([{"step": 1.0, "time/step": 1.0}]).effective_time is None


def test_it_is_a_time_where_runs_are_compared() -> None:
    assert [is_time(n) for n in ("run/effective_time", "time/step", "train/loss")] == [
        True,
        True,
        False,
    ]
