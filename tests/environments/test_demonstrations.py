"""Demonstrations: weight version and token budget."""

import pytest

from megatron_rl.environments.rollout_builder import RolloutRejected
from tests.support.scripted_model import ScriptedModel, open_episode


def test_demonstration_has_the_version_of_the_start_checkpoint() -> None:
    episode = open_episode(ScriptedModel([]), routes=None)
    episode.demonstrate("046")
    assert [segment.version for segment in episode.rollout().segments] == [0, 0]


def test_demonstration_may_fill_the_budget() -> None:
    exact = open_episode(ScriptedModel([]), budget=4, routes=None)
    exact.demonstrate("046")  # three digits and the end of sequence
    assert len(exact.rollout().segments[1].tokens) == 4
    with pytest.raises(RolloutRejected, match="4 tokens, room for 3"):
        open_episode(ScriptedModel([]), budget=3, routes=None).demonstrate("046")
