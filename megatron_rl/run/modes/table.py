"""The modes by name."""

from __future__ import annotations

from megatron_rl.run.modes.evaluate import evaluate
from megatron_rl.run.modes.mode import Mode
from megatron_rl.run.modes.profile import open_profile
from megatron_rl.run.modes.train import train
from megatron_rl.run.modes.train_only import train_on_recording
from megatron_rl.run.setup import RunSetup


def open_mode(setup: RunSetup) -> Mode:
    """Open the mode. Rank 0 only. Raises `PromptDataError`."""
    match setup.configuration.mode:
        case "eval":
            return evaluate
        case "profile":
            return open_profile(setup)
        case "train_only":
            return train_on_recording
        case _:
            return train
