"""Profiles chosen training steps with torch.profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rl.contracts.commands import Command, Train
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.features.parts import FeatureParts


class StepProfiler(Observer):
    """Writes a trace of the steps that this rank profiles.

    steps: the steps. directory: traces are `step-S-rank-R.json.gz` in it, for chrome://tracing and
    Perfetto. log: writes a line for people.
    """

    def __init__(
        self,
        steps: Collection[int],
        *,
        rank: int,
        directory: Path,
        log: Callable[[str], None],
    ) -> None:
        self._steps = steps
        self._rank = rank
        self._directory = directory
        self._log = log

    def around(self, command: Command) -> contextlib.AbstractContextManager[None]:
        """Profile the training of a chosen step."""
        if not isinstance(command, Train):
            return contextlib.nullcontext()
        return self.profile_step(command.plan.step)

    @contextlib.contextmanager
    def profile_step(self, step: int) -> Iterator[None]:
        """Profile the body if the step was chosen.

        A trace that cannot be made or written costs itself, not the run.
        """
        if step not in self._steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        file = self._directory / f"step-{step}-rank-{self._rank}.json.gz"
        profiler = profile(activities=activities)
        try:
            profiler.start()
        except RuntimeError as error:
            self._log(f"warning: logger.profile_steps: step {step} has no trace ({error})")
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
            self._directory.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            self._log(f"warning: logger.profile_steps: {file} cannot be written ({error})")
        else:
            self._log(f"the trace of step {step} is in {file}")


def open_profiler(parts: FeatureParts) -> StepProfiler | None:
    """Return the profiler of this rank, None if it profiles no step."""
    settings = parts.configuration.logger
    rank = parts.setup.job.rank
    if rank != 0 or not settings.profile_steps:
        return None
    return StepProfiler(
        frozenset(settings.profile_steps),
        rank=rank,
        directory=parts.setup.directory.path / "profiles",
        log=parts.setup.progress.log,
    )
