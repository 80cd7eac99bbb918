"""Selectors for tests."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import PromptCursor, SelectorState
from megatron_rl.prompts.selection.selector import StepSelection
from megatron_rl.prompts.selection.uniform import UniformStep


@dataclass(frozen=True)
class Given:
    """The same prompts at each step."""

    prompts: Sequence[Prompt]
    samples: int

    def select(self, step: int) -> StepSelection:
        return UniformStep(self.prompts, self.samples)

    def state(self) -> SelectorState:
        return SelectorState(prompts=PromptCursor(epoch=0, position=0, digest=""))

    def restore(self, state: SelectorState) -> None:
        """There is nothing to go on with."""

    def widen(self) -> None:
        """There is nothing to forget."""
