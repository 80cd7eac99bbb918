"""The prompt's own worked response instead of a sampled one: supervised learning."""

from __future__ import annotations

from megatron_rl.environments.episode import Episode
from megatron_rl.environments.rollout_builder import RolloutRejected


class Demonstration:
    """Shows the worked response that the prompt source wrote; no engine is asked."""

    async def play(self, episode: Episode) -> None:
        prompt = episode.prompt
        if not prompt.demonstration:
            raise RolloutRejected(
                "not_worked",
                f"prompt {prompt.id} has no worked response; choose a data.source that writes them, or "
                "environment.name=single_turn",
            )
        episode.demonstrate(prompt.demonstration)
