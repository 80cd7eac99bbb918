"""The exposed time of rewards: its bar, its table, the scorer, and a small measurement."""

import pytest

from megatron_rl.contracts.prompt import Prompt
from tests.lab.throughput_ladder.exposed_rewards import (
    PROCESSES,
    SCORERS,
    Exposure,
    main,
    parse_arguments,
    table,
)
from tests.lab.throughput_ladder.scorer import Slow


def exposure(wait: float) -> Exposure:
    return Exposure(sampling=10.0, wait=wait, call=0.3, last_call=0.5)


def test_the_call_that_ended_last_does_not_count() -> None:
    assert exposure(0.4).beyond == 0.0
    assert exposure(1.5).beyond == pytest.approx(0.1)


def test_a_step_is_within_the_bar_up_to_a_twentieth_of_its_sampling() -> None:
    lines = list(table({("waits", 2): [exposure(0.5), exposure(1.0), exposure(1.1)]}))
    cells = lines[2].strip("| ").split(" | ")
    assert cells[:4] == ["waits", "2", "10.00", "0.3000"]
    assert cells[-1] == "2 of 3"


def test_a_twentieth_of_the_calls_take_ten_times_as_long() -> None:
    scorer = Slow(seconds=0.5, slow_share=0.05)
    prompts = [Prompt(id=f"q{i}", token_ids=(i,), answer="", task="t") for i in range(2000)]
    seconds = [scorer.seconds_for(prompt, "") for prompt in prompts]
    assert set(seconds) == {0.5, 5.0}
    assert 60 <= seconds.count(5.0) <= 140
    assert seconds == [scorer.seconds_for(prompt, "") for prompt in prompts]


@pytest.mark.parametrize("option", ["--engines=0", "--runs=2", "--rounds=0"])
def test_a_count_that_is_too_small_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([option])
    assert option in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_small_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds=1", "--rounds=2", "--prompts=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(SCORERS) * len(PROCESSES)
