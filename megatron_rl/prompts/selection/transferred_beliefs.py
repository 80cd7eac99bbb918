"""Beliefs of another run, as a new one begins with them (`selection.beliefs_from`).

They are those of another policy: as after a phase's `reset_certainty: all` nothing of them is believed at
first, and first groups show how far they hold (the doubt of `PassRatePrior`). Believed at once they
would hide what that policy had solved and this one has not; without certainty for good nothing of
them would be left. The other run's position, coins, calibration, and the doubt in what it was given
itself, stay with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl.contracts.belief_state import BEFORE_FIRST_STEP, NEVER_SAMPLED, BeliefState
from megatron_rl.prompts.jsonl import is_line
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.belief import Beliefs
from megatron_rl.prompts.selection.pass_rate_prior import weak_prior
from megatron_rl.prompts.source import PromptSource

_FIRST_GROUPS = (
    8.0  # worth of a stratum at most: those of this run decide soon how what nobody knows begins
)
# groups' worth of knowing nothing: a step or two of groups that bear the beliefs out outweigh it
_DOUBTED = 20.0


@dataclass(frozen=True)
class TransferredBeliefs:
    """told: key, value and checkpoint, for messages. digest: of the other run's prompts. warnings:
    of its files.
    """

    told: str
    digest: str
    beliefs: BeliefState
    warnings: tuple[str, ...] = ()

    def give(self, prompts: PromptSource) -> None:
        """Let a run on these prompts begin so. Raises `PromptDataError` where none of them is
        known, or all is damaged.

        A row of a file that is called by its line is known only where both runs have the very same
        prompts.
        """
        if problem := self.beliefs.problem():
            raise PromptDataError(
                f"{self.told}: its beliefs are damaged ({problem}). Give another checkpoint"
            )
        drawn = np.frombuffer(self.beliefs.last_group_steps, np.int32) != NEVER_SAMPLED
        named = np.array([not is_line(name) for name in self.beliefs.prompts], np.bool_)
        if self.digest == prompts.cursor.digest:
            named[:] = True
        begun = _at_the_start(self.beliefs, drawn & named)
        if not {prompt.id for prompt in prompts.train}.intersection(begun.prompts):
            raise PromptDataError(
                f"{self.told}: it is of another data set: it has beliefs of {int(drawn.sum())} prompts, and none is "
                f"among the {len(prompts.train)} training prompts here. {_remedy(int((drawn & ~named).sum()))}"
            )
        prompts.beliefs = begun


def _remedy(lines: int) -> str:
    """lines: prompts that are called by one."""
    other = "Give a run on this data, or leave it null"
    if not lines:
        return other
    return f"{lines} are called by the line of a file, which names nothing in another: give rows an `id`. {other}"


def _at_the_start(state: BeliefState, rows: npt.NDArray[np.bool_]) -> BeliefState:
    """The given rows, before step 1."""
    beliefs = Beliefs()
    beliefs.restore(state)
    means, variances = (array[rows].astype(np.float32).tobytes() for array in beliefs.handed_on())
    names = tuple(name for name, kept in zip(state.prompts, rows.tolist(), strict=True) if kept)
    seen = np.full(len(names), BEFORE_FIRST_STEP, np.int32).tobytes()
    return BeliefState(
        prompts=names,
        means=means,
        variances=variances,
        last_group_steps=seen,
        last_update_steps=seen,
        strata=tuple((task, tag, _lighter(*moments)) for task, tag, moments in state.strata),
        drift=state.drift,
        clock=BEFORE_FIRST_STEP,
        process_noise=state.process_noise,
        pass_rate_prior=weak_prior(_DOUBTED),
    )


def _lighter(
    count: float, total: float, squares: float, noise: float
) -> tuple[float, float, float, float]:
    share = min(1.0, _FIRST_GROUPS / count) if count else 1.0
    return share * count, share * total, share * squares, share * noise
