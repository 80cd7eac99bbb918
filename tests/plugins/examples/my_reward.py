"""A reward of your own: right, and the shorter the better.

With this folder on PYTHONPATH: reward.name=own_reward:RightAndShort reward.options='{limit: 24}'
"""

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import Scorer
from megatron_rl.rewards.answers import canonical, last_number


class RightAndShort(Scorer):
    """1 for the right last number, less a share of `penalty` that grows from `limit` characters to
    twice as many.

    Advantages compare `correctness`. What the reward lacks of it takes up to half of them
    (`credit.shaping`), so that a long right answer stays above a wrong one; groups that differ only
    in length are left out of training.
    """

    def __init__(self, limit: int, penalty: float = 0.5) -> None:
        if limit < 1 or not 0 <= penalty < 1:
            raise ValueError("limit must be at least 1, penalty at least 0 and below 1")
        self.limit, self.penalty = limit, penalty

    def check_answer(self, answer: str) -> None:
        if last_number(answer) is None:
            raise ValueError(f"the reference answer {answer!r} holds no number")

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        found = last_number(text) if finish_reason is FinishReason.STOP else None
        right = float(found is not None and canonical(found) == canonical(prompt.answer))
        excess = min(max(len(text) / self.limit - 1, 0.0), 1.0)
        return Verdict(
            reward=right - right * self.penalty * excess, correctness=right, answer=found
        )
