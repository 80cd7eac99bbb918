"""An environment of your own: whoever answers wrong is told so and may try once more.

With this folder on PYTHONPATH: environment.name=own_environment:SecondTry
"""

from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode import Episode
from megatron_rl.rewards.answers import canonical, last_number


class SecondTry(Environment):
    """The last answer is judged; both answers are trained, the hint between them is not.

    `rollout.max_new_tokens` bounds both answers and the hint together.
    """

    def __init__(self, hint: str = " no, again ") -> None:
        self.hint = hint

    async def play(self, episode: Episode) -> None:
        first = await episode.respond()
        found = last_number(first.text)
        right = found is not None and canonical(found) == canonical(episode.prompt.answer)
        if first.finish_reason is FinishReason.STOP and not right:
            episode.observe(self.hint)
            await episode.respond()
