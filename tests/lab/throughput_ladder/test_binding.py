"""The ratio of early to late binding, and a small measurement with two real nodes."""

import json

import pytest

from sglang_bridge.request import GenerateRequest, Sampling
from tests.lab.throughput_ladder import forced_collector
from tests.lab.throughput_ladder.binding import main, parse_arguments, table
from tests.lab.throughput_ladder.workload import Workload


def test_ratios_are_of_the_same_step() -> None:
    """Ratios 2 and 4: mean 3, deviation sqrt(2), t of one degree of freedom 12.71."""
    seconds = {
        ("unknown", "early"): [8.0, 4.0],
        ("unknown", "late"): [4.0, 1.0],
        ("by history", "early"): [3.0, 3.0],
        ("by history", "late"): [3.0, 3.0],
    }
    lines = list(table(seconds))
    assert lines[2] == "| unknown | 6.00 | 2.50 | 3.00 ± 12.71 |"
    assert lines[3] == "| by history | 3.00 | 3.00 | 1.00 ± 0.00 |"


def test_a_request_ends_at_the_length_of_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forced_collector.WORKLOAD, "4 1.2")
    responses = {r.name: r.length for r in Workload(prompts=4, spread=1.2).responses(7)}
    sampling = Sampling(max_new_tokens=600, temperature=1.0)
    requests = [
        GenerateRequest(name=f"7-{name}#{i};", input_ids=[1], sampling=sampling)
        for i, name in enumerate(("0/1", "3/7"))
    ]
    body = json.loads(forced_collector.encode(*requests))
    parameters = body["sampling_params"]
    assert [p["max_new_tokens"] for p in parameters] == [responses["0/1"], responses["3/7"]]
    assert all(p["ignore_eos"] for p in parameters)


def test_one_step_is_refused_because_it_has_no_interval() -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--seeds=1", "--rounds=1"])


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_all_ways_sample_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds=1", "--rounds=2", "--prompts=4", "--max-running=2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
