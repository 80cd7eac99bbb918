"""The facts of a run as one rank knows them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import Configuration
from megatron_rl.mcore.job import Job
from megatron_rl.models.shape import ModelShape
from megatron_rl.prompts.selection.transferred_beliefs import TransferredBeliefs
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.run.checkpoints.resume import ResumePoint


@dataclass(frozen=True)
class RunSetup:
    """Everything that a rank knows before Megatron is imported.

    beliefs: beliefs transferred from another run. warnings: lines for the user. Both are known to
    rank 0 alone. is_complete: the run was resumed, and nothing is left to do.
    """

    configuration: Configuration
    shape: ModelShape
    job: Job
    resume_point: ResumePoint
    directory: RunDirectory
    beliefs: TransferredBeliefs | None
    progress: Progress
    warnings: tuple[str, ...] = ()
    is_complete: bool = False
