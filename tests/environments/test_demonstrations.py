"""Worked responses at their edges: their version, and the budget they just fit."""

import pytest

from megatron_rl.environments.rollout_builder import RolloutRejected
from tests.support.scripted_model import ScriptedModel, open_episode


def test_nobody_sampled_it_so_it_has_the_version_of_the_start() -> None:
    episode = open_episode(ScriptedModel([]), routes=None)
    episode.demonstrate("046")
    assert [segment.version for segment in episode.rollout().segments] == [0, 0]


def test_it_may_fill_the_budget_and_not_exceed_it() -> None:
    exact = open_episode(ScriptedModel([]), budget=4, routes=None)
    exact.demonstrate("046")  # three digits and the end of sequence
    assert len(exact.rollout().segments[1].tokens) == 4
    with pytest.raises(RolloutRejected, match="4 tokens, room for 3"):
        open_episode(ScriptedModel([]), budget=3, routes=None).demonstrate("046")
