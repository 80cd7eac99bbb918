"""Beliefs of another run, from which a new run starts (`selection.beliefs_from`).

They belong to another policy, so they are uninformative at first, and first groups show how far
they hold (the extra variance of `PassRatePrior`). If they were believed at once, they would hide
prompts that the other policy had solved and this one has not.

The other run's position, random acceptance, calibration, and the extra variance of its own
external estimates are not transferred.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.contracts.belief_state import BEFORE_FIRST_STEP, NEVER_SAMPLED, BeliefState
from megatron_rl.prompts.jsonl import is_line_id
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.beliefs.arcsine import Mask
from megatron_rl.prompts.selection.beliefs.beliefs import Beliefs
from megatron_rl.prompts.selection.beliefs.pass_rate_prior import uninformative_state
from megatron_rl.prompts.source import PromptSource

# Largest weight of a stratum's moments, in groups. First groups of the new run soon outweigh them.
_MAX_STRATUM_WEIGHT = 8.0
# Weight of the uninformative prior, in groups. One or two steps of groups that confirm the beliefs
# outweigh it.
_UNINFORMATIVE_WEIGHT = 20.0


@dataclass(frozen=True)
class TransferredBeliefs:
    """Beliefs of another run.

    origin: key, value and checkpoint, for messages.
    digest: digest of the other run's prompts.
    beliefs: state of the other run's beliefs.
    warnings: warnings about the files of the other run.
    """

    origin: str
    digest: str
    beliefs: BeliefState
    warnings: tuple[str, ...] = ()

    def apply_to(self, prompts: PromptSource) -> None:
        """Set the initial beliefs of a run with these prompts.

        Prompts without an id are identified by their line. They are known only if both runs have
        the same prompts.

        Raises `PromptDataError` if the beliefs are damaged or contain none of the prompts.
        """
        if problem := self.beliefs.problem():
            raise PromptDataError(
                f"{self.origin}: its beliefs are damaged ({problem}). Give another checkpoint"
            )
        last_group_steps = np.frombuffer(self.beliefs.last_group_steps, np.int32)
        was_sampled = last_group_steps != NEVER_SAMPLED
        is_line = np.array([is_line_id(name) for name in self.beliefs.prompts], np.bool_)
        if self.digest == prompts.cursor.digest:
            is_line[:] = False
        initial_beliefs = _initial_beliefs(self.beliefs, was_sampled & ~is_line)
        train_ids = {prompt.id for prompt in prompts.train}
        if not train_ids.intersection(initial_beliefs.prompts):
            num_sampled = int(was_sampled.sum())
            num_lines = int((was_sampled & is_line).sum())
            raise PromptDataError(
                f"{self.origin}: it belongs to another data set. It has beliefs about "
                f"{num_sampled} prompts, but about none of the {len(prompts.train)} training "
                f"prompts of this run. {_remedy(num_lines)}"
            )
        prompts.initial_beliefs = initial_beliefs


def _remedy(num_lines: int) -> str:
    """Return the remedy for beliefs about other prompts.

    num_lines: number of the prompts that are identified by their line.
    """
    remedy = "Give a run on this data, or leave selection.beliefs_from null"
    if not num_lines:
        return remedy
    return (
        f"{num_lines} prompts are identified by the line of their file, which is different in "
        f"another file: give rows an `id`. {remedy}"
    )


def _initial_beliefs(state: BeliefState, is_usable: Mask) -> BeliefState:
    """Return the beliefs of the usable rows as estimates from before the first step."""
    beliefs = Beliefs()
    beliefs.restore(state)
    means, variances = beliefs.current_estimates()
    names = tuple(
        name for name, usable in zip(state.prompts, is_usable.tolist(), strict=True) if usable
    )
    return BeliefState(
        prompts=names,
        means=means[is_usable].astype(np.float32).tobytes(),
        variances=variances[is_usable].astype(np.float32).tobytes(),
        last_group_steps=np.full(len(names), BEFORE_FIRST_STEP, np.int32).tobytes(),
        strata=tuple((task, tag, _limit_weight(*sums)) for task, tag, sums in state.strata),
        drift=state.drift,
        clock=BEFORE_FIRST_STEP,
        process_noise=state.process_noise,
        pass_rate_prior=uninformative_state(_UNINFORMATIVE_WEIGHT),
    )


def _limit_weight(
    count: float, angles: float, squares: float, noise: float
) -> tuple[float, float, float, float]:
    """Scale the moments of a stratum down to the largest weight."""
    factor = min(1.0, _MAX_STRATUM_WEIGHT / count) if count else 1.0
    return factor * count, factor * angles, factor * squares, factor * noise
