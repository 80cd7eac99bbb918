"""The conclusions of a soak from the times of steps and from samples of processes."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.lab.soak.effective_time import measure, model_share
from tests.lab.soak.resources import ResourceLog, Sample, descriptor_targets, kind_of


def make_sample(
    seconds: float, *, collectors: int, mebibytes: int, files: int, pipes: int = 0
) -> Sample:
    return Sample(
        seconds=seconds,
        counts=Counter(collector=collectors),
        memory=Counter(collector=mebibytes * 2**20),
        descriptors=Counter(collector=10 * collectors),
        targets={"collector": Counter(socket=10 * collectors - pipes, pipe=pipes)},
        files=files,
        shared_memory=0,
    )


def test_a_fault_costs_what_its_steps_took_longer() -> None:
    # Steps of two seconds; the fault at 11 makes one take twelve
    moments = [0, 2, 4, 6, 8, 10, 22, 24, 26, 28]
    times = measure({i: float(m) for i, m in enumerate(moments)}, [(11.0, "kill")], settle=5)
    assert times.step_seconds == 2
    assert [(r.fault, r.seconds, r.lost_seconds) for r in times.recoveries] == [("kill", 11, 10)]
    assert times.share == pytest.approx(9 * 2 / 28)


def test_a_step_that_a_second_fault_disturbs_counts_once() -> None:
    moments = [0, 2, 4, 14, 16, 26, 28, 30, 32]
    faults = [(5.0, "kill"), (17.0, "stop")]
    times = measure({i: float(m) for i, m in enumerate(moments)}, faults, settle=60)
    assert sum(r.lost_seconds for r in times.recoveries) == pytest.approx(16)


def test_a_run_without_faults_loses_nothing() -> None:
    times = measure({0: 0.0, 1: 2.0, 2: 4.0}, [], settle=5)
    assert (times.share, times.lost_seconds_per_fault) == (1, 0)


def test_the_model_scales_the_loss_with_the_number_of_gpus() -> None:
    # 507 GPUs fail once in a hundred hours
    assert model_share(3600.0, 507) == pytest.approx(0.99)
    assert model_share(36.0, 5070) == pytest.approx(0.999)


def test_growth_compares_samples_with_all_processes_of_a_kind() -> None:
    log = ResourceLog(Path())
    for seconds, mebibytes in ((0, 50), (10, 100), (20, 100), (30, 110), (40, 110)):
        log.samples.append(make_sample(seconds, collectors=2, mebibytes=mebibytes, files=7))
    # A collector was restarting
    log.samples.append(make_sample(41, collectors=1, mebibytes=55, files=9))
    rows = {row.name: row for row in log.growth(start=10, window=12)}
    assert rows["collector x 2, memory"].share == pytest.approx(0.1)
    assert rows["collector x 2, descriptors"].share == 0
    assert rows["files of the run"].after == 7
    assert ResourceLog(Path(), log.samples[:1]).growth(start=10, window=5) == []


def test_growth_names_what_the_descriptors_refer_to() -> None:
    log = ResourceLog(Path())
    for seconds, pipes in ((0, 2), (10, 2), (20, 3), (30, 3)):
        log.samples.append(
            make_sample(seconds, collectors=1, mebibytes=1, files=1, pipes=pipes),
        )
    rows = {row.name: row for row in log.growth(start=0, window=12)}
    assert rows["collector x 1, of them pipe"].after == 3
    assert "collector x 1, of them socket" not in rows


def test_descriptors_count_by_what_they_refer_to(tmp_path: Path) -> None:
    before = descriptor_targets(os.getpid())
    with (tmp_path / "samples-7.txt").open("w"), (tmp_path / "samples-12.txt").open("w"):
        after = descriptor_targets(os.getpid())
    name = re.sub(r"[0-9a-f]{8,}|\d+", "N", str(tmp_path / "samples-7.txt"))
    assert (after - before)[name] == 2


def test_processes_are_told_apart_by_their_command_lines() -> None:
    lines = {
        "python -m sglang_bridge.server.supervise -- python -m megatron_rl.rollouts": "supervisor",
        "python -m megatron_rl.rollouts.collector 127.0.0.1 1 0 0": "collector",
        "sglang::scheduler": "engine, scheduler",
        "python launch/train_rl.py": "rank",
        "sleep 1": "",
    }
    assert {line: kind_of(line) for line in lines} == lines
