"""Profiles chosen training steps with torch.profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class StepProfiler:
    """Writes a trace of the steps that this rank profiles.

    steps: the steps. directory: traces are `step-S-rank-R.json.gz` in it, for chrome://tracing and
    Perfetto. log: writes a line for people.
    """

    steps: Collection[int]
    rank: int
    directory: Path
    log: Callable[[str], None]

    @contextlib.contextmanager
    def profile_step(self, step: int) -> Iterator[None]:
        """Profile the body if the step was chosen.

        A trace that cannot be made or written costs itself, not the run.
        """
        if step not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        file = self.directory / f"step-{step}-rank-{self.rank}.json.gz"
        profiler = profile(activities=activities)
        try:
            profiler.start()
        except RuntimeError as error:
            self.log(f"warning: logger.profile_steps: step {step} has no trace ({error})")
            yield
            return
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                profiler.stop()
            raise
        try:
            profiler.stop()
            self.directory.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            self.log(f"warning: logger.profile_steps: {file} cannot be written ({error})")
        else:
            self.log(f"the trace of step {step} is in {file}")
