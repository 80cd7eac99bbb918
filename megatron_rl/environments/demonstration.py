"""Supervised learning: the prompt's demonstration takes the place of a sampled response."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.environments.calculator import demonstrate_calls
from megatron_rl.environments.episode import Episode, EpisodeRules
from megatron_rl.environments.rollout_builder import RolloutRejected
from megatron_rl.models.tokenizer import Tokenizer
from sglang_bridge.generation import Generation


class Demonstration:
    """Adds the demonstration that the prompt source wrote. Sends no request to an engine.

    with_calls: the demonstration holds calls of the calculator, with their results.
    """

    def __init__(self, *, with_calls: bool = False) -> None:
        self.with_calls = with_calls

    async def play(self, episode: Episode) -> None:
        """Play one episode. Raises as `demonstrate` does."""
        self.demonstrate(episode)

    def check(self, prompt: Prompt, tokenizer: Tokenizer, max_new_tokens: int) -> None:
        """Raise as `demonstrate` does in an episode of the prompt, before it is played.

        max_new_tokens: limit of everything after the prompt.
        """
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=1.0)
        rules = EpisodeRules(sampling=sampling, routes=None, train_truncated=True)
        self.demonstrate(Episode(prompt, _refuse_to_sample, tokenizer, rules, rollout_id=prompt.id))

    def demonstrate(self, episode: Episode) -> None:
        """Add the demonstration of the episode's prompt.

        Raises ValueError for one that cannot be encoded, has wrong results of calls or ends twice;
        `RolloutRejected`, which is a ValueError, for a prompt without one, and for one that is
        longer than the episode may be.
        """
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


async def _refuse_to_sample(token_ids: Sequence[int], sampling: Sampling) -> Generation:
    raise AssertionError("a demonstration requests no response")
