"""Opens the prompt selector that the settings name."""

from __future__ import annotations

from megatron_rl.config.schema import RolloutSettings, SelectionSettings
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.oversample import Oversample
from megatron_rl.prompts.selection.selector import Selector
from megatron_rl.prompts.selection.uniform import Uniform
from megatron_rl.prompts.source import PromptSource


def open_selector(
    source: PromptSource, rollout: RolloutSettings, settings: SelectionSettings, *, seed: int
) -> Selector:
    """Open the selector of `selection.name`.

    seed: the run's seed.
    """
    if settings.name == "belief":
        return BeliefSelector(source, rollout, settings, seed=seed)
    if settings.name == "oversample":
        return Oversample(source, rollout, settings)
    return Uniform(source, rollout)
