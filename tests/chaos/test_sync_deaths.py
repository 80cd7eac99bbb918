"""Trainers and engines that die at each phase of a weight update: nothing mixed is ever served.

The engines are plain processes. In test_engine_sync_deaths.py they are real.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_bridge.keys import RunKeys
from tests.chaos.sync_rank import (
    NAMES,
    PHASES,
    PHASES_OF_ALL,
    Job,
    tensors_of,
    version_of_death,
)
from tests.support.sync_ranks import Ranks
from tests.support.weight_receiver import ReceiverProcess, open_receivers

pytestmark = pytest.mark.chaos

KEYS = RunKeys("key", "admin-key")
SERVES_WITHIN_SECONDS = 20.0
# By what dies: a rank or an engine
DAILY_PHASES = {"rank 0": ("end",), "rank 1": ("bucket 2",), "engine": ("bucket 2",)}


def case_of(victim: str, phase: str, *values: object) -> Any:
    """A case of a phase, which is nightly unless the phase is a daily one."""
    marks = () if phase in DAILY_PHASES[victim] else (pytest.mark.nightly,)
    return pytest.param(phase, *values, marks=marks)


@pytest.fixture
def receivers(tmp_path: Path) -> Iterator[list[ReceiverProcess]]:
    with open_receivers(tmp_path, 2) as processes:
        yield processes


def checksums(version: int) -> dict[str, str]:
    job = Job(port=0, urls=[], versions=[], keys=KEYS)
    result = {}
    for rank in (0, 1):
        for name, tensor in tensors_of(job, version, rank).items():
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
            result[name] = f"{torch.float32} {digest}"
    assert sorted(result) == NAMES
    return result


def require_nothing_mixed(receiver: ReceiverProcess) -> list[str]:
    """Require that each state that was served is whole; returns the versions."""
    serving = receiver.state()["serving"]
    for state in serving:
        assert state["weights"] == checksums(int(state["version"]))
    return [state["version"] for state in serving]


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        *(case_of("rank 0", phase, 0) for phase in PHASES),
        *(case_of("rank 1", phase, 1) for phase in PHASES_OF_ALL),
    ],
)
def test_a_trainer_that_dies_leaves_engines_that_the_next_run_uses(
    tmp_path: Path, receivers: list[ReceiverProcess], phase: str, rank: int
) -> None:
    urls = [receiver.url for receiver in receivers]
    death = {"rank": rank, "version": version_of_death(phase), "phase": phase}
    ranks = Ranks(tmp_path, urls=urls, versions=[1, 2], keys=KEYS, **death)
    ranks.wait()
    assert any(line.startswith("DEATH") for line in ranks.lines)
    assert "DONE" not in ranks.lines
    for receiver in receivers:
        versions = require_nothing_mixed(receiver)
        assert versions == {"audit": ["1", "2"], "forming": []}.get(phase, ["1"])
    next_run = Ranks(tmp_path, urls=urls, versions=[3], keys=KEYS)
    next_run.wait()
    assert "DONE" in next_run.lines and next_run.failures == []
    assert next_run.time_of("SENT 3") - next_run.time_of("READY") < SERVES_WITHIN_SECONDS
    for receiver in receivers:
        assert require_nothing_mixed(receiver)[-1] == "3"


@pytest.mark.parametrize("phase", [case_of("engine", phase) for phase in PHASES])
def test_an_engine_that_dies_costs_its_own_lanes_only(
    tmp_path: Path, receivers: list[ReceiverProcess], phase: str
) -> None:
    victim, survivor = receivers
    ranks = Ranks(
        tmp_path,
        urls=[victim.url, survivor.url],
        versions=[1, 2, 3],
        keys=KEYS,
        rank=0,
        version=version_of_death(phase),
        phase=phase,
        pid=victim.process.pid,
    )
    ranks.wait()
    assert "DONE" in ranks.lines
    sent_line = f"SENT {version_of_death(phase)}"
    seconds = ranks.time_of(sent_line) - ranks.time_of("DEATH")
    print(f"{phase}: the survivor serves after {seconds:.2f} s")
    assert seconds < SERVES_WITHIN_SECONDS
    assert len(ranks.failures) == 1 and victim.url in ranks.failures[0]
    assert survivor.url not in ranks.failures[0]
    assert require_nothing_mixed(survivor) == ["1", "2", "3"]
    with open_receivers(tmp_path / "new", 1) as (replacement,):
        next_run = Ranks(tmp_path, urls=[survivor.url, replacement.url], versions=[4], keys=KEYS)
        next_run.wait()
        assert next_run.failures == []
        assert require_nothing_mixed(survivor)[-1] == "4"
        assert require_nothing_mixed(replacement) == ["4"]


@pytest.mark.nightly
def test_a_second_trainer_on_an_engine_is_noticed(
    tmp_path: Path, receivers: list[ReceiverProcess]
) -> None:
    """The second one closes the session of the first, whose trainer may be dead.

    The second one's sync is its first, which a run audits by value.
    """
    shared_receiver = receivers[0]
    shared_receiver.delay("/update_weights_from_distributed", 1.0)
    both = [
        Ranks(tmp_path, urls=[shared_receiver.url], versions=[version], keys=KEYS)
        for version in (1, 2)
    ]
    for ranks in both:
        ranks.wait()
    failures = [line for ranks in both for line in ranks.failures]
    print(*failures, sep="\n")
    assert any("nother trainer" in line for line in failures)
