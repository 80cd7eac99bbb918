"""The modes by name."""

from __future__ import annotations

from megatron_rl.run.modes.evaluate import EvaluationMode
from megatron_rl.run.modes.mode import Mode
from megatron_rl.run.modes.profile import ProfileMode
from megatron_rl.run.modes.train import TrainingMode
from megatron_rl.run.modes.train_only import TrainOnlyMode
from megatron_rl.run.setup import RunSetup


def open_mode(setup: RunSetup) -> Mode:
    """Open the mode. Rank 0 only. Raises `PromptDataError`."""
    match setup.configuration.mode:
        case "eval":
            return EvaluationMode(setup)
        case "profile":
            return ProfileMode.open(setup)
        case "train_only":
            return TrainOnlyMode(setup)
        case _:
            return TrainingMode(setup)
