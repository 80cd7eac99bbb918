"""Opens the prompt selector that the settings name, and warns about its effect on credit."""

from __future__ import annotations

from megatron_rl.config.schema import CreditSettings, RolloutSettings, SelectionSettings
from megatron_rl.prompts.selection.acceptance import Acceptance
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


def credit_warning(selection: SelectionSettings, credit: CreditSettings) -> str:
    """Return a warning if zero-variance groups are credited otherwise than with uniform selection.

    "" if they are not.
    """
    if selection.name != "belief":
        return ""
    treatments = [("all_correct", credit.all_correct)]
    if selection.skip == "zero_variance":
        treatments.append(("all_incorrect", credit.all_incorrect))
    keys = [f"credit.{name}={value}" for name, value in treatments if value != "drop"]
    texts = []
    if keys and selection.reweight is None:
        texts.append(
            "prompts that are sampled less often count less. "
            f"selection.reweight={1 / Acceptance.minimum:g} gives all the same expected weight"
        )
    if keys and selection.probe_samples:
        texts.append(
            "a stopped probe counts by the predicted chance that its whole group is like it, which "
            "is as exact as the beliefs (docs/zero_variance.md)"
        )
    return f"warning: selection=belief with {' '.join(keys)}: {'; '.join(texts)}" if texts else ""
