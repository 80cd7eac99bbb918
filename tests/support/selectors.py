"""A selector that always chooses the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import PromptCursor, SelectorState
from megatron_rl.prompts.selection.selector import StepSelection
from megatron_rl.prompts.selection.uniform import UniformStep


@dataclass(frozen=True)
class FixedPrompts:
    """The same prompts at each step, `samples` rollouts of each."""

    prompts: Sequence[Prompt]
    samples: int
    ignores_rollouts: ClassVar[bool] = True

    def select(self, step: int) -> StepSelection:
        """Choose the prompts for any step."""
        return UniformStep(self.prompts, self.samples)

    def state(self) -> SelectorState:
        """Return the state of a selector that has chosen nothing yet."""
        return SelectorState(prompts=PromptCursor(epoch=0, position=0, digest=""))

    def restore(self, state: SelectorState) -> None:
        """Do nothing: there is no state to restore."""

    def inflate_variance(self) -> None:
        """Do nothing: there are no estimates."""
