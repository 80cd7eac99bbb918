"""The facts of a run as one rank knows them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_rl.config.schema import Configuration
from megatron_rl.mcore.job import Job
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.run.checkpoints.resume import ResumePoint
from megatron_rl.run.data import RunData


@dataclass(frozen=True)
class RunSetup:
    """Everything that a rank knows before Megatron is imported.

    data: on rank 0 alone.
    reference_digest: of the weights of the KL penalty's reference, empty without one.
    """

    configuration: Configuration
    shape: ModelShape
    job: Job
    resume_point: ResumePoint
    directory: RunDirectory
    data: RunData | None
    progress: Progress
    reference_digest: str = ""

    @property
    def run_data(self) -> RunData:
        """The data of the run. Rank 0 only."""
        assert self.data is not None
        return self.data

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response, from the tokenizer, the generation and the model config."""
        return Tokenizer.from_directory(self.configuration.model.path).eos_ids
