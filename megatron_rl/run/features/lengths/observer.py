"""Measures how long rollouts are, and tells the queue how long others probably will be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.prompts.pass_rates import read_file
from megatron_rl.run.features.lengths.history import LengthHistory, LengthState
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.features.parts import FeatureParts
from megatron_rl.run.setup import RunSetup


class Lengths(Observer):
    """Measures every sampled group, whether it trains or not."""

    name = "lengths"

    def __init__(self, history: LengthHistory) -> None:
        self._history = history

    def after_sampling(self, groups: Sequence[Group], values: dict[str, float]) -> None:
        """Measure groups. Adds how well their lengths were known before."""
        known_groups = [group for group in groups if self._history.knows(group.prompt)]
        values["lengths/known"] = len(known_groups) / max(len(groups), 1)
        errors = [error for group in known_groups for error in self._squared_errors(group)]
        if errors:
            values["lengths/log_error"] = math.sqrt(sum(errors) / len(errors))
        for group in groups:
            lengths = [(rollout.num_generated, _is_cut(rollout)) for rollout in group.rollouts]
            self._history.add(group.prompt, lengths)

    def _squared_errors(self, group: Group) -> list[float]:
        """Return the squared errors of the logarithms of a group's tokens.

        A rollout that was cut off has no error if it was expected to be longer.
        """
        expected = self._history.expected_log(group.prompt)
        assert expected is not None
        errors = []
        for rollout in group.rollouts:
            if rollout.num_generated:
                error = math.log(rollout.num_generated) - expected
                errors.append(0.0 if _is_cut(rollout) and error < 0 else error**2)
        return errors

    def state(self) -> dict[str, Any]:
        """Return all measured lengths."""
        state: dict[str, Any] = msgspec.to_builtins(self._history.state())
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the lengths of a checkpoint, if it has some."""
        if state:
            self._history.restore(msgspec.convert(state, LengthState))


def _is_cut(rollout: RolloutRef) -> bool:
    return rollout.finish_reason is FinishReason.LENGTH


def open_lengths(parts: FeatureParts) -> Lengths | None:
    """Return the lengths on rank 0 of a run that trains or records with engines, None otherwise."""
    if parts.checkpoints is None or parts.connections is None:
        return None
    history = LengthHistory()
    _add_profile(history, parts.setup)
    parts.connections.queue.expected_tokens = history.expected_tokens
    return Lengths(history)


def _add_profile(history: LengthHistory, setup: RunSetup) -> None:
    """Add the mean lengths of `data.pass_rates`, if the model of this run has sampled them."""
    c = setup.configuration
    if c.data.pass_rates is None:
        return
    header, rates = read_file(c.data.pass_rates)
    mean_tokens = {rate.id: rate.mean_tokens for rate in rates if rate.mean_tokens}
    if mean_tokens and header.model != c.model.path:
        setup.progress.log(
            f"warning: data.pass_rates={c.data.pass_rates}: its lengths are of {header.model}, and "
            f"model.path={c.model.path}. They are not used: the run measures its own. Measure the "
            "pass rates with this model if its first steps are to begin with long responses"
        )
        return
    for prompt in setup.run_data.training_prompts.train:
        if prompt.id in mean_tokens:
            log_tokens = math.log(max(mean_tokens[prompt.id], 1.0))
            history.add_mean(prompt, log_tokens, max(header.samples, 1))
