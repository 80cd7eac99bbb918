"""A user-defined environment: after an incorrect answer, the model may try once more.

With this folder on PYTHONPATH: environment.name=my_environment:SecondTry
"""

from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode import Episode
from megatron_rl.rewards.answers import canonical, last_number


class SecondTry(Environment):
    """The last answer is scored. Both answers are trained, but not the hint between them.

    `rollout.max_new_tokens` limits both answers and the hint together.
    """

    def __init__(self, hint: str = " no, again ") -> None:
        self.hint = hint

    async def play(self, episode: Episode) -> None:
        response = await episode.respond()
        answer = last_number(response.text)
        is_correct = answer is not None and canonical(answer) == canonical(episode.prompt.answer)
        if response.finish_reason is FinishReason.STOP and not is_correct:
            episode.observe(self.hint)
            await episode.respond()
