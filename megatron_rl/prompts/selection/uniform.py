"""Uniform selection: all prompts in turn, with the same number of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.prompts.selection.selector import RolloutRequest, SelectionResult, SingleRound
from megatron_rl.prompts.source import PromptSource


@dataclass
class UniformStep(SingleRound):
    """One round of `prompts`, `samples` rollouts of each. All groups are credited."""

    prompts: Sequence[Prompt]
    samples: int

    def first_round(self) -> list[RolloutRequest]:
        return [
            RolloutRequest(index, prompt, self.samples) for index, prompt in enumerate(self.prompts)
        ]

    def result(self) -> SelectionResult:
        return SelectionResult(tuple(self._groups[index] for index in sorted(self._groups)))

    def metrics(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Uniform:
    """Selects `rollout.prompts_per_step` prompts a step, in the source's order. See `Selector`."""

    source: PromptSource
    settings: RolloutSettings
    ignores_rollouts: ClassVar[bool] = True

    def select(self, step: int) -> UniformStep:
        prompts = self.source.take(self.settings.prompts_per_step)
        return UniformStep(prompts, self.settings.samples_per_prompt)

    def state(self) -> SelectorState:
        return SelectorState(prompts=self.source.cursor)

    def restore(self, state: SelectorState) -> None:
        self.source.seek(state.prompts)

    def inflate_variance(self) -> None:
        """Do nothing: there are no beliefs."""
