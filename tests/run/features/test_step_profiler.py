"""Traces of chosen steps."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron_rl.run.features.profiler.step_profiler import StepProfiler


def test_a_chosen_step_has_a_trace_and_the_others_have_none(tmp_path: Path) -> None:
    lines: list[str] = []
    profiler = StepProfiler({2}, rank=1, directory=tmp_path / "profiles", log=lines.append)
    for step in (1, 2, 3):
        with profiler.profile_step(step):
            torch.ones(4, 4) @ torch.ones(4, 4)
    (file,) = (tmp_path / "profiles").iterdir()
    assert file.name == "step-2-rank-1.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert lines == [f"the trace of step 2 is in {file}"]


def test_a_trace_that_cannot_be_written_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file in the way")
    lines: list[str] = []
    profiler = StepProfiler({1}, rank=0, directory=tmp_path / "profiles", log=lines.append)
    with profiler.profile_step(1):
        pass
    assert len(lines) == 1 and lines[0].startswith("warning: logger.profile_steps: ")


def test_a_profiler_that_cannot_start_costs_the_trace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(profiler: object) -> None:
        raise RuntimeError("no access to performance counters")

    monkeypatch.setattr(torch.profiler.profile, "start", fail)
    lines: list[str] = []
    profiler = StepProfiler({1}, rank=0, directory=tmp_path / "profiles", log=lines.append)
    has_trained = False
    with profiler.profile_step(1):
        has_trained = True
    assert has_trained
    assert len(lines) == 1 and "step 1 has no trace" in lines[0]
