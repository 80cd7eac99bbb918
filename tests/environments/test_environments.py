"""Opening and playing environments: built-in, user-defined and invalid ones."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from megatron_rl.config.schema import EnvironmentSettings
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.rollout import Role
from megatron_rl.environments.demonstration import Demonstration
from megatron_rl.environments.environment import SingleTurn, for_evaluation, open_environment
from megatron_rl.environments.rollout_builder import RolloutRejected
from tests.support.scripted_model import PROMPT, ScriptedModel, Turn, open_episode

TWO_TURNS = '''
"""Asks again when the first answer is not the reference."""

class SecondChance:
    def __init__(self, hint: str = "no,") -> None:
        self.hint = hint

    async def play(self, episode):
        response = await episode.respond()
        if episode.prompt.answer not in response.text:
            episode.observe(self.hint)
            await episode.respond()

class Ordinary:
    def play(self, episode):
        pass
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "second_chance.py").write_text(TWO_TURNS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "second_chance", raising=False)
    return "second_chance"


def test_single_turn_is_the_default() -> None:
    model = ScriptedModel([Turn.saying("046")])
    episode = open_episode(model)
    environment = open_environment(EnvironmentSettings())
    asyncio.run(environment.play(episode))
    assert isinstance(environment, SingleTurn)
    assert [s.role for s in episode.rollout().segments] == [Role.PROMPT, Role.RESPONSE]


def test_demonstration_uses_the_prompts_demonstration() -> None:
    environment = open_environment(EnvironmentSettings(name="demonstration"))
    episode = open_episode(ScriptedModel([]), routes=None)
    asyncio.run(environment.play(episode))
    assert episode.text == PROMPT.demonstration
    assert episode.rollout().segments[1].logprobs is None
    assert isinstance(for_evaluation(environment), SingleTurn)


def test_prompt_without_a_demonstration_is_rejected() -> None:
    episode = open_episode(
        ScriptedModel([]), prompt=msgspec.structs.replace(PROMPT, demonstration="")
    )
    with pytest.raises(RolloutRejected, match="prompt q has no demonstration") as error:
        asyncio.run(Demonstration().play(episode))
    assert error.value.reason == "no_demonstration"


def test_user_defined_environment(module: str) -> None:
    environment = open_environment(
        EnvironmentSettings(name=f"{module}:SecondChance", options={"hint": "no"})
    )
    assert for_evaluation(environment) is environment
    for first, turns in (("46", 1), ("4", 2)):
        model = ScriptedModel([Turn.saying(first), Turn.saying("046")])
        episode = open_episode(model)
        asyncio.run(environment.play(episode))
        assert len(model.requests) == turns
        assert [s.role for s in episode.rollout().segments].count(Role.TOOL) == turns - 1


def test_invalid_environments_are_refused_by_name(module: str) -> None:
    for name, options, words in (
        (f"{module}:SecondChances", {}, "environment.name=second_chance:SecondChances"),
        (f"{module}:SecondChance", {"hints": "x"}, "environment.options.hints"),
        (f"{module}:Ordinary", {}, "async def play"),
        ("second_chance_of_nobody:X", {}, "no module second_chance_of_nobody"),
    ):
        with pytest.raises(PluginError, match=words):
            open_environment(EnvironmentSettings(name=name, options=options))
