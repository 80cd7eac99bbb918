"""The interface of everything that chooses a step's prompts, and how many rollouts each of them
gets.

No choice depends on the order in which groups arrive: a run that is resumed chooses as one that was
never stopped (tests/prompts/selection/test_uniform.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState


@dataclass(frozen=True)
class RolloutRequest:
    """Draw `samples` rollouts of a prompt.

    index: which of the step's groups. first_sample: how many it has already.
    """

    index: int
    prompt: Prompt
    samples: int
    first_sample: int = 0


@dataclass(frozen=True)
class SelectionResult:
    """What becomes of a step's groups, each in the order of their indices.

    groups: to be credited. stopped: flat ones that were not extended. surplus: more than the step
    wanted.
    """

    groups: tuple[Group, ...]
    stopped: tuple[Group, ...] = ()
    surplus: tuple[Group, ...] = ()


class StepSelection(Protocol):
    """The choices of one step."""

    def begin(self) -> list[RolloutRequest]:
        """The first round."""
        ...

    def answered(self, index: int, group: Group) -> RolloutRequest | None:
        """Hear of a group with all its rollouts so far; what is returned extends it."""
        ...

    def more(self) -> list[RolloutRequest]:
        """A further round, once nothing is outstanding; none: the step has what it wants, or may
        have.
        """
        ...

    def result(self) -> SelectionResult:
        """What became of the groups; called once, at the end."""
        ...

    def metrics(self) -> dict[str, float]:
        """Under `select/`; after `result`."""
        ...


class Selector(Protocol):
    """Chooses, step after step."""

    def select(self, step: int) -> StepSelection: ...

    def state(self) -> SelectorState:
        """Between two steps: all that `restore` needs to go on."""
        ...

    def restore(self, state: SelectorState) -> None:
        """Raises `PromptDataError` where the state is that of other prompts."""
        ...

    def widen(self) -> None:
        """What is believed of prompts loses its certainty, because something else is asked of them
        now.
        """
        ...
