"""Supervised learning: the prompt's demonstration takes the place of a sampled response."""

from __future__ import annotations

from megatron_rl.environments.calculator import demonstrate_calls
from megatron_rl.environments.episode import Episode
from megatron_rl.environments.rollout_builder import RolloutRejected


class Demonstration:
    """Adds the demonstration that the prompt source wrote. Sends no request to an engine.

    with_calls: the demonstration holds calls of the calculator, with their results.
    """

    def __init__(self, *, with_calls: bool = False) -> None:
        self.with_calls = with_calls

    async def play(self, episode: Episode) -> None:
        """Play one episode. Raises `RolloutRejected` for a prompt without a demonstration."""
        prompt = episode.prompt
        if not prompt.demonstration:
            raise RolloutRejected(
                "no_demonstration",
                f"prompt {prompt.id} has no demonstration. Choose a data.source that writes them, "
                "or environment.name=single_turn",
            )
        if self.with_calls:
            demonstrate_calls(episode, prompt.demonstration)
        else:
            episode.demonstrate(prompt.demonstration)
