"""The ladder's workload and table, and a small ladder of real engines."""

import pytest

from tests.lab.run_time.parts import PARTS
from tests.lab.throughput_ladder.__main__ import main, parse_arguments, table
from tests.lab.throughput_ladder.rungs import RUNGS, StepResult
from tests.lab.throughput_ladder.workload import Workload
from tests.support.intervals import half_width


def test_a_step_is_the_same_for_every_rung_and_differs_by_seed() -> None:
    workload = Workload()
    assert workload.responses(3) == workload.responses(3)
    assert workload.responses(3) != workload.responses(4)


def test_lengths_end_at_the_cap_and_history_follows_the_prompt() -> None:
    responses = Workload(prompts=200, cap=600).responses(0)
    assert max(response.length for response in responses) == 600
    assert min(response.length for response in responses) >= 1
    long_half = [r.length for r in responses if r.history > 40]
    short_half = [r.length for r in responses if r.history <= 40]
    assert sum(long_half) / len(long_half) > 2 * sum(short_half) / len(short_half)


def test_without_spread_all_lengths_are_the_median() -> None:
    responses = Workload(spread=0.0).responses(0)
    assert {(response.length, response.history) for response in responses} == {(40, 40)}


def test_speed_ups_are_of_the_same_step() -> None:
    """Ratios 2 and 4: mean 3, deviation sqrt(2), t of one degree of freedom 12.71."""
    seconds = {"baseline": (8.0, 4.0), "other": (4.0, 1.0)}
    results = {
        name: [StepResult(value, "digest") for value in values] for name, values in seconds.items()
    }
    lines = list(table(results, {"baseline": 1.0, "other": 2.7}))
    assert lines[2] == "| baseline | 6.00 | 1.00 ± 0.00 | 1.00 | +0.0% |  |"
    assert lines[3] == "| other | 2.50 | 3.00 ± 12.71 | 2.70 | -10.0% |  |"


def test_the_interval_shrinks_with_more_steps() -> None:
    assert half_width([1.0, 2.0] * 20) < half_width([1.0, 2.0] * 4)


@pytest.mark.parametrize(
    "option", ["--seeds=0", "--rounds=0", "--max-running=0", "--scorers=0", "--runs=2"]
)
def test_a_count_that_is_too_small_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([option])
    assert option in capsys.readouterr().err


def test_one_step_is_refused_because_it_has_no_interval() -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--seeds=1", "--rounds=1"])


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_rungs_sample_the_same(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seeds=1", "--rounds=2", "--prompts=4", f"--dtype={dtype}", "--scoring-ms=1"]
    assert main([*arguments, "--small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(RUNGS) + 1 + 2 + len(PARTS)


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_ladder_whose_engines_lack_the_plugin_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    with pytest.raises(SystemExit, match="the plugin narrow_routes does not run there"):
        main(["--seeds=1", "--rounds=2", "--prompts=4"])
